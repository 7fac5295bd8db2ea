"""Methods that take a store where they take texts find the numbers that the live model gives them on these texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import interpose as ip
from tests.bounds import assert_near
from tests.models import tiny

pytestmark = pytest.mark.bits
NOUNS = "cat dog key bird car table tree lamp".split()
TEXTS = [f"The {noun} near the {other}" for noun in NOUNS for other in ("door", "old door", "keys")]
LABELS = ["moves" if text.split()[1] in [*NOUNS[:2], "bird", "car"] else "stays" for text in TEXTS]
EVERY_LAYER = ["blocks.*.hook_resid_post"]


@pytest.fixture(scope="module")
def model() -> ip.TransformerModel:
    found = ip.load("pocket").requires_grad_(False)
    assert isinstance(found, ip.TransformerModel)
    return found


@pytest.fixture(scope="module")
def store(model: ip.TransformerModel, tmp_path_factory: pytest.TempPathFactory) -> ip.Store:
    folder = tmp_path_factory.mktemp("stores") / "whole"
    return filled(model, folder, EVERY_LAYER)


def filled(model: ip.TransformerModel, folder: Path, site: Any, **options: Any) -> ip.Store:
    texts = options.pop("texts", TEXTS)
    return ip.harvest(model, texts, site, store=folder, progress=False, segment_texts=7, **options)


def no_runs(monkeypatch: pytest.MonkeyPatch, model: ip.TransformerModel) -> None:
    """From now on the model cannot run."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the model ran")

    for way in ("run_with_cache", "run_with_hooks", "__call__"):
        monkeypatch.setattr(type(model), way, refuse)


@pytest.mark.parametrize("pos", [-1, 1, " near", [1 + n % 3 for n in range(len(TEXTS))]], ids=str)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_probe_of_a_store_is_the_probe_of_its_texts(
    pos: Any,
    streamed: bool,
    model: ip.TransformerModel,
    store: ip.Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {
        "labels": LABELS, "pos": pos, "layer": [0, 3], "stream": streamed, "progress": False,
        "folds": 3, "strength": 0.1,
    }  # fmt: skip
    wanted = ip.probe(model, TEXTS, **given)
    no_runs(monkeypatch, model)
    found = ip.probe(model, store, **given)
    assert found.axes == wanted.axes
    assert found.classes == ["moves", "stays"]
    assert torch.equal(found.folds, wanted.folds)
    # Weights of nearly equal examples amplify: by the scales that features are divided by, and the inverse of strength.
    assert_near(found.weights.float(), wanted.weights.float(), times=100)
    assert float(wanted.weights.abs().max()) > 0.01
    assert found.protocol["forwards"] == 0
    assert wanted.protocol["forwards"] > 0


def test_a_probe_reads_one_head_of_a_store(model: ip.TransformerModel, tmp_path: Path) -> None:
    store = filled(model, tmp_path / "s", ["blocks.2.attn.hook_z"], pos=-1)
    given: dict[str, Any] = {
        "labels": LABELS, "site": "z", "layer": [2], "head": 3, "kind": "difference_of_means", "progress": False,
    }  # fmt: skip
    wanted, found = ip.probe(model, TEXTS, **given), ip.probe(model, store, **given)
    assert_near(found.weights.float(), wanted.weights.float(), times=10)
    with pytest.raises(ValueError, match="Say which head"):
        ip.probe(model, store, **{**given, "head": None})


@pytest.mark.parametrize("batch_size", [2, 16])
def test_the_places_where_units_are_largest_are_those_of_the_live_model(
    batch_size: int, model: ip.TransformerModel, store: ip.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "site": "resid_post", "layer": 3, "neuron": [5, 60, 7], "k": 4, "context": 2, "skip_first": True,
        "batch_size": batch_size, "progress": False,
    }  # fmt: skip
    wanted = ip.max_activating(model, TEXTS, **given)
    monkeypatch.setattr("interpose.methods.max_activating._CHUNK", 2)  # several parts
    no_runs(monkeypatch, model)
    found = ip.max_activating(model, store, **given)
    assert_near(found.values, wanted.values)
    assert found.count == wanted.count == len(TEXTS)
    assert found.protocol["tokens"] == wanted.protocol["tokens"]
    monkeypatch.undo()
    # Texts that begin alike have values equal to rounding, which may change places. What is said of each is true:
    for unit, neuron in enumerate(given["neuron"]):
        for rank in range(given["k"]):
            text, pos = int(found.texts[unit, rank]), int(found.positions[unit, rank])
            tokens = model.to_tokens(TEXTS[text])[0]
            _, cache = model.run_with_cache(tokens[None], names_filter=("resid_post", 3))
            there = cache["resid_post", 3][0, :, neuron]
            assert_near(found.values[unit, rank], there[pos], there)
            before, behind = max(0, 2 - pos), max(0, pos + 3 - len(tokens))
            window = slice(before, 5 - behind)
            inside = slice(max(0, pos - 2), pos + 3)
            assert torch.equal(found.windows[unit, rank, window], tokens[inside])
            assert_near(found.activations[unit, rank, window], there[inside], there)
            assert int((found.windows[unit, rank] < 0).sum()) == before + behind


def test_statistics_of_a_store_are_those_of_its_texts(
    model: ip.TransformerModel, store: ip.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = [[text] for text in TEXTS]
    for site in ("resid_post", "blocks.3.hook_resid_post", [("resid_post", 1), ("resid_post", 2)]):
        wanted = ip.activation_statistics(model, loader, site, progress=False)
        found = ip.activation_statistics(model, store, site, progress=False)
        assert [row.site for row in found.rows] == [row.site for row in wanted.rows]
        for mine, theirs in zip(found.rows, wanted.rows):
            assert mine.count == theirs.count == store.tokens
            for part in ("mean", "variance", "minimum", "maximum"):
                # Computed in float32, and only added up in float64.
                size = getattr(theirs, part).float()
                assert_near(getattr(mine, part).float(), size, theirs.maximum.float())
    no_runs(monkeypatch, model)
    assert len(ip.activation_statistics(model, store).rows) == len(store.sites)


def test_a_function_vector_of_a_store_is_that_of_its_texts(
    model: ip.TransformerModel, tmp_path: Path
) -> None:
    sites = ["blocks.*.attn.hook_z", "blocks.*.attn.hook_out", "blocks.*.hook_attn_out"]
    store = filled(model, tmp_path / "s", sites, pos=-1)
    for given in (
        {"corrupt": ["The cat"], "answer": " is", "head": 3},
        {"head": [(1, 2), (4, 0)]},
    ):
        wanted = ip.function_vector(model, TEXTS, **given, progress=False)  # type: ignore[arg-type]
        found = ip.function_vector(model, store, **given, progress=False)  # type: ignore[arg-type]
        assert_near(found.values.nan_to_num(), wanted.values.nan_to_num(), 1.0)
        assert found.heads == wanted.heads
        assert_near(found.parts, wanted.parts)
        assert found.protocol["forwards"] < wanted.protocol["forwards"]


def test_a_tuned_lens_of_a_store_is_that_of_its_texts(
    model: ip.TransformerModel, store: ip.Store
) -> None:
    given: dict[str, Any] = {"steps": 3, "batch_size": 4, "progress": False}
    wanted, found = (ip.TunedLens.fit(model, texts, **given) for texts in (TEXTS, store))
    assert found.shape == wanted.shape
    assert_near(found.kl, wanted.kl, 10.0)
    # Adam's first steps are signs of gradients: where one is near zero, its sign is rounding's. Most are not.
    same = (found.matrices - wanted.matrices).abs() <= 1e-4
    assert float(wanted.matrices.abs().mean()) > 5e-4
    assert float(same.float().mean()) > 0.99


def test_a_store_of_fewer_bits_is_as_near_as_its_dtype(
    model: ip.TransformerModel, tmp_path: Path
) -> None:
    store = filled(model, tmp_path / "s", [("resid_post", 3)], dtype="bfloat16")
    given: dict[str, Any] = {"site": "resid_post", "layer": 3, "progress": False, "neuron": [5, 9]}
    wanted = ip.max_activating(model, TEXTS, **given)
    found = ip.max_activating(model, store, **given)
    assert found.values.dtype == wanted.values.dtype == torch.float32
    step = torch.finfo(torch.bfloat16).eps * float(wanted.values.abs().max())
    assert bool(((found.values - wanted.values).abs() <= step).all())
    assert not torch.equal(found.values, wanted.values)


@pytest.mark.parametrize(("name", "kind"), [("bert", "masked"), ("gpt2", "causal")])
def test_other_models_are_read_alike(name: str, kind: str, tmp_path: Path) -> None:
    model = ip.wrap(tiny.build(name, kind))
    assert isinstance(model, ip.TransformerModel)
    texts = [[3 + (5 * row + place) % 40 for place in range(3 + row % 3)] for row in range(12)]
    store = filled(model, tmp_path / "s", [("resid_post", 1)], texts=texts)
    given: dict[str, Any] = {"site": "resid_post", "layer": 1, "progress": False, "k": 3}
    wanted, found = (ip.max_activating(model, one, **given) for one in (texts, store))
    assert_near(found.values, wanted.values)


# Refusals.


def refused(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_a_site_that_a_store_lacks_is_told_of_with_what_to_write(
    model: ip.TransformerModel, store: ip.Store
) -> None:
    said = (
        r"this needs 'blocks.0.attn.hook_z'.*the store has 'blocks.0.hook_resid_post'.*"
        r"ip.harvest\(model, texts, \['blocks.0.attn.hook_z'"
    )
    given: dict[str, Any] = {"progress": False}
    refused(
        lambda: ip.probe(model, store, LABELS, site="z", head=0, layer=[0], **given),
        ip.SiteNotFound,
        said,
    )
    refused(
        lambda: ip.max_activating(model, store, site="z", head=0, layer=0, **given),
        ip.SiteNotFound,
        said,
    )
    refused(
        lambda: ip.activation_statistics(model, store, ("z", 0), **given), ip.SiteNotFound, said
    )
    refused(lambda: ip.function_vector(model, store, head=[(0, 0)]), ip.SiteNotFound, said)


def calls_of(model: ip.TransformerModel, store: ip.Store) -> dict[str, Any]:
    return {
        "probe": lambda: ip.probe(model, store, LABELS, pos=0, layer=[3], progress=False),
        "max_activating": lambda: ip.max_activating(
            model, store, site="resid_post", layer=3, progress=False
        ),
        "activation_statistics": lambda: ip.activation_statistics(model, store, progress=False),
        "TunedLens.fit": lambda: ip.TunedLens.fit(model, store, steps=1, progress=False),
        "function_vector": lambda: ip.function_vector(model, store, head=[(0, 0)]),
    }


METHODS = ["probe", "max_activating", "activation_statistics", "TunedLens.fit", "function_vector"]


@pytest.mark.parametrize("method", METHODS)
def test_a_store_of_another_model_is_refused(
    method: str, model: ip.TransformerModel, store: ip.Store
) -> None:
    other = ip.wrap(tiny.build("gpt2", "causal"))
    assert isinstance(other, ip.TransformerModel)
    refused(
        calls_of(other, store)[method],
        ip.FileError,
        "is a store of another model: its config is '[0-9a-f]{8}' there",
    )
    weight = next(model.module.parameters())
    with torch.no_grad():
        before = weight[3, 3].clone()
        weight[3, 3] += 1
        refused(calls_of(model, store)[method], ip.FileError, "its weights are others")
        weight[3, 3] = before
    if method in ("probe", "max_activating", "activation_statistics"):
        calls_of(model, store)[method]()  # as it was


@pytest.mark.parametrize("method", METHODS[:4])
def test_a_store_of_some_positions_is_refused_where_others_are_needed(
    method: str, model: ip.TransformerModel, tmp_path: Path
) -> None:
    some = filled(model, tmp_path / "some", EVERY_LAYER, pos=-1)
    refused(
        calls_of(model, some)[method],
        (IndexError, ip.Unsupported),  # type: ignore[arg-type]
        "position 0 of that row was not kept|has some positions of each text only",
    )
    found = ip.probe(model, some, LABELS, layer=[3], progress=False)
    assert_near(found.values, ip.probe(model, TEXTS, LABELS, layer=[3], progress=False).values)


def test_a_store_of_edited_values_is_read_and_not_mixed_with_runs_of_the_model_as_it_is(
    model: ip.TransformerModel, tmp_path: Path
) -> None:
    edit = ip.zero("mlp_out", layer=1)
    store = filled(model, tmp_path / "s", EVERY_LAYER, hooks=[edit])
    given: dict[str, Any] = {"site": "resid_post", "layer": 3, "neuron": [5], "progress": False}
    with model.hooks([edit]):
        wanted = ip.max_activating(model, TEXTS, **given)
    assert_near(ip.max_activating(model, store, **given).values, wanted.values)
    assert (
        float((ip.max_activating(model, TEXTS, **given).values - wanted.values).abs().max()) > 0.1
    )
    refused(
        lambda: ip.TunedLens.fit(model, store, steps=1, progress=False),
        ip.Unsupported,
        r"filled while .*zero\('mlp_out', layer=1\).* changed values",
    )


def test_mistakes_with_stores_are_answered(
    model: ip.TransformerModel, store: ip.Store, tmp_path: Path
) -> None:
    refused(
        lambda: ip.probe(model, store, LABELS, prepend_bos=True), ValueError, "leave prepend_bos"
    )
    refused(lambda: ip.probe(model, store, LABELS[1:]), ValueError, "23 labels for 24 texts")
    refused(lambda: ip.logit_lens(model, store), TypeError, "was given a store.*ip.probe")
    refused(
        lambda: ip.sweep(model, store, site="z", metric=ip.metrics.logit(1)),
        TypeError,
        "was given a store",
    )
    refused(
        lambda: ip.activation_statistics(model, store, unit_axis=1), ValueError, "leave unit_axis"
    )
    with pytest.raises(ip.Cancelled):
        ip.harvest(
            model, TEXTS, EVERY_LAYER, store=tmp_path / "none", progress=lambda *_: False
        )  # fmt: skip
    empty = ip.open_store(tmp_path / "none")
    refused(lambda: ip.probe(model, empty, LABELS), ValueError, "has no rows yet")
