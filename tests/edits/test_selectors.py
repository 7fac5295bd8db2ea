"""One language for reading and writing: what a selector reads is what an edit of it writes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import interpose as ip
from tests.edits.models import LAYERS, ids, wrapped

ROWS, LENGTH, HEADS, WIDTH = 3, 6, 4, 8


def z(model: Any, *hooks: Any, names_filter: Any = ("z", 1)) -> ip.Cache:
    with torch.no_grad():
        return model.run_with_cache(ids(), names_filter=names_filter, hooks=hooks)[1]


# Which sites.


@pytest.mark.parametrize(
    ("where", "layers"),
    [
        ({"layer": 1}, [1]),
        ({"layer": -1}, [2]),
        ({"layer": [2, 0]}, [0, 2]),
        ({"layer": range(1, 3)}, [1, 2]),
        ({"layer": slice(1, None)}, [1, 2]),
        ({"layer": slice(None, -1)}, [0, 1]),
        ({"layer": "all"}, [0, 1, 2]),
        ({}, [0, 1, 2]),
        ({"layer": "all", "exclude": {"layer": [0, -1]}}, [1]),
        ({"exclude": ip.at("blocks.1.*.hook_z")}, [0, 2]),
        ({"exclude": [ip.at("z", layer=0), {"layer": slice(2, None)}]}, [1]),
    ],
)
@pytest.mark.parametrize("sites", ["z", "blocks.*.attn.hook_z", re.compile(r"hook_z$"), ["z", "z"]])
def test_layers_are_chosen_in_every_way(where: Any, layers: list[int], sites: Any) -> None:
    model = wrapped("llama")
    expected = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    assert list(model.run_with_cache(ids(), names_filter=ip.at(sites, **where))[1]) == expected
    shown = model.run_with_cache(ids(), names_filter="z", hooks=[ip.zero(sites, **where)])[1]
    zeroed = [name for name in shown if shown[name].abs().max() == 0]
    assert zeroed == expected


def test_several_kinds_at_several_layers() -> None:
    model = wrapped("gpt2")
    found = z(model, names_filter=[ip.at(["attn_out", "mlp_out"], layer=[0, 2]), ("resid_post", 1)])
    assert sorted(found) == [
        "blocks.0.hook_attn_out",
        "blocks.0.hook_mlp_out",
        "blocks.1.hook_resid_post",
        "blocks.2.hook_attn_out",
        "blocks.2.hook_mlp_out",
    ]
    everything = z(model, names_filter=ip.at(layer=1))
    assert {model.sites[name].layer for name in everything} == {1}
    assert len(everything) > 8


def test_plain_modules_count_layers_by_the_number_in_their_name() -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    net = nn.Sequential(*layers)
    model, x = ip.wrap(net), torch.randn(2, 4)
    assert list(model.run_with_cache(x, names_filter=ip.at("*.1", layer=[0, -1]))[1]) == [
        "0.1",
        "2.1",
    ]
    with pytest.raises(
        IndexError,
        match=r"at\('\*\.1', layer=5\): layer 5 is not there: the model has layers 0 to 2",
    ):
        model.run_with_cache(x, names_filter=ip.at("*.1", layer=5))
    with pytest.raises(ip.NothingMatched, match=r"'0\.1' has sites in layers 0\."):
        model.run_with_cache(x, names_filter=ip.at("0.1", layer=slice(1, 2)))


def test_sites_that_are_not_there_are_refused_with_what_is() -> None:
    model = wrapped("llama")

    def error(where: ip.at) -> str:
        with pytest.raises((ip.InterposeError, ValueError, IndexError)) as caught:
            model.run_with_cache(ids(), names_filter=where)
        return str(caught.value)

    assert error(ip.at("zz", layer=1)).startswith("no site 'blocks.1.hook_zz'")
    assert (
        error(ip.at("z", layer=3))
        == "at('z', layer=3): layer 3 is not there: the model has layers 0 to 2."
    )
    assert error(ip.at("z", layer=1, exclude={"layer": 1})) == (
        "at('z', layer=1, exclude={'layer': 1}) excludes every site that it selects: "
        "blocks.1.attn.hook_z."
    )
    assert error(ip.at("resid_post", layer=1, head=1)) == (
        "at('resid_post', layer=1, head=1): 'blocks.1.hook_resid_post' has no axis of heads: it is "
        "('batch', 'pos', 'd_model')."
    )
    assert error(ip.at("z", layer=1, head=[1, 4])).endswith(
        "head 4 is not there: 'blocks.1.attn.hook_z' has heads 0 to 3."
    )
    assert error(ip.at("z", layer=1, rows=3)).endswith(
        "rows 3 is not there: 'blocks.1.attn.hook_z' has rows 0 to 2."
    )
    assert error(ip.at("z", layer=1, neuron=torch.ones(5).bool())).endswith(
        "a mask of 5 neurons; 'blocks.1.attn.hook_z' has 8 neurons."
    )
    assert error(ip.at("z", layer=1, pos=torch.ones(2, 5).bool())).endswith(
        "a mask of shape (2, 5); 'blocks.1.attn.hook_z' has 3 rows of 6 positions."
    )
    assert error(ip.at("z", layer=1, head=slice(4, 9))) == (
        "at('z', layer=1, head=slice(4, 9, None)) selects nothing of 'blocks.1.attn.hook_z', which is "
        "(3, 6, 4, 8) ('batch', 'pos', 'head', 'd_head'): no head is left."
    )
    assert error(ip.at("z", layer=1, pos=[0, 1], exclude={"pos": slice(0, 3)})).endswith(
        "no position is left."
    )
    assert error(ip.at("z", layer=1, head=1, pos=2, exclude={"head": 1, "pos": [2, 3]})).endswith(
        "all of it is excluded."
    )
    assert "is not a rectangle of" in error(ip.at("z", layer=1, exclude={"head": 1, "pos": 2}))
    with pytest.raises(
        ip.AmbiguousSite, match=r"two selections of 'blocks\.1\.attn\.hook_z' in one list"
    ):
        z(model, names_filter=[ip.at("z", layer=1, head=1), ip.at("z", layer=1, head=2)])
    with pytest.raises(TypeError, match="takes whole values; got at"):
        model.run_with_hooks(
            ids(), hooks=[ip.skip(ip.at("model.layers.1.mlp", pos=1), lambda x: x)]
        )


# Which part of a value.


def numbers(size: int) -> st.SearchStrategy[Any]:
    one = st.integers(-size, size - 1)
    bound = st.none() | st.integers(-size, size)
    return st.one_of(
        st.none(),
        one,
        st.lists(one, min_size=1, max_size=3),
        st.builds(slice, bound, bound),
        st.lists(st.booleans(), min_size=size, max_size=size).map(torch.tensor),
    )


def places(given: Any, size: int) -> set[int]:
    """By Python's own counting."""
    line = list(range(size))
    if given is None:
        return set(line)
    if isinstance(given, slice):
        return set(line[given])
    if isinstance(given, Tensor):
        return {place for place in line if bool(given[place])}
    return {line[one] for one in ([given] if isinstance(given, int) else given)}


@settings(max_examples=60, deadline=None)
@given(
    rows=numbers(ROWS),
    pos=numbers(LENGTH),
    head=numbers(HEADS),
    neuron=numbers(WIDTH),
    out=st.dictionaries(
        st.sampled_from(["rows", "pos", "head", "neuron"]), st.integers(0, 2), max_size=2
    ),
)
def test_reading_and_writing_mean_the_same_numbers(rows, pos, head, neuron, out) -> None:
    model = wrapped("llama")
    words = {"rows": rows, "pos": pos, "head": head, "neuron": neuron}
    sizes = {"rows": ROWS, "pos": LENGTH, "head": HEADS, "neuron": WIDTH}
    chosen = {word: places(words[word], sizes[word]) for word in words}
    mask = torch.zeros(ROWS, LENGTH, HEADS, WIDTH, dtype=torch.bool)
    mask[
        torch.meshgrid(
            *(torch.tensor(sorted(c), dtype=torch.long) for c in chosen.values()), indexing="ij"
        )
    ] = True
    gone = torch.ones_like(mask)
    for axis, word in enumerate(words):
        line = torch.zeros(sizes[word], dtype=torch.bool)
        line[out[word] if word in out else slice(None)] = True
        gone &= line.reshape([-1 if i == axis else 1 for i in range(4)])
    if out:
        mask &= ~gone
    where = ip.at("z", layer=1, **words, exclude=out or None)
    if not mask.any():
        with pytest.raises(ip.NothingSelected):
            z(model, ip.fill(where, 7.0))
        return
    plain = z(model)["z", 1]
    written = z(model, ip.fill(where, 7.0))["z", 1]
    assert torch.equal(written, torch.where(mask, torch.tensor(7.0), plain))
    if len(out) < 2:
        read = z(model, names_filter=where)["z", 1]
        assert torch.equal(read.flatten(), plain[mask])  # in the order of the value
        assert read.ndim == 4
        other = torch.randn(read.shape)
        assert torch.equal(z(model, ip.patch(where, other))["z", 1][mask], other.flatten())


def test_what_was_read_by_a_selector_is_patched_back_by_it() -> None:
    model = wrapped("gpt2")
    there = ip.at("z", layer=[0, 1], head=[1, 3], pos=[5, 2], rows=[0, 2])
    with torch.no_grad():
        plain = model(ids())
        _, cache = model.run_with_cache(ids().flip(0), names_filter=there)
        _, whole = model.run_with_cache(ids().flip(0), names_filter="z")
        by_part = model.run_with_hooks(ids(), hooks=[ip.patch(there, cache)])
        by_whole = model.run_with_hooks(ids(), hooks=[ip.patch(there, whole)])
    assert cache["z", 0].shape == (2, 2, 2, 8)
    assert torch.equal(cache["z", 1], whole["z", 1][[0, 2]][:, [2, 5]][:, :, [1, 3]])
    assert torch.equal(by_part, by_whole)
    assert not torch.equal(by_part, plain)


def test_an_index_is_applied_to_what_the_words_leave() -> None:
    model = wrapped("gpt2")
    where = ip.at("z", layer=1, head=[1, 3], at=(slice(None), 0, 1))
    plain = z(model)["z", 1]
    assert torch.equal(z(model, names_filter=where)["z", 1], plain[:, 0, 3])
    expected = plain.clone()
    expected[:, 0, 3] = torch.arange(8.0)
    assert torch.equal(z(model, ip.fill(where, torch.arange(8.0)))["z", 1], expected)
    strong = z(model, ip.fill(where, 1.0, strength=torch.tensor([0.0, 1.0, 2.0])))["z", 1]
    assert torch.allclose(strong[2, 0, 3], 2 - plain[2, 0, 3], atol=1e-6)
    assert torch.equal(strong[0], plain[0])


def test_words_beside_a_selector_take_the_place_of_its_own() -> None:
    there = ip.at("z", layer=1, head=2)
    assert repr(ip.zero(there, head=3, pos=1)) == "zero('z', layer=1, head=3, pos=1)"
    assert repr(ip.at(there, pos=1)) == "at('z', layer=1, head=2, pos=1)"
    edit = ip.zero(there)
    assert (edit.layer, edit.head, edit.pos, edit.where.head) == (1, 2, None, 2)
    import dataclasses

    assert repr(dataclasses.replace(edit, layer=2, strength=0.5)) == (
        "zero('z', layer=2, head=2, strength=0.5)"
    )


# Hooks of other kinds.


def test_functions_detectors_and_gradients_get_the_selected_part() -> None:
    model, tokens = wrapped("llama"), ids()
    there = ip.at("z", layer=1, head=2, pos=[1, 4])
    seen = []

    def double(value: Tensor, hook: ip.HookPoint) -> Tensor:
        seen.append(tuple(value.shape))
        return 2 * value

    def in_place(value: Tensor, hook: ip.HookPoint) -> None:
        value.mul_(2)

    class Look(ip.Detector):
        def read(self, value: Tensor, hook: ip.HookPoint) -> None:
            seen.append(tuple(value.shape))

    with torch.no_grad():
        expected = model.run_with_hooks(tokens, hooks=[ip.scale(there, 2.0)])
        for function in (double, in_place):
            assert torch.equal(
                model.run_with_hooks(tokens, fwd_hooks=[(there, function)]), expected
            )
        model.run_with_hooks(tokens, hooks=[Look(there)])
    assert seen == [(3, 2, 1, 8)] * 2
    with pytest.raises(
        ip.EditShapeError, match=r"a hook returned \(3, 2, 8\); at\(.*\) selects \(3, 2, 1, 8\)"
    ):
        model.run_with_hooks(tokens, fwd_hooks=[(there, lambda value, hook: value[:, :, 0])])

    def loss(logits: Tensor) -> Tensor:
        return logits.square().sum()

    _, whole = model.run_with_cache(tokens, names_filter=("z", 1), incl_bwd=loss)
    _, part = model.run_with_cache(tokens, names_filter=there, incl_bwd=loss)
    assert torch.equal(part.grad["z", 1], whole.grad["z", 1][:, [1, 4], 2:3])
    assert part.grad["z", 1].abs().max() > 0
    grads = []
    with model.hooks(bwd_hooks=[(there, lambda grad, hook: grads.append(grad.clone()))]):
        loss(model(tokens)).backward()
    model.module.zero_grad()
    assert torch.equal(grads[0], part.grad["z", 1])


def test_a_selector_is_recorded_over_the_steps_of_a_generation() -> None:
    model, tokens = wrapped("llama"), ids(2, 4)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    name = ("resid_post", 1)
    with model.record(name) as whole:
        out = model.generate(tokens, **options)
    assert whole[name].shape[1] == 8 == out.shape[1] - 1
    wants = [
        ({"pos": [6, 2]}, [2, 6]),
        ({"phase": "generated"}, [4, 5, 6, 7]),
        ({"phase": "prompt", "exclude": {"pos": 0}}, [1, 2, 3]),
        ({"pos": -1}, [3]),
    ]
    for use_cache in (True, False):
        for where, expected in wants:
            with model.record(ip.at("resid_post", layer=1, rows=1, **where)) as part:
                model.generate(tokens, use_cache=use_cache, **options)
            found = part[name]
            assert found.shape == (1, len(expected), 32), (where, use_cache)
            assert torch.allclose(found, whole[name][1:, expected], atol=1e-4)


def test_masks_and_numbers_of_numpy_are_taken() -> None:
    import numpy as np

    model = wrapped("gpt2")
    plain = z(model, names_filter=ip.at("z", layer=1, head=[1, 2], neuron=3))
    same = z(
        model, names_filter=ip.at("z", layer=np.int64(1), head=np.array([1, 2]), neuron=np.int64(3))
    )
    assert torch.equal(plain["z", 1], same["z", 1])
    mask = torch.tensor([False, True, True, False])
    assert torch.equal(
        z(model, names_filter=ip.at("z", layer=1, head=mask, neuron=3))["z", 1], plain["z", 1]
    )
    assert LAYERS == 3
