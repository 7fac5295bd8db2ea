"""Each edit against the same thing done by hand with raw torch hooks: values, gradients, strengths, order."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.edits.models import LAYERS, built, by_hand, gradient, heads_of, ids, wrapped

pytestmark = pytest.mark.bits

KINDS = ["gpt2", "llama"]
D = 32
VECTOR = torch.linspace(-2, 2, D)
OTHER = torch.linspace(3, -1, D).cos()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


@functools.cache
def cached(kind: str, site: str = "resid_post", rows: int = 3) -> Tensor:
    """Values of another batch at layer 1."""
    with torch.no_grad():
        tokens = ids(rows).flip(1)
        return wrapped(kind).run_with_cache(input_ids=tokens, names_filter=(site, 1))[1][site, 1]


def projected(value: Tensor) -> Tensor:
    unit = VECTOR / VECTOR.norm()
    return value - (value @ unit)[..., None] * unit


def capped(value: Tensor) -> Tensor:
    unit = VECTOR / VECTOR.norm()
    coordinate = value @ unit
    return value + (coordinate.clamp(-0.1, 0.2) - coordinate)[..., None] * unit


# Every edit, as ``kind -> (edit, what a raw hook does)``.
WHOLE: dict[str, Callable[[str], tuple[ip.Edit, Callable[[Tensor], Tensor]]]] = {
    "zero": lambda k: (ip.zero("resid_post", layer=1), lambda v: 0 * v),
    "fill": lambda k: (
        ip.fill("resid_post", VECTOR, layer=1),
        lambda v: VECTOR.expand_as(v) + 0 * v,
    ),
    "add": lambda k: (ip.add("resid_post", VECTOR, layer=1), lambda v: v + VECTOR),
    "scale": lambda k: (ip.scale("resid_post", VECTOR, layer=1), lambda v: v * VECTOR),
    "clamp": lambda k: (ip.clamp("resid_post", -0.3, 0.5, layer=1), lambda v: v.clamp(-0.3, 0.5)),
    "clamp_high": lambda k: (ip.clamp("resid_post", max=0.1, layer=1), lambda v: v.clamp(max=0.1)),
    "mean_tensor": lambda k: (
        ip.mean("resid_post", VECTOR, layer=1),
        lambda v: VECTOR.expand_as(v) + 0 * v,
    ),
    "mean_here": lambda k: (
        ip.mean("resid_post", layer=1),
        lambda v: v.mean((0, 1), keepdim=True).expand_as(v),
    ),
    "mean_by_position": lambda k: (
        ip.mean("resid_post", layer=1, per_position=True),
        lambda v: v.mean(0, keepdim=True).expand_as(v),
    ),
    "mean_cache": lambda k: (
        ip.mean("resid_post", {"blocks.1.hook_resid_post": cached(k)}, layer=1),
        lambda v: cached(k).mean((0, 1)).expand_as(v) + 0 * v,
    ),
    "patch": lambda k: (
        ip.patch("resid_post", {("resid_post", 1): cached(k)}, layer=1),
        lambda v: cached(k) + 0 * v,
    ),
    "patch_one_row": lambda k: (
        ip.patch("resid_post", cached(k)[1:2], layer=1),
        lambda v: cached(k)[1:2].expand_as(v) + 0 * v,
    ),
    "project_out": lambda k: (ip.project_out("resid_post", 3 * VECTOR, layer=1), projected),
    "project_cap": lambda k: (ip.project_cap("resid_post", 3 * VECTOR, -0.1, 0.2, layer=1), capped),
}
EXACT = set(WHOLE) - {"project_out", "project_cap", "mean_here", "mean_cache", "mean_by_position"}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_is_what_a_raw_hook_makes_of_the_value(kind: str, name: str) -> None:
    module, model = built(kind), wrapped(kind)
    cached(kind)  # not first inside a raw hook
    edit, change = WHOLE[name](kind)
    given = {"input_ids": ids()}
    with torch.no_grad():
        plain = module(**given).logits
        expected = by_hand(module, "resid_post", 1, change, **given)
        found = model.run_with_hooks(**given, hooks=[edit]).logits
    assert (expected - plain).abs().max() > 1e-3 * plain.abs().max(), "the edit has no effect here"
    assert torch.equal(found, expected) if name in EXACT else close(found, expected)
    with torch.no_grad():
        assert torch.equal(model(**given).logits, plain)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_an_edit_are_those_through_the_raw_hook(kind: str, name: str) -> None:
    module, model = built(kind), wrapped(kind)
    cached(kind)  # not first inside a raw hook
    edit, change = WHOLE[name](kind)
    given = {"input_ids": ids()}
    expected = gradient(module, lambda: by_hand(module, "resid_post", 1, change, **given))
    found = gradient(
        module, lambda: model.run_with_hooks(**given, hooks=[edit], use_cache=False).logits
    )
    plain = gradient(module, lambda: module(**given, use_cache=False).logits)
    assert not close(expected, plain, 1e-3)
    if expected.abs().max() > 0:
        assert close(found, expected, 1e-4)
    else:
        assert found.abs().max() == 0


SELECTED = {
    "head": {"head": 2},
    "heads": {"head": [3, 0]},
    "head_and_pos": {"head": -1, "pos": [4, 1]},
    "rows": {"rows": [0, 2], "head": 1},
    "last": {"pos": -1},
    "neurons": {"neuron": [0, 5, -1], "head": 0},
    "mask": {
        "pos": torch.tensor(
            [[True, False] * 3, [False, True] * 3, [False, False, True, True, True, False]]
        )
    },
    "corner": {"exclude": {"pos": 0, "head": 1}},
    "but_rows": {"pos": slice(1, 4), "exclude": [{"rows": 1}, {"head": [0, 3]}]},
}


def meant(where: dict[str, Any], shape: torch.Size) -> Tensor:
    """Which numbers of z a selection means, one by one."""
    mask = torch.zeros(shape, dtype=torch.bool)
    sizes = {"rows": shape[0], "pos": shape[1], "head": shape[2], "neuron": shape[3]}

    def among(given: Any, place: int, size: int, row: int) -> bool:
        if isinstance(given, Tensor):
            return bool(given[row, place])
        if isinstance(given, slice):
            return place in range(size)[given]
        listed = [given] if isinstance(given, int) else given
        return place in [one % size for one in listed]

    def inside(words: dict[str, Any], at: dict[str, int]) -> bool:
        return all(among(given, at[word], sizes[word], at["rows"]) for word, given in words.items())

    excluded = where.get("exclude", [])
    excluded = excluded if isinstance(excluded, list) else [excluded]
    words = {word: given for word, given in where.items() if word != "exclude"}
    for place in torch.cartesian_prod(*(torch.arange(size) for size in shape)).tolist():
        at = dict(zip(("rows", "pos", "head", "neuron"), place))
        mask[tuple(place)] = inside(words, at) and not any(inside(ex, at) for ex in excluded)
    return mask


@pytest.mark.parametrize("where", SELECTED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_selection_is_what_a_mask_written_number_by_number_means(kind: str, where: str) -> None:
    module, model = built(kind), wrapped(kind)
    given = {"input_ids": ids()}
    shape = torch.Size([3, 6, heads_of(module), D // heads_of(module)])
    mask = meant(SELECTED[where], shape)
    assert 0 < mask.float().mean() < 1
    # Of a tensor of the whole shape just the selected numbers are written.
    new = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    for edit, change in (
        (ip.fill("z", new, layer=1, **SELECTED[where]), lambda v: torch.where(mask, new, v)),
        (ip.scale("z", -2.0, layer=1, **SELECTED[where]), lambda v: torch.where(mask, -2 * v, v)),
        (ip.zero(ip.at("z", layer=1, **SELECTED[where])), lambda v: torch.where(mask, 0 * v, v)),
    ):
        with torch.no_grad():
            expected = by_hand(module, "z", 1, change, **given)
            assert torch.equal(model.run_with_hooks(**given, hooks=[edit]).logits, expected)
        with torch.no_grad():
            assert not torch.equal(expected, module(**given).logits)
    expected = gradient(
        module,
        lambda: by_hand(module, "z", 1, lambda v: torch.where(mask, -2 * v, v), **given),
    )
    edit = ip.scale("z", -2.0, layer=1, **SELECTED[where])
    found = gradient(
        module, lambda: model.run_with_hooks(**given, hooks=[edit], use_cache=False).logits
    )
    assert close(found, expected)


# Strength.


@pytest.mark.parametrize("name", WHOLE)
def test_a_strength_for_each_row_goes_that_far_in_that_row(name: str) -> None:
    model, given = wrapped("llama"), {"input_ids": ids()}
    edit, _ = WHOLE[name]("llama")
    strength = torch.tensor([0.0, 0.25, 2.0])

    def value(*hooks: ip.Edit) -> Tensor:
        with torch.no_grad():
            run = model.run_with_cache(**given, names_filter=("resid_post", 1), hooks=hooks)
        return run[1]["resid_post", 1]

    plain, whole = value(), value(edit)
    partly = value(dataclasses.replace(edit, strength=strength))
    assert torch.equal(partly[0], plain[0])
    assert close(partly, plain + strength[:, None, None] * (whole - plain))
    assert (partly - plain)[2].abs().max() > 1e-3
    assert close(value(dataclasses.replace(edit, strength=0.25))[1], partly[1]), (
        "a number is for all rows"
    )
    # Of rows that are selected, each has its own.
    some = value(dataclasses.replace(edit, strength=strength, rows=[1, 2]))
    assert close(some[1:], partly[1:])
    assert torch.equal(some[0], plain[0])


def test_strengths_values_and_factors_are_trained_through() -> None:
    model, given = ip.wrap(copy.deepcopy(built("gpt2")).double()), {"input_ids": ids()}
    strength = torch.tensor([0.5, 0.1, 1.5], dtype=torch.float64, requires_grad=True)
    shift = VECTOR.double().requires_grad_()
    factor = (1 + OTHER).double().requires_grad_()
    edits = [
        ip.add("resid_post", shift, layer=0, pos=[1, 2], strength=strength),
        ip.scale("resid_post", factor, layer=1, head=None, rows=[0, 2]),
    ]
    assert [[p is t for p in e.parameters()] for e, t in zip(edits, (strength, factor))] == [
        [True, False],
        [True],
    ]

    def loss() -> Tensor:
        return model.run_with_hooks(**given, hooks=edits).logits.square().sum()

    found = torch.autograd.grad(loss(), [strength, shift, factor])
    for tensor, grad in zip((strength, shift, factor), found):
        direction = grad + grad.norm() * torch.linspace(-1, 1, grad.numel(), dtype=grad.dtype)
        with torch.no_grad():
            step = 1e-4 * direction / direction.norm()
            tensor += step
            above = loss()
            tensor -= 2 * step
            below = loss()
            tensor += step
        slope = (above - below) / 2
        assert slope.abs() > 1e-4
        assert torch.allclose(slope, (grad * step).sum(), rtol=1e-4)


# Order, other models, dtypes, checkpointing.


def test_edits_of_one_list_follow_one_another() -> None:
    module, model, given = built("llama"), wrapped("llama"), {"input_ids": ids()}
    first, second = (
        ip.add("resid_post", VECTOR, layer=1),
        ip.clamp("resid_post", -1.0, 0.5, layer=1),
    )
    third = ip.project_out("resid_post", OTHER, layer=1, pos=[0, 3])
    unit = OTHER / OTHER.norm()

    def after(v: Tensor) -> Tensor:
        v = (v + VECTOR).clamp(-1.0, 0.5)
        out = v.clone()
        out[:, [0, 3]] -= (v[:, [0, 3]] @ unit)[..., None] * unit
        return out

    with torch.no_grad():
        expected = by_hand(module, "resid_post", 1, after, **given)
        assert close(model.run_with_hooks(**given, hooks=[first, second, third]).logits, expected)
        turned = model.run_with_hooks(**given, hooks=[second, first, third]).logits
    assert not close(turned, expected, 1e-2)


class Small(nn.Module):
    """A network of images: no axes have names here."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x)).mean((2, 3)))


IMAGES = {
    "channel": (
        ip.zero("conv", neuron=3),
        lambda v: v * torch.tensor([1, 1, 1, 0, 1.0]).view(-1, 1, 1),
    ),
    "rows": (
        ip.scale("conv", 2.0, rows=[1], neuron=[0, 1]),
        lambda v: torch.cat([v[:1], torch.cat([2 * v[1:2, :2], v[1:2, 2:]], 1), v[2:]]),
    ),
    "mean": (ip.mean("conv"), lambda v: v.mean((0, 2, 3), keepdim=True).expand_as(v)),
    "project_out": (
        ip.project_out("conv", torch.arange(5.0)),
        lambda v: v - torch.einsum("bchw,c,d->bdhw", v, torch.arange(5.0), torch.arange(5.0)) / 30,
    ),
    "resample": (
        ip.resample("conv", seed=2),
        lambda v: v[ip.edits.other_values.other_rows(4, 4, 2)],
    ),
    "exclude": (
        ip.zero("conv", exclude={"neuron": [0, 2]}),
        lambda v: v * torch.tensor([1.0, 0, 1, 0, 0]).view(-1, 1, 1),
    ),
    "index": (
        ip.fill("conv", torch.arange(4.0), at=(slice(None), 1, 0, 0)),
        lambda v: torch.index_put(
            v,
            (torch.arange(4), torch.tensor(1), torch.tensor(0), torch.tensor(0)),
            torch.arange(4.0),
        ),
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_edits_of_a_convolution_count_its_channels(name: str) -> None:
    net = Small()
    x = torch.randn(4, 2, 6, 6)
    edit, change = IMAGES[name]
    expected = net.head(torch.tanh(change(net.conv(x))).mean((2, 3)))
    assert not torch.allclose(expected, net(x), atol=1e-4)
    found = ip.wrap(net).run_with_hooks(x, hooks=[edit])
    assert torch.allclose(found, expected, atol=1e-6)
    weights = [
        torch.autograd.grad(out.square().sum(), net.conv.weight)[0] for out in (found, expected)
    ]
    assert torch.allclose(*weights, atol=1e-5)


def test_gradcheck_of_every_edit_in_a_small_network() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = ip.wrap(net)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    vectors = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    strength = torch.tensor([0.3, 1.0, 0.7], dtype=torch.float64, requires_grad=True)
    source = torch.randn(3, 6, dtype=torch.float64)
    made = [
        lambda v, s: ip.add("1", v[0], strength=s),
        lambda v, s: ip.scale("1", v[1], strength=s, rows=[0, 2]),
        lambda v, s: ip.fill("1", v[2], neuron=[1, 4], strength=s),
        lambda v, s: ip.clamp("1", v[0] - 1.5, v[0] + 1.5, strength=s),
        lambda v, s: ip.mean("1", strength=s),
        lambda v, s: ip.resample("1", strength=s, seed=4),
        lambda v, s: ip.patch("1", v[:3], strength=s),
        lambda v, s: ip.project_out("1", v[:2], mean=v[3], strength=s),
        lambda v, s: ip.project_cap("1", v[0], -0.2, 0.1, strength=s),
        lambda v, s: ip.noise("1", 0.1, seed=1, strength=s),
        lambda v, s: ip.rotate("1", torch.linalg.qr(v.mT)[0].mT[:2], source, strength=s),
    ]
    for make in made:

        def run(x: Tensor, v: Tensor, s: Tensor, make: Any = make) -> Tensor:
            return model.run_with_hooks(x, hooks=[make(v, s)])

        assert torch.autograd.gradcheck(run, (x, vectors, strength), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_move_to_the_dtype_of_the_value(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 3))
    x = torch.randn(3, 4)
    edits = [
        ip.add("1", torch.arange(6.0, dtype=torch.float64)),
        ip.project_out("1", torch.randn(2, 6, dtype=torch.float64)),
        ip.patch("1", torch.randn(3, 6), neuron=[1, 2]),
        ip.rotate("1", ip.Rotation(6, 2), torch.randn(3, 6)),
        ip.mean(
            "1", {"1": torch.randn(5, 6, dtype=torch.float64)}, rows=[0], strength=torch.ones(3)
        ),
        ip.clamp("1", max=torch.ones(6, dtype=torch.float64)),
        ip.project_cap("1", torch.ones(6), high=0.5, rows=1),
    ]
    precise = ip.wrap(net).run_with_hooks(x, hooks=edits)
    half = ip.wrap(net.to(dtype)).run_with_hooks(x.to(dtype), hooks=edits)
    assert half.dtype == dtype
    assert torch.allclose(half.float(), precise, atol=0.1 * precise.abs().max().item())
    with torch.inference_mode():
        again = ip.wrap(net).run_with_hooks(x.to(dtype), hooks=edits)
    assert torch.equal(again, half)


def test_an_edit_repeats_itself_under_activation_checkpointing() -> None:
    module = built("llama")
    model, given = wrapped("llama"), {"input_ids": ids(), "use_cache": False}
    edits = [
        ip.noise("resid_post", 0.5, seed=1, layer=0, pos=[1, 2]),
        ip.resample("z", layer=1, head=2, seed=3, strength=torch.tensor([1.0, 0.5, 0.2])),
        ip.knockout(1, query=-1, key=[0, 1]),
        ip.project_out("resid_post", VECTOR, layer=1, exclude={"rows": 0, "pos": 1}),
        ip.rotate("resid_post", ip.Rotation(D, 2), cached("llama"), layer=2, pos=-1),
    ]

    def grad() -> Tensor:
        module.zero_grad()
        with model.hooks(edits):
            module(**given).logits.square().mean().backward()
        return module.get_input_embeddings().weight.grad.clone()

    module.requires_grad_(True)
    module.train()
    for part in module.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    try:
        plain = grad()
        module.gradient_checkpointing_enable()
        assert module.model.layers[0].gradient_checkpointing
        assert torch.equal(grad(), plain)
        assert plain.abs().max() > 0
    finally:
        module.gradient_checkpointing_disable()
        module.zero_grad()
        module.eval()


# Values from elsewhere.


def test_resampled_rows_are_others_and_the_same_each_time() -> None:
    model, given = wrapped("gpt2"), {"input_ids": ids()}
    wanted = ["z", "resid_post"]

    def values(*hooks: ip.Edit) -> ip.Cache:
        with torch.no_grad():
            return model.run_with_cache(**given, names_filter=wanted, hooks=hooks)[1]

    plain = values()
    for seed in range(5):
        edit = ip.resample("z", layer=1, head=[0, 2], seed=seed)
        found, again = values(edit)["z", 1], values(edit)["z", 1]
        assert torch.equal(found, again)
        assert torch.equal(found[:, :, [1, 3]], plain["z", 1][:, :, [1, 3]])
        for row in range(3):
            from_ = [
                other
                for other in range(3)
                if torch.equal(found[row][:, [0, 2]], plain["z", 1][other][:, [0, 2]])
            ]
            assert len(from_) == 1
            assert from_ != [row]
    rows = [tuple(ip.edits.other_values.other_rows(3, 3, seed).tolist()) for seed in range(20)]
    assert set(rows) == {(1, 2, 0), (2, 0, 1)}
    # Of a source with other rows: never the row of the same number.
    for there in (1, 2, 7):
        chosen = torch.stack([ip.edits.other_values.other_rows(4, there, s) for s in range(40)])
        assert chosen.max() < there
        assert set(chosen.flatten().tolist()) == set(range(there))
        if there > 1:
            assert not (chosen == torch.arange(4)).any()
    source = cached("gpt2", rows=5)
    found = values(ip.resample("resid_post", source, layer=1, seed=3))["resid_post", 1]
    assert torch.equal(found, source[ip.edits.other_values.other_rows(3, 5, 3)])


def test_a_mean_over_a_padded_batch_leaves_padding_out() -> None:
    model, tokens = wrapped("llama"), ids()
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    with torch.no_grad():
        name = ("resid_post", 1)
        value = model.run_with_cache(**given, names_filter=name)[1][name]
        found = model.run_with_cache(**given, names_filter=name, hooks=[ip.mean(name)])[1][name]
    expected = value[mask.bool()].mean(0)
    assert not torch.allclose(expected, value.mean((0, 1)), atol=1e-3)
    assert torch.allclose(found, expected.expand_as(found), atol=1e-6)


def test_means_come_from_caches_statistics_and_detectors() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model, data = ip.wrap(net), torch.randn(64, 4)
    x = torch.randn(3, 4)
    statistics = ip.activation_statistics(model, [data], progress=False)
    watcher = ip.Statistics("1")
    with model.hooks([watcher]), torch.no_grad():
        model(data)
    _, cache = model.run_with_cache(data)
    mean = net[1](net[0](data)).mean(0)
    expected = net[2](torch.cat([mean[:2].expand(3, 2), net[1](net[0](x))[:, 2:]], 1))
    assert not torch.allclose(expected, net(x), atol=1e-3)
    for source in (statistics, statistics["1"], watcher, cache, {"1": cache["1"]}, mean):
        found = model.run_with_hooks(x, hooks=[ip.mean("1", source, neuron=[0, 1])])
        assert torch.allclose(found, expected, atol=1e-5), type(source)
    images, pictures = ip.wrap(Small()), torch.randn(8, 2, 6, 6)
    by_channel = ip.activation_statistics(images, [pictures], progress=False)
    made = images.run_with_cache(pictures, names_filter="conv", hooks=[ip.mean("conv", by_channel)])
    conv = images.module.conv(pictures)
    assert torch.allclose(
        made[1]["conv"], conv.mean((0, 2, 3), keepdim=True).expand_as(conv), atol=1e-5
    )


@pytest.mark.parametrize(
    ("where", "source_pos", "pairs"),
    [
        ({"pos": 2}, 5, [(2, 5)]),
        ({"pos": [4, 1]}, [0, 6], [(4, 0), (1, 6)]),
        ({"pos": slice(1, 4)}, slice(4, 7), [(1, 4), (2, 5), (3, 6)]),
        ({"pos": -1}, -1, [(5, 7)]),
        ({"pos": [-1, 0], "rows": [2]}, [-1, 1], [(5, 7), (0, 1)]),
    ],
)
def test_positions_of_a_source_go_where_they_are_sent(where, source_pos, pairs) -> None:
    model, tokens = wrapped("llama"), ids()
    name = ("resid_pre", 1)
    with torch.no_grad():
        _, source = model.run_with_cache(ids(3, 8), names_filter=name)
        _, plain = model.run_with_cache(tokens, names_filter=name)
        edit = ip.patch("resid_pre", source, layer=1, source_pos=source_pos, **where)
        _, found = model.run_with_cache(tokens, names_filter=name, hooks=[edit])
    expected = plain[name].clone()
    for row in where.get("rows", range(3)):
        for to, from_ in pairs:
            expected[row, to] = source[name][row, from_]
    assert not torch.equal(expected, plain[name])
    assert torch.equal(found[name], expected)


def test_each_call_of_a_module_is_patched_with_its_own_value() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return x

    model, a, b = ip.wrap(Loop()), torch.randn(2, 4), torch.randn(2, 4)
    _, cache = model.run_with_cache(a, names_filter="cell")
    _, found = model.run_with_cache(b, names_filter="cell", hooks=[ip.patch("cell", cache)])
    assert all(torch.equal(x, y) for x, y in zip(found.calls("cell"), cache.calls("cell")))


def test_noise_by_position_is_the_same_with_and_without_a_kv_cache() -> None:
    model, tokens = wrapped("llama"), ids(2, 4)
    made = []
    for use_cache in (True, False):
        edit = ip.noise("resid_post", 1.0, layer=0, seed=3, head=None, rows=[1])
        with model.record(("resid_post", 0), hooks=[edit]) as cache:
            out = model.generate(
                tokens, max_new_tokens=4, do_sample=False, use_cache=use_cache, pad_token_id=0
            )
        made.append((out, cache["resid_post", 0]))
    assert torch.equal(made[0][0], made[1][0])
    assert close(made[0][1], made[1][1])
    with torch.no_grad():
        _, plain = model.run_with_cache(made[0][0][:, :-1], names_filter=("resid_post", 0))
    noise = made[0][1] - plain["resid_post", 0]
    assert noise[0].abs().max() < 1e-4
    assert 0.5 < noise[1].std() < 1.5
    assert not torch.allclose(noise[1, 4], noise[1, 5], atol=1e-2)


# Errors.


def test_what_an_edit_cannot_do_it_says() -> None:
    model, tokens = wrapped("llama"), ids()
    source = {"blocks.1.hook_resid_post": cached("llama")}

    def error(edit: ip.Edit, given: Tensor = tokens) -> str:
        with pytest.raises((ip.InterposeError, ValueError, IndexError, TypeError)) as caught:
            model.run_with_hooks(given, hooks=[edit])
        return str(caught.value)

    assert error(ip.resample("z", layer=1), ids(1)).startswith(
        "resample('z', layer=1): 'blocks.1.attn.hook_z' has one row, so there is no other to take."
    )
    assert error(ip.patch("resid_post", source, layer=2)) == (
        "patch('resid_post', mapping(1 values), layer=2): its source has no value for "
        "'blocks.2.hook_resid_post'. It has: 'blocks.1.hook_resid_post'.\n  Keep it in the run that the "
        "values come from: names_filter=the same selector."
    )
    assert "the source has 6 positions and 'blocks.1.hook_resid_post' 5." in error(
        ip.patch("resid_post", source, layer=1), ids(3, 5)
    )
    assert "source_pos has 2 positions, and pos 1 in" in error(
        ip.patch("resid_post", source, layer=1, pos=1, source_pos=[0, 1])
    )
    assert "the mean over one value is that value" in error(
        ip.mean("resid_post", layer=1, per_position=True), ids(1)
    )
    assert (
        "directions of shape (1, 5); what it selects of 'blocks.1.hook_resid_post' has 32"
        in error(ip.project_out("resid_post", torch.ones(5), layer=1))
    )
    assert "its direction is zero" in error(ip.project_out("resid_post", torch.zeros(D), layer=1))
    assert "its direction is zero" in error(
        ip.project_cap("resid_post", torch.zeros(D), high=1.0, layer=1)
    )
    assert "a strength for each of 2 rows; 'blocks.1.hook_resid_post' has 3" in error(
        ip.zero("resid_post", layer=1, strength=torch.ones(2))
    )
    for make, said in (
        (lambda: ip.clamp("fc"), "say min, max or both"),
        (lambda: ip.project_cap("fc", VECTOR), "say low, high or both"),
        (lambda: ip.project_cap("fc", VECTOR, 2.0, 1.0), "low is above high"),
        (lambda: ip.rotate("fc", torch.ones(2, 4), VECTOR), "not orthonormal"),
        (lambda: ip.rotate("fc", torch.eye(4)[:2]), "Give source=cache to exchange them"),
        (lambda: ip.rotate("fc", torch.eye(4), VECTOR, k=5), "k is 0 to 4"),
        (lambda: ip.patch("fc", VECTOR, source_pos=1), "source_pos goes with pos"),
        (lambda: ip.patch("fc", VECTOR, pos=1, source_pos=" Paris"), "give source_pos as numbers"),
        (lambda: ip.patch("fc", 3.0), "ip.patch takes a cache, a mapping from site names"),
        (lambda: ip.zero("fc", strength=torch.ones(2, 2)), "one for each row"),
        (lambda: ip.zero([ip.at("fc")]), "give one edit or hook for each"),
        (lambda: ip.zero("fc", exclude={"heads": 1}), "exclude has no 'heads'"),
        (lambda: ip.zero("fc", exclude={}), "would exclude everything"),
        (lambda: ip.zero("fc", pos=[]), "pos is empty, so it selects nothing"),
        (
            lambda: ip.zero("fc", head=True),
            "head is a number, several, a slice or a mask; got True",
        ),
    ):
        with pytest.raises((ip.InterposeError, ValueError, TypeError), match=None) as caught:
            make()
        assert said in str(caught.value)


def test_an_edit_of_ones_own_is_one_method() -> None:
    @dataclasses.dataclass(frozen=True, eq=False, repr=False)
    class negate(ip.Edit):
        times: float = 1.0

        def new(self, part: Tensor, spot: Any) -> Tensor:
            return -self.times * part

    module, model, given = built("gpt2"), wrapped("gpt2"), {"input_ids": ids()}
    edit = negate("resid_post", 2.0, layer=1, pos=2, strength=0.5)
    assert repr(edit) == "negate('resid_post', times=2.0, layer=1, pos=2, strength=0.5)"
    assert repr(ip.Edit.from_dict(edit.to_dict())) == repr(edit)

    def change(v: Tensor) -> Tensor:
        v = v.clone()
        v[:, 2] = v[:, 2] + 0.5 * (-2 * v[:, 2] - v[:, 2])
        return v

    with torch.no_grad():
        expected = by_hand(module, "resid_post", 1, change, **given)
        assert torch.equal(model.run_with_hooks(**given, hooks=[edit]).logits, expected)
    assert LAYERS == 3
