"""`ip.StoreLog`: what is in the store is what `ip.harvest` puts there, and what raw hooks see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose as ip
from tests.models.texts import speaking

TEXTS = ["the cat sat", "a dog ran in the park and the cat saw it", "when", "the dog sat"]
SITES: list[Any] = [("resid_post", 0), ("z", 1)]


def logged(model: Any, folder: Path, texts: list[str] = TEXTS, **options: Any) -> ip.Store:
    with ip.StoreLog(SITES, store=folder, **options) as log, torch.no_grad(), model.hooks([log]):
        for at in range(0, len(texts), 3):
            model(texts[at : at + 3], padding_side="left")
    return ip.open_store(folder)


@pytest.mark.parametrize("segment_bytes", [1, 2**28])
def test_the_store_has_the_rows_that_a_harvest_puts_there(
    tmp_path: Path, segment_bytes: int
) -> None:
    model = speaking("llama")
    store = logged(model, tmp_path / "seen", segment_bytes=segment_bytes)
    expected = ip.harvest(model, TEXTS, SITES, store=tmp_path / "all", progress=False)
    assert store.complete
    assert len(store.segments) == (2 if segment_bytes == 1 else 1)
    assert len(store) == len(expected) == 4
    assert store.sites.keys() == expected.sites.keys()
    assert dict(store.sites) == dict(expected.sites)
    for row in range(4):
        assert torch.equal(store.tokens_of(row), expected.tokens_of(row))
        assert store.text_of(row) == (row, 0)
        for name in store.sites:
            torch.testing.assert_close(store[row][name], expected[row][name], rtol=1e-4, atol=1e-5)
    one, other = store.statistics().rows, expected.statistics().rows
    for mine, theirs in zip(one, other):
        assert mine.count == theirs.count
        torch.testing.assert_close(mine.mean, theirs.mean, rtol=1e-4, atol=1e-5)
    store.verify()


def test_a_store_is_gone_on_with_and_another_is_refused(tmp_path: Path) -> None:
    model = speaking("llama")
    logged(model, tmp_path / "seen", TEXTS[:3])
    store = logged(model, tmp_path / "seen", TEXTS[3:])
    assert [store.text_of(row)[0] for row in range(4)] == [0, 1, 2, 3]
    whole = logged(model, tmp_path / "whole")
    for row in range(4):
        assert torch.equal(store[row]["resid_post", 0], whole[row]["resid_post", 0])
    other = ip.StoreLog(("resid_post", 1), store=tmp_path / "seen")
    with pytest.raises(ip.FileError, match="is a store of something else"), other:
        model.run_with_hooks(TEXTS[0], hooks=[other])


def test_a_pass_that_failed_is_not_in_it(tmp_path: Path) -> None:
    model = speaking("llama")

    fails: list[bool] = []

    def fail(value: torch.Tensor, hook: Any) -> None:
        if fails:
            raise ZeroDivisionError

    with ip.StoreLog(SITES, store=tmp_path / "seen") as log, torch.no_grad():
        hooks = [log, ip.FunctionHook(("q", 1), fail)]
        model.run_with_hooks(TEXTS[0], hooks=hooks)
        fails.append(True)
        with pytest.raises(ZeroDivisionError):
            model.run_with_hooks(TEXTS[1], hooks=hooks)
        fails.clear()
        model.run_with_hooks(TEXTS[2], hooks=hooks)
    store = ip.open_store(tmp_path / "seen")
    assert [len(store.tokens_of(row)) for row in range(len(store))] == [
        model.to_tokens(TEXTS[number]).shape[1] for number in (0, 2)
    ]


def train(model: Any) -> Any:
    with torch.no_grad():
        model.module.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    return model


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (train, "other weights"),
        (lambda model: speaking("llama", layers=3), "another model"),
        (lambda model: model.register(ip.zero(("z", 0))) and model, "other edits"),
    ],
    ids=["trained", "another", "edited"],
)
def test_what_is_of_another_model_is_refused_and_what_came_before_is_kept(
    now: Any, what: str, tmp_path: Path
) -> None:
    model = speaking("llama")
    log = ip.StoreLog(SITES, store=tmp_path / "seen")
    _, before = model.run_with_cache(TEXTS[0], names_filter=SITES)
    with log, torch.no_grad():
        model.run_with_hooks(TEXTS[0], hooks=[log])
        model.module.load_state_dict(model.module.state_dict())  # the same numbers
        model.run_with_hooks(TEXTS[0], hooks=[log])
        changed = now(model)
        with pytest.raises(ip.FileError, match=what):
            changed.run_with_hooks(TEXTS[0], hooks=[log])
    store = ip.open_store(tmp_path / "seen")
    assert len(store) == 2
    for row in range(2):
        assert torch.equal(store[row]["resid_post", 0], before["resid_post", 0])
    for handle in model.list_hooks():
        handle.remove()
    if what == "other weights":
        with pytest.raises(ip.FileError, match="its weights are others"):
            store.must_be_of(model)
    else:
        store.must_be_of(model)


def test_edits_that_were_live_are_said_and_what_is_not_committed_can_be_dropped(
    tmp_path: Path,
) -> None:
    model = speaking("llama")
    handle = model.register(ip.scale(("resid_pre", 0), 2.0))
    log = ip.StoreLog(SITES, store=tmp_path / "seen", dtype=torch.bfloat16)
    with torch.no_grad():
        model.run_with_hooks(TEXTS[0], hooks=[log])
        log.clear()
        model.run_with_hooks(TEXTS[1], hooks=[log])
        log.flush()
    store = log.close()
    handle.remove()
    assert store is not None
    assert len(store) == 1
    assert store[0]["resid_post", 0].dtype == torch.bfloat16
    about = json.loads((tmp_path / "seen" / "store.json").read_text())
    assert len(about["hooks"]) == 1
    assert about["hooks"][0].startswith("scale(")
    assert [repr(edit) for edit in ip.load_edits(tmp_path / "seen" / "hooks")] == about["hooks"]
    empty = ip.StoreLog(SITES, store=tmp_path / "none")
    assert empty.close() is None
    assert not (tmp_path / "none").exists()
    with pytest.raises(ip.Unsupported, match="goes on from another, as in generating"):
        model.generate(TEXTS[0], max_new_tokens=2, hooks=[ip.StoreLog(SITES, store=tmp_path / "g")])
