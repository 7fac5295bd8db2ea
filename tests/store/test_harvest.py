"""Harvests hold what raw torch hooks see of each text by itself, and nothing of padding."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import interpose as ip
from interpose.store import harvest as harvesting
from interpose.store.records import Commit, file_name
from tests.bounds import assert_near, rounding
from tests.models import tiny

TEXTS = [[3 + (5 * row + place) % 40 for place in range(2 + (3 * row) % 7)] for row in range(23)]
ROOT = Path(__file__).parents[2]


def build(name: str, kind: str = "causal") -> ip.TransformerModel:
    model = ip.wrap(tiny.build(name, kind))
    assert isinstance(model, ip.TransformerModel)
    return model


def harvest(model: ip.TransformerModel, folder: Path, **options: Any) -> ip.Store:
    given = {"texts": TEXTS, "site": "blocks.*.hook_resid_post", "segment_texts": 5, **options}
    return ip.harvest(
        model, given.pop("texts"), given.pop("site"), store=folder, progress=False, **given
    )


def by_hand(model: ip.TransformerModel, path: str, tokens: list[int]) -> Tensor:
    """What a module returns for one text alone, by a plain hook of torch."""
    found: list[Tensor] = []
    module = model.module.get_submodule(path)
    handle = module.register_forward_hook(
        lambda *call: found.append(
            (call[-1][0] if isinstance(call[-1], tuple) else call[-1]).clone()
        )
    )
    with torch.no_grad():
        model.module(input_ids=torch.tensor([tokens]))
    handle.remove()
    return found[0][0]


PATHS = {
    "llama": "model.layers.{}",
    "gpt2": "transformer.h.{}",
    "mamba": "backbone.layers.{}",
    "mixtral": "model.layers.{}",
    "bert": "bert.encoder.layer.{}",
}


@pytest.mark.parametrize("name", PATHS)
def test_every_vector_is_what_a_torch_hook_sees_of_its_text_alone(
    name: str, tmp_path: Path
) -> None:
    model = build(name, "causal" if name != "bert" else "masked")
    store = harvest(model, tmp_path / "s")
    assert (len(store), store.complete) == (len(TEXTS), True)
    assert store.tokens == store.vectors == sum(map(len, TEXTS))
    layers = [site.layer for site in store.sites.values()]
    assert len(layers) >= 2
    for row, tokens in enumerate(TEXTS):
        assert store.tokens_of(row).tolist() == tokens
        assert store.text_of(row) == (row, 0)
        for layer in layers:
            wanted = by_hand(model, PATHS[name].format(layer), tokens)
            assert_near(store[row]["resid_post", layer][0], wanted)


def test_texts_of_one_length_are_stored_to_the_bit(tmp_path: Path) -> None:
    model = build("gpt2")
    texts = [[3 + (row + place) % 40 for place in range(6)] for row in range(4)]
    store = harvest(model, tmp_path / "s", texts=texts, site="blocks.1.hook_resid_post")
    _, cache = model.run_with_cache(torch.tensor(texts), names_filter="blocks.1.hook_resid_post")
    assert torch.equal(
        torch.cat([store[row]["resid_post", 1] for row in range(4)]), cache["resid_post", 1]
    )


def test_files_are_those_of_the_safetensors_library_and_have_no_padding(tmp_path: Path) -> None:
    store = harvest(build("llama"), tmp_path / "s", dtype="bfloat16")
    payload = others = 0
    for number, segment in enumerate(store.segments):
        for name in segment.commit.files:
            path = segment.folder / name
            with safe_open(path, framework="pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            for key, tensor in tensors.items():
                assert torch.equal(tensor, segment.file(name)[key])
            if name.startswith("blocks"):
                assert tensors["values"].dtype == torch.bfloat16
                assert len(tensors["values"]) == sum(map(len, TEXTS[5 * number : 5 * number + 5]))
                payload += tensors["values"].nbytes
            else:
                others += path.stat().st_size
    assert payload == store.tokens * 2 * sum(site.shape[0] for site in store.sites.values())


def test_what_is_not_payload_is_at_most_eight_bytes_a_token_and_a_thousandth(
    tmp_path: Path,
) -> None:
    model = build("llama")
    texts = torch.randint(3, 40, (400, 64))
    store = ip.harvest(
        model, texts, ("resid_post", 0), store=tmp_path / "s", progress=False, batch_tokens=4096
    )  # fmt: skip
    (segment,) = store.segments
    sizes = {name: written.size for name, written in segment.commit.files.items()}
    payload = store.tokens * store.sites["blocks.0.hook_resid_post"].nbytes
    assert sizes.pop(file_name("blocks.0.hook_resid_post")) <= 1.001 * payload
    rest = sum(sizes.values()) + sum(f.stat().st_size for f in (tmp_path / "s").rglob("*.json"))
    names = (tmp_path / "s" / "store.json").stat().st_size  # the names of all sites: once
    assert rest - names <= 8 * store.tokens


def test_long_texts_become_rows_and_bos_begins_each(tmp_path: Path) -> None:
    model = ip.load("pocket")
    text = "The Eiffel Tower is in Paris and the cat sat on the mat by the old town wall"
    tokens = model.to_tokens(text, prepend_bos=True)[0].tolist()
    store = ip.harvest(
        model, [text, "The cat"], ("resid_post", 2), store=tmp_path / "s", length=5, prepend_bos=True,
        progress=False,
    )  # fmt: skip
    body = tokens[1:]
    for row in range(len(store) - 1):
        piece = [tokens[0], *body[4 * row : 4 * row + 4]]
        assert store.tokens_of(row).tolist() == piece
        assert store.text_of(row) == (0, 4 * row)
        _, cache = model.run_with_cache(torch.tensor([piece]), names_filter=("resid_post", 2))
        assert_near(store[row]["resid_post", 2], cache["resid_post", 2])
    assert store.text_of(-1) == (1, 0)


@pytest.mark.parametrize(
    "pos", [-1, [0, -1], slice(1, None, 2), [slice(0, 2), -1], range(1, 3)], ids=repr
)
def test_chosen_positions_are_kept_and_no_others(pos: Any, tmp_path: Path) -> None:
    model = build("llama")
    whole = harvest(model, tmp_path / "whole", site=("resid_post", 1))
    some = harvest(model, tmp_path / "some", site=("resid_post", 1), pos=pos)
    assert some.vectors < whole.vectors
    assert some.tokens == whole.tokens
    for row, tokens in enumerate(TEXTS):
        several = pos if isinstance(pos, (list, range)) else [pos]
        wanted: set[int] = set()
        for one in several:
            if isinstance(one, slice):
                wanted |= set(range(len(tokens))[one])
            elif -len(tokens) <= one < len(tokens):
                wanted.add(one % len(tokens))
        assert some.positions_of(row).tolist() == sorted(wanted)
        assert torch.equal(
            some[row]["resid_post", 1], whole[row]["resid_post", 1][:, sorted(wanted)]
        )
        for place in wanted:
            kept = some.gather(("resid_post", 1), row, place)
            assert torch.equal(kept, whole.gather(("resid_post", 1), row, place))
    assert not set(range(2, 9)) <= set(some.positions_of(2).tolist())


def test_a_word_as_position_is_where_it_stands(tmp_path: Path) -> None:
    model = ip.load("pocket")
    texts = ["The Eiffel Tower is in", "In the Eiffel Tower", "The cat"]
    store = ip.harvest(
        model, texts, ("resid_post", 2), store=tmp_path / "s", pos=" Tower", progress=False
    )  # fmt: skip
    found = [store.positions_of(row).tolist() for row in range(3)]
    said = [model.to_str_tokens(text) for text in texts]
    assert found == [[tokens.index(" Tower")] if " Tower" in tokens else [] for tokens in said]
    assert sum(map(len, found)) == 2
    with pytest.raises(IndexError, match="was not kept"):
        store.gather(("resid_post", 2), 0, 0)


# Bits.


def test_dtypes_are_torchs_own_casts(tmp_path: Path) -> None:
    model = build("gpt2")
    whole = harvest(model, tmp_path / "whole", site=("resid_post", 1))
    for dtype in (torch.bfloat16, torch.float16):
        store = harvest(model, tmp_path / str(dtype), site=("resid_post", 1), dtype=dtype)
        for row in range(len(TEXTS)):
            assert torch.equal(store[row]["resid_post", 1], whole[row]["resid_post", 1].to(dtype))


def test_eight_bits_are_within_half_a_step_of_each_vectors_own_scale(tmp_path: Path) -> None:
    model = build("gpt2")
    whole = harvest(model, tmp_path / "whole", site=("resid_post", 1))
    store = harvest(model, tmp_path / "s", site=("resid_post", 1), dtype="int8")
    for row in range(len(TEXTS)):
        wanted = whole[row]["resid_post", 1]
        found = store[row]["resid_post", 1]
        step = wanted.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7) ** 2
        assert bool(((found - wanted).abs() <= step / 2 + rounding(wanted)).all())
        assert bool(((found - wanted).abs() > 0).any())
    assert store.nbytes < whole.nbytes


def test_numbers_beyond_float16_are_refused_and_not_made_infinite(tmp_path: Path) -> None:
    model = build("llama")

    def large(value: Tensor, hook: Any) -> Tensor:
        return value * 1e6

    with pytest.raises(ip.NonFinite, match="bfloat16"):
        harvest(model, tmp_path / "s", dtype="float16", hooks=[("blocks.1.hook_resid_post", large)])
    assert len(ip.open_store(tmp_path / "s")) == 0


# Hooks.


def test_edits_that_are_live_change_values_and_are_written_down(tmp_path: Path) -> None:
    model = build("llama")
    site = "blocks.1.hook_resid_post"
    bare = harvest(model, tmp_path / "bare", site=site)
    edit = ip.zero("z", layer=0, head=1)
    given = harvest(model, tmp_path / "given", site=site, hooks=[edit])
    with model.hooks([edit]):
        around = harvest(model, tmp_path / "around", site=site)
    handle = model.register(edit)
    standing = harvest(model, tmp_path / "standing", site=site)
    handle.remove()
    assert not torch.allclose(given[3][site], bare[3][site], atol=1e-3)
    for store in (given, around, standing):
        assert torch.equal(store[3][site], given[3][site])
        assert store.about.hooks == (repr(edit),)
        (loaded,) = ip.load_edits(store.path / "hooks")
        assert loaded.to_dict() == edit.to_dict()
    assert bare.about.hooks == ()
    with pytest.raises(ip.FileError, match=r"store of something else: (hooks|edits)"):
        harvest(model, tmp_path / "bare", site=site, hooks=[edit])


def test_a_function_is_told_of_by_its_name(tmp_path: Path) -> None:
    def halve(value: Tensor, hook: Any) -> Tensor:
        return value / 2

    site = "blocks.1.hook_resid_post"
    store = harvest(build("llama"), tmp_path / "s", site=site, hooks=[(site, halve)])
    assert "halve" in store.about.hooks[0]
    bare = harvest(build("llama"), tmp_path / "bare", site=site)
    assert torch.equal(store[0][site], bare[0][site] / 2)


def test_the_module_is_as_it_was(tmp_path: Path) -> None:
    model = build("gpt2")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    hooks = [dict(module._forward_hooks) for module in model.module.modules()]
    state = torch.random.get_rng_state()
    harvest(model, tmp_path / "s")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [dict(module._forward_hooks) for module in model.module.modules()] == hooks
    after = model.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# Going on.


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Everything that counts in a store: the segments, the records, what it is of."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "unfinished" not in path.parts
    }


class Ended(Exception):
    pass


@pytest.mark.parametrize("after", [1, 20, 60])
def test_a_harvest_that_was_ended_goes_on_and_makes_the_same_bytes(
    after: int, tmp_path: Path
) -> None:
    model = build("llama")
    harvest(model, tmp_path / "whole")
    given: dict[str, Any] = {
        "site": "blocks.*.hook_resid_post", "store": tmp_path / "ended", "segment_texts": 5,
    }  # fmt: skip

    def end(done: int, total: int | None) -> bool:
        return done < after

    with pytest.raises(ip.Cancelled):
        ip.harvest(model, TEXTS, progress=end, **given)
    committed = len(ip.open_store(tmp_path / "ended"))
    assert committed < len(TEXTS)
    assert not list((tmp_path / "ended" / "unfinished").iterdir())
    ip.harvest(model, TEXTS, progress=False, **given)
    assert bytes_of(tmp_path / "ended") == bytes_of(tmp_path / "whole")


def killing(folder: Path, kills: int, *arguments: str) -> None:
    """A script that kills harvests; see there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.killing", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{kills} kills"), done.stdout
    wanted = bytes_of(folder / "whole")
    stores = [path for path in folder.iterdir() if path.name.startswith("killed")]
    assert stores
    for store in stores:
        assert bytes_of(store) == wanted
        assert ip.open_store(store).manifest() == ip.open_store(folder / "whole").manifest()


def test_ten_kills_leave_the_bytes_of_a_harvest_that_nobody_killed(tmp_path: Path) -> None:
    killing(tmp_path, 10, str(tmp_path), "10", "0")


def test_a_kill_just_before_a_record_is_there_leaves_nothing_beside_it(tmp_path: Path) -> None:
    killing(tmp_path, 4, "records", str(tmp_path))


@pytest.mark.exhaustive
def test_a_hundred_kills_leave_the_bytes_of_a_harvest_that_nobody_killed(tmp_path: Path) -> None:
    killing(tmp_path, 100, str(tmp_path), "100", "1")


def test_a_harvest_that_is_complete_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    harvest(model, tmp_path / "s")
    made: list[int] = []
    monkeypatch.setattr(
        vars(harvesting)["SegmentMaker"],
        "make",
        lambda self, shard, step: made.append(shard.number),
    )
    harvest(model, tmp_path / "s")
    assert made == []
    (tmp_path / "s" / "commits" / "00000002.json").unlink()
    harvest(model, tmp_path / "s")
    assert made == [2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"texts": [*TEXTS[:-1], [5, 6]]}, "texts.fingerprint"),
        ({"site": "blocks.0.hook_resid_post"}, "sites"),
        ({"pos": -1}, "pos"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"length": 4}, "texts.length"),
        ({"segment_texts": 6}, "plan.texts"),
        ({"batch_tokens": 100}, "plan.batch_tokens"),
    ],
    ids=str,
)
def test_another_harvest_does_not_go_into_a_store(change: Any, said: str, tmp_path: Path) -> None:
    model = build("llama")
    harvest(model, tmp_path / "s")
    before = bytes_of(tmp_path / "s")
    with pytest.raises(ip.FileError, match=f"is a store of something else: .*{said}"):
        harvest(model, tmp_path / "s", **change)
    assert bytes_of(tmp_path / "s") == before


def test_one_changed_weight_is_another_model(tmp_path: Path) -> None:
    model = build("llama")
    harvest(model, tmp_path / "s")
    weight = next(model.module.parameters())
    with torch.no_grad():
        weight.view(-1)[3] += 1e-6
    with pytest.raises(ip.FileError, match=r"model\.weights is"):
        harvest(model, tmp_path / "s")
    with torch.no_grad():
        first, second = weight.view(-1)[:2].tolist()
        weight.view(-1)[:2] = torch.tensor([second, first])
    assert first != second
    with pytest.raises(ip.FileError, match=r"model\.weights is"):
        harvest(model, tmp_path / "s")


def test_writers_beside_each_other_make_one_store(tmp_path: Path) -> None:
    model = build("llama")
    whole = harvest(model, tmp_path / "whole")
    for part in ((1, 3), (0, 3)):
        store = harvest(model, tmp_path / "parts", part=part)
        assert not store.complete
        for row in range(len(store)):  # what is there can be read
            number = store.text_of(row)[0]
            assert torch.equal(store[row]["resid_post", 1], whole[number]["resid_post", 1])
    harvest(model, tmp_path / "parts", part=(2, 3))
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def test_two_writers_of_the_same_segments_commit_each_once(tmp_path: Path) -> None:
    """Both run at a time: the second begins while the first is in the middle, and does what is left."""
    model = build("llama")
    harvest(model, tmp_path / "whole")

    def between(done: int, total: int | None) -> None:
        if done < 30:
            harvest(model, tmp_path / "both")

    ip.harvest(
        model, TEXTS, "blocks.*.hook_resid_post", store=tmp_path / "both", segment_texts=5, progress=between
    )  # fmt: skip
    assert bytes_of(tmp_path / "both") == bytes_of(tmp_path / "whole")


def test_a_reader_sees_what_is_committed_while_a_writer_works(tmp_path: Path) -> None:
    model = build("llama")
    counts: list[int] = []
    reader: list[ip.Store] = []

    def look(done: int, total: int | None) -> None:
        reader[:] = reader or [ip.open_store(tmp_path / "s")]
        reader[0].refresh()
        counts.append(len(reader[0]))
        for row in range(len(reader[0])):
            assert reader[0].tokens_of(row).tolist() == TEXTS[row]

    ip.harvest(
        model, TEXTS, ("resid_post", 0), store=tmp_path / "s", segment_texts=5, progress=look
    )  # fmt: skip
    reader[0].refresh()
    assert counts == sorted(counts)
    assert len(reader[0]) == len(TEXTS)


# Refusals.


def test_a_full_disk_says_what_to_do_and_leaves_what_was_committed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.killing", "limited", str(tmp_path / "s"), "30000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the disk is full" in done.stdout
    assert "goes on from there" in done.stdout


def test_a_disk_that_is_too_small_is_told_of_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5000))
    with pytest.raises(
        ip.FileError, match=r"about .* KB are needed for 112 tokens, and .* has 4.9 KB left"
    ):
        harvest(build("llama"), tmp_path / "s")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"site": "blocks.0.attn.hook_pattern"},
            ip.Unsupported,
            "has axes batch, head, query, key",
        ),
        ({"site": "blocks.0.hook_resid_pots"}, ip.SiteNotFound, "did you mean"),
        ({"site": None}, TypeError, "say which sites"),
        ({"texts": []}, ValueError, "there is no text"),
        ({"texts": 7}, TypeError, "texts are a text, several, tokens"),
        ({"texts": "texts.txt"}, FileNotFoundError, "there is no file 'texts.txt'"),
        ({"dtype": "float8"}, ValueError, "dtype is one of float32"),
        ({"length": 1}, ValueError, "length is 2 to"),
        ({"engine": "spark"}, ValueError, "engine is 'local' or 'ray'"),
        ({"workers": 2}, ValueError, "workers= is for engine='ray'"),
    ],
    ids=str,
)
def test_mistakes_are_answered(
    options: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        harvest(build("llama"), tmp_path / "s", **options)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ip.FileError, match="is there and is not a store"):
        harvest(build("llama"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_model_that_is_training_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    model.module.train()
    with pytest.raises(ip.Unsupported, match="training mode"):
        harvest(model, tmp_path / "s")


# Damage.


def damaged(folder: Path, change: Callable[[Path], object]) -> Path:
    store = harvest(build("llama"), folder)
    path = store.segments[1].folder / file_name("blocks.0.hook_resid_post")
    change(path)
    return path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flip, "its checksum is"),
        (shorten, "it is cut off"),
        (Path.unlink, "is gone, and was committed"),
    ],
)
def test_damage_is_told_of_and_mended_by_the_same_harvest(
    change: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    path = damaged(tmp_path / "s", change)
    store = ip.open_store(tmp_path / "s")
    good = store[0]["resid_post", 0]
    for look in (lambda: store[6], lambda: store.gather(("resid_post", 0), [6], [0]), store.verify):
        with pytest.raises(ip.FileError, match=said) as caught:
            look()
        assert str(path) in str(caught.value)
        assert "store.drop_damaged()" in str(caught.value)
    assert torch.equal(store[0]["resid_post", 0], good)
    assert store.drop_damaged() == [1]
    harvest(build("llama"), tmp_path / "s")
    ip.open_store(tmp_path / "s").verify()
    harvest(build("llama"), tmp_path / "whole")
    assert bytes_of(tmp_path / "s") == bytes_of(tmp_path / "whole")


def test_a_record_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    harvest(build("llama"), tmp_path / "s")
    path = tmp_path / "s" / "commits" / "00000001.json"
    said = json.loads(path.read_text())
    said["commit"]["rows"] = 4
    path.write_text(json.dumps(said))
    with pytest.raises(ip.FileError, match="checksum is another"):
        ip.open_store(tmp_path / "s")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ip.FileError, match="is not JSON"):
        ip.open_store(tmp_path / "s")


def test_files_that_no_commit_names_are_nobodys(tmp_path: Path) -> None:
    harvest(build("llama"), tmp_path / "s")
    before = ip.open_store(tmp_path / "s").manifest()
    (tmp_path / "s" / "segments" / "00000077-01234567").mkdir()
    (tmp_path / "s" / "notes.txt").write_text("mine")
    (tmp_path / "s" / "commits" / ".hidden.json").write_text("{")
    (tmp_path / "s" / "unfinished" / "elsewhere~1~ab").mkdir()
    assert harvest(build("llama"), tmp_path / "s").manifest() == before


@pytest.mark.parametrize("folder", ["../../outside", "/etc", "00000001-ABCDEFGH"])
def test_a_commit_cannot_lead_out_of_its_store(folder: str, tmp_path: Path) -> None:
    store = harvest(build("llama"), tmp_path / "s")
    commit = store.segments[1].commit
    for change in ({"folder": folder}, {"files": {f"../{folder}": {"size": 1, "sha256": ""}}}):
        fields = {name: getattr(commit, name) for name in Commit.__slots__}
        forged = Commit(**{**fields, "files": {}, **change})
        if isinstance(change.get("files"), dict):
            text = forged_json(forged, change["files"])
        else:
            text = forged.to_json()
        (tmp_path / "s" / "commits" / "00000001.json").write_text(text)
        with pytest.raises(ip.FileError, match="should be"):
            ip.open_store(tmp_path / "s")


def forged_json(commit: Commit, files: dict[str, Any]) -> str:
    from interpose.store.records import _canonical, _hash

    said = json.loads(commit.to_json())["commit"] | {"files": files}
    return _canonical({"commit": said, "sha256": _hash(_canonical(said))})
