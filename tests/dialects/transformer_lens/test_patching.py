"""Every sweep against a loop in raw torch, or with hooks written here where torch has none."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.cli.demo import CLEAN, CORRUPT
from interpose.dialects.transformer_lens import patching, utilities
from interpose.results.bootstrap import bootstrap
from tests.bounds import assert_near, rounding
from tests.models import tiny

BATCH, LENGTH, CHANGED = 3, 5, 2
KINDS = ["gpt2", "llama"]


class Pair:
    """A model with a clean and a corrupted batch, whose tokens differ at one position."""

    def __init__(self, kind: str, layers: int = 3) -> None:
        self.kind = kind
        self.module = tiny.build(kind, "causal", layers=layers).requires_grad_(False)
        self.module.set_attn_implementation("eager")  # caching patterns then changes no bit
        self.model = ip.wrap(self.module)
        generator = torch.Generator().manual_seed(3)
        self.clean = torch.randint(5, 60, (BATCH, LENGTH), generator=generator)
        self.corrupted = self.clean.clone()
        self.corrupted[:, CHANGED] += 7
        self.clean_logits, self.cache = self.model.run_with_cache(self.clean)
        self.corrupted_logits, self.corrupted_cache = self.model.run_with_cache(self.corrupted)

    def sweep(self, name: str, **options: Any) -> Any:
        metric = options.pop("metric", score)
        return getattr(patching, name)(self.model, self.corrupted, self.cache, metric, **options)


def score(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].mean() - logits[:, -1, 8].mean()


def scores(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 8]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.fixture(scope="module")
def llama() -> Pair:
    return Pair("llama")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# Raw torch: which module, its input or output, and which columns of it are a head's.


def block(pair: Pair, layer: int) -> Any:
    module: Any = pair.module
    return module.transformer.h[layer] if pair.kind == "gpt2" else module.model.layers[layer]


def place(pair: Pair, kind: str, layer: int) -> tuple[Any, str, int]:
    """The module, whether its input or output, and the first column."""
    here = block(pair, layer)
    if kind == "resid_pre":
        return here, "input", 0
    if pair.kind == "gpt2":
        width = here.attn.embed_dim
        at = {"q": 0, "k": width, "v": 2 * width}
        if kind in at:
            return here.attn.c_attn, "output", at[kind]
        return {
            "z": (here.attn.c_proj, "input", 0),
            "attn_out": (here.attn.c_proj, "output", 0),
            "mlp_out": (here.mlp, "output", 0),
        }[kind]
    return {
        "q": (here.self_attn.q_proj, "output", 0),
        "k": (here.self_attn.k_proj, "output", 0),
        "v": (here.self_attn.v_proj, "output", 0),
        "z": (here.self_attn.o_proj, "input", 0),
        "attn_out": (here.self_attn.o_proj, "output", 0),
        "mlp_out": (here.mlp, "output", 0),
    }[kind]


def run_raw(
    pair: Pair, tokens: Tensor, kind: str, layer: int, function: Callable[[Tensor], Tensor | None]
) -> Tensor:
    """The logits of the bare module with a function on one tensor."""
    module, side, _ = place(pair, kind, layer)

    def before(part: Any, args: Any, kwargs: Any) -> Any:
        new = function(args[0].clone())
        return None if new is None else ((new, *args[1:]), kwargs)

    def after(part: Any, args: Any, output: Any) -> Any:
        return function(output.clone())

    if side == "input":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        return pair.module(input_ids=tokens).logits
    finally:
        handle.remove()


def raw_patch(pair: Pair, kind: str, layer: int, pos: Any, head: int | None) -> Tensor:
    """The logits of the corrupted run with the clean value at a position and head."""
    kept: list[Tensor] = []
    run_raw(pair, pair.clean, kind, layer, lambda value: kept.append(value))
    size = pair.model.cfg.d_head
    start = place(pair, kind, layer)[2]
    columns = slice(None) if head is None else slice(start + head * size, start + (head + 1) * size)

    def put(value: Tensor) -> Tensor:
        value[:, pos, columns] = kept[0][:, pos, columns]
        return value

    return run_raw(pair, pair.corrupted, kind, layer, put)


STREAM = {"resid_pre": "resid_pre", "attn_out": "attn_out", "mlp_out": "mlp_out"}
HEADS = {"out": "z", "q": "q", "k": "k", "v": "v"}


@pytest.mark.parametrize("kind", STREAM)
def test_a_patch_of_the_stream_is_the_one_raw_hooks_make(pair: Pair, kind: str) -> None:
    found = pair.sweep(f"get_act_patch_{kind}")
    assert found.shape == (3, LENGTH)
    assert found.std() > 0.01
    for layer, pos in itertools.product(range(3), range(LENGTH)):
        wanted = score(raw_patch(pair, kind, layer, pos, None))
        assert_near(found[layer, pos], wanted, pair.corrupted_logits)


@pytest.mark.parametrize("kind", HEADS)
def test_a_patch_of_a_head_is_the_one_raw_hooks_make(pair: Pair, kind: str) -> None:
    cfg = pair.model.cfg
    heads = cfg.n_key_value_heads if kind in ("k", "v") else cfg.n_heads
    by_pos = pair.sweep(f"get_act_patch_attn_head_{kind}_by_pos")
    all_pos = pair.sweep(f"get_act_patch_attn_head_{kind}_all_pos")
    assert by_pos.shape == (3, LENGTH, heads)
    assert all_pos.shape == (3, heads)
    assert by_pos.std() > 0.001
    assert all_pos.std() > 0.001
    for layer, pos, head in [(0, 2, 1), (1, 3, 0), (1, 4, heads - 1), (2, 4, 1), (2, 2, 0)]:
        one = score(raw_patch(pair, HEADS[kind], layer, pos, head))
        torch.testing.assert_close(by_pos[layer, pos, head], one, rtol=0, atol=1e-6)
        every = score(raw_patch(pair, HEADS[kind], layer, slice(None), head))
        torch.testing.assert_close(all_pos[layer, head], every, rtol=0, atol=1e-6)


def test_patches_of_patterns_are_those_of_hooks_written_by_hand(pair: Pair) -> None:
    heads = pair.model.cfg.n_heads
    whole = pair.sweep("get_act_patch_attn_head_pattern_all_pos")
    rows = pair.sweep("get_act_patch_attn_head_pattern_by_pos")
    cells = pair.sweep("get_act_patch_attn_head_pattern_dest_src_pos")
    assert whole.shape == (3, heads)
    assert rows.shape == (3, heads, LENGTH)
    assert cells.shape == (3, heads, LENGTH, LENGTH)

    def by_hand(layer: int, head: int, query: Any, key: Any) -> Tensor:
        clean = pair.cache["pattern", layer]

        def put(pattern: Tensor, hook: Any) -> Tensor:
            new = pattern.clone()
            new[:, head, query, key] = clean[:, head, query, key]
            return new

        name = f"blocks.{layer}.attn.hook_pattern"
        return score(pair.model.run_with_hooks(pair.corrupted, fwd_hooks=[(name, put)]))

    everything = slice(None)
    for layer, head, query, key in [(0, 1, 3, 2), (1, 0, 4, 2), (2, heads - 1, 4, 4)]:
        for one, spot in [
            (whole[layer, head], (everything, everything)),
            (rows[layer, head, query], (query, everything)),
            (cells[layer, head, query, key], (query, key)),
        ]:
            assert_near(one, by_hand(layer, head, *spot), pair.corrupted_logits)
        assert len({float(x[layer, head].mean()) for x in (whole, rows, cells)}) == 3


def test_a_patched_resid_mid_reaches_the_skip_path(pair: Pair) -> None:
    """By hand: attention's output is changed so that the stream after it is the clean one there."""
    found = pair.sweep("get_act_patch_resid_mid")
    assert found.shape == (3, LENGTH)
    for layer, pos in [(0, 2), (1, 4), (2, 4), (2, 3)]:
        change = pair.cache["resid_mid", layer] - pair.corrupted_cache["resid_mid", layer]

        def shift(value: Tensor, pos: int = pos, change: Tensor = change) -> Tensor:
            value[:, pos] += change[:, pos]
            return value

        wanted = score(run_raw(pair, pair.corrupted, "attn_out", layer, shift))
        torch.testing.assert_close(found[layer, pos], wanted, rtol=0, atol=1e-5)
    moved = (found - score(pair.corrupted_logits)).abs()
    assert moved[2, 4] > 1e-3


def test_patching_everything_is_the_clean_run(pair: Pair) -> None:
    def all_of_it(corrupted: Tensor, index: Any, clean: Tensor) -> None:
        corrupted[:] = clean

    table = SimpleNamespace(columns=["layer"], to_numpy=lambda: torch.tensor([[0], [2]]))
    for name in ("resid_pre", "resid_mid", "resid_post"):
        found = patching.generic_activation_patch(
            pair.model, pair.corrupted, pair.cache, score, all_of_it, name, index_df=table
        )
        wanted = score(pair.clean_logits).expand(2)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert (score(pair.clean_logits) - score(pair.corrupted_logits)).abs() > 0.01


def test_a_patch_where_nothing_differs_leaves_the_corrupted_run(pair: Pair) -> None:
    found = pair.sweep("get_act_patch_resid_pre")
    base = score(pair.corrupted_logits)
    assert_near(found[:, :CHANGED], base, pair.corrupted_logits)
    moved = (found[0] - base).abs() > rounding(pair.corrupted_logits)
    assert moved.nonzero().flatten().tolist() == [CHANGED]


def test_gradient_mode_and_plain_dicts_make_no_difference(pair: Pair) -> None:
    plain = dict(pair.cache.items())
    for name in ("resid_pre", "resid_mid", "attn_out", "attn_head_v_all_pos"):
        without = pair.sweep(f"get_act_patch_{name}")
        with torch.enable_grad():
            pair.module.requires_grad_(True)
            with_grad = pair.sweep(f"get_act_patch_{name}")
            pair.module.requires_grad_(False)
        sweep = getattr(patching, f"get_act_patch_{name}")
        from_dict = sweep(pair.model, pair.corrupted, plain, score)
        assert not with_grad.requires_grad
        assert torch.equal(without, with_grad)
        assert torch.equal(without, from_dict)


def test_setters_write_in_place_and_return_what_they_wrote() -> None:
    vectors, patterns = torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 3, 3)
    cases = [
        ("layer_pos", torch.zeros(2, 3, 5), (7, 1), (slice(None), 1)),
        ("layer_pos_head_vector", vectors, (7, 1, 2), (slice(None), 1, 2)),
        ("layer_head_vector", vectors, (7, 2), (slice(None), slice(None), 2)),
        ("layer_head_pattern", patterns, (7, 2), (slice(None), 2)),
        ("layer_head_pos_pattern", patterns, (7, 2, 1), (slice(None), 2, 1)),
        ("layer_head_dest_src_pos_pattern", patterns, (7, 2, 1, 0), (slice(None), 2, 1, 0)),
    ]
    for name, zeros, index, at in cases:
        value = zeros.clone()
        wanted = zeros.clone()
        wanted[at] = 1
        setter = getattr(patching, f"{name}_patch_setter")
        assert setter(value, index, torch.ones_like(zeros)) is value
        assert torch.equal(value, wanted)
        assert 0 < wanted.sum() < wanted.numel()


def test_the_sweeps_of_every_kind_are_stacked_in_one_order(llama: Pair) -> None:
    heads = llama.model.cfg.n_heads
    names = {"all_pos": (5, 3, heads), "by_pos": (5, 3, LENGTH, heads)}
    for where, shape in names.items():
        found = llama.sweep(f"get_act_patch_attn_head_{where}_every")
        assert found.shape == shape
        for at, kind in enumerate(["out", "q", "k", "v", "pattern"]):
            one = llama.sweep(f"get_act_patch_attn_head_{kind}_{where}")
            one = one.transpose(1, 2) if kind == "pattern" and where == "by_pos" else one
            assert torch.equal(found[at, ..., : one.shape[-1]], one)
            assert found[at, ..., one.shape[-1] :].isnan().all()
    found = llama.sweep("get_act_patch_block_every")
    assert found.shape == (3, 3, LENGTH)
    for at, kind in enumerate(["resid_pre", "attn_out", "mlp_out"]):
        assert torch.equal(found[at], llama.sweep(f"get_act_patch_{kind}"))


# Paths.


def path_by_hand(pair: Pair, src: tuple[int, int], dst: tuple[int, int], component: str) -> Tensor:
    """The receiver's q, k or v in a run where all but the sender is frozen as corrupted; then that put in."""
    frozen = []
    for layer in range(dst[0]):

        def hold_z(value: Tensor, hook: Any, layer: int = layer) -> Tensor:
            new = pair.corrupted_cache["z", layer].clone()
            if layer == src[0]:
                new[:, :, src[1]] = pair.cache["z", layer][:, :, src[1]]
            return new

        def hold_mlp(value: Tensor, hook: Any, layer: int = layer) -> Tensor:
            return pair.corrupted_cache["mlp_out", layer]

        frozen += [
            (f"blocks.{layer}.attn.hook_z", hold_z),
            (f"blocks.{layer}.hook_mlp_out", hold_mlp),
        ]
    kept: dict[str, Tensor] = {}
    name = f"blocks.{dst[0]}.attn.hook_{component}"

    def keep(value: Tensor, hook: Any) -> None:
        kept["value"] = value.clone()

    pair.model.run_with_hooks(pair.corrupted, fwd_hooks=[*frozen, (name, keep)])

    def put(value: Tensor, hook: Any) -> Tensor:
        value[:, :, dst[1]] = kept["value"][:, :, dst[1]]
        return value

    return score(pair.model.run_with_hooks(pair.corrupted, fwd_hooks=[(name, put)]))


@pytest.mark.parametrize("component", ["q", "k", "v"])
def test_a_direct_path_is_the_one_made_by_freezing_everything_else(
    pair: Pair, component: Any
) -> None:
    given = (pair.model, pair.corrupted, pair.cache, pair.corrupted_cache, score)
    found = patching.get_act_patch_direct_path_all_sources(*given, component, verbose=False)
    cfg = pair.model.cfg
    heads = cfg.n_heads if component == "q" else cfg.n_key_value_heads
    assert found.shape == (3, cfg.n_heads, 3, heads)
    for src, dst in [
        ((0, 1), (1, 0)),
        ((0, 0), (2, heads - 1)),
        ((1, 2), (2, 1)),
        ((0, 3), (2, 0)),
    ]:
        wanted = path_by_hand(pair, src, dst, component)
        torch.testing.assert_close(found[(*src, *dst)], wanted, rtol=0, atol=1e-6)
    moved = (found[0, :, 2] - score(pair.corrupted_logits)).abs()
    assert moved.max() > 3e-4
    one = patching.get_act_patch_direct_path(*given, 0, 1, component, verbose=False)
    assert_near(one, found[0, 1], pair.corrupted_logits)
    assert (one[0] == 0).all()


def test_paths_are_refused_where_a_norm_stands_between_head_and_stream() -> None:
    pair = Pair("gemma2", layers=2)
    given = (pair.model, pair.corrupted, pair.cache, pair.corrupted_cache, score)
    with pytest.raises(ValueError, match="a norm or a multiplier comes between"):
        patching.get_act_patch_direct_path(*given, 0, 0, verbose=False)


def test_paths_refuse_wrong_heads_components_and_caches(llama: Pair) -> None:
    given = (llama.model, llama.corrupted, llama.cache, llama.corrupted_cache, score)
    with pytest.raises(IndexError, match=r"no head 9\.0: layers are 0 to 2, heads 0 to 3"):
        patching.get_act_patch_direct_path(*given, 9, 0)
    with pytest.raises(ValueError, match="component is 'q', 'k' or 'v'; got 'x'"):
        patching.get_act_patch_direct_path(*given, 0, 0, "x")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"corrupted_cache has no 'blocks\.0\.attn\.hook_z'"):
        patching.get_act_patch_direct_path(*given[:3], {}, score, 0, 0)


# What is measured, and the result.


def test_examples_metrics_and_baselines_are_kept_apart(llama: Pair) -> None:
    both = {"lead": scores, "first": lambda logits: logits[:, -1, 3]}
    plain = llama.sweep("get_act_patch_mlp_out")
    found = llama.sweep("get_act_patch_mlp_out", metric=both, reduce="none", baseline=True)
    assert found.values.shape == (2, 3, LENGTH, BATCH)
    assert (found.axis_names, found.metric_names) == (["layer", "pos"], ["lead", "first"])
    assert torch.equal(found.baseline[0], scores(llama.corrupted_logits))
    lead = found["lead"]
    assert lead.values.shape == (3, LENGTH, BATCH)
    torch.testing.assert_close(lead.mean(), plain)
    mean = llama.sweep("get_act_patch_mlp_out", metric=scores, reduce="mean")
    torch.testing.assert_close(mean, plain)
    assert torch.equal(lead.effect(), lead.values - scores(llama.corrupted_logits))
    clean = torch.stack([metric(llama.clean_logits) for metric in both.values()])
    back = found.normalized(clean)
    low, high = found.baseline[1, 0], clean[1, 0]
    torch.testing.assert_close(
        back[1, 0, CHANGED, 0], (found.values[1, 0, CHANGED, 0] - low) / (high - low)
    )
    restored = llama.sweep("get_act_patch_resid_pre", metric=scores, reduce="none", baseline=True)
    way = (scores(llama.clean_logits) - scores(llama.corrupted_logits)).abs()
    shares = restored.normalized(scores(llama.clean_logits))[0, CHANGED]
    assert_near((shares - 1) * way, torch.zeros(BATCH), llama.clean_logits)
    assert repr(found) == (
        "PatchingResult of lead, first: metric 2, layer 3, pos 5, example 3; with baseline"
    )
    with pytest.raises(KeyError, match="no metric 'other'; there are"):
        found["other"]


def test_stacked_results_have_a_patch_type(llama: Pair) -> None:
    found = llama.sweep(
        "get_act_patch_attn_head_all_pos_every", metric=scores, reduce="none", baseline=True
    )
    heads = llama.model.cfg.n_heads
    assert found.values.shape == (5, 3, heads, BATCH)
    assert found.axis_names == ["patch_type", "layer", "head"]
    assert found.patch_type_names == ["out", "q", "k", "v", "pattern"]
    assert len(found.cells) == found.values[..., 0].numel()
    assert found.effect()[2, ..., -1, :].isnan().all()  # a key's head that does not exist
    assert found.permutation_pvalue()[2, ..., -1].isnan().all()


def result(values: Tensor, baseline: Tensor | None = None) -> patching.PatchingResult:
    cells = [(at,) for at in range(len(values))]
    return patching.PatchingResult(
        values=values,
        axis_names=["layer"],
        cells=cells,
        columns=["layer"],
        metric_names=["metric"],
        reduced=values.ndim == 1,
        baseline=baseline,
    )


def test_statistics_are_the_textbook_ones() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0], [0.5, -1.0, 0.2]])
    found = result(values, torch.zeros(3))
    torch.testing.assert_close(found.stderr(), values.std(-1) / math.sqrt(3))
    # All 8 signs by hand: [1, 2, 4] is the largest mean, and its mirror the smallest.
    assert found.permutation_pvalue().tolist() == [2 / 8, 1.0]
    assert found.permutation_pvalue(alternative="greater").tolist() == [1 / 8, 5 / 8]
    assert found.permutation_pvalue(alternative="less").tolist() == [1.0, 4 / 8]
    many = torch.randn(2, 400, generator=torch.Generator().manual_seed(0)) + torch.tensor(
        [[0.0], [0.5]]
    )
    large = result(many, torch.zeros(400))
    low, high = large.bootstrap_ci(n_resamples=2000)
    torch.testing.assert_close(high - low, 2 * 1.96 * large.stderr(), rtol=0.1, atol=0)
    assert ((low < many.mean(-1)) & (many.mean(-1) < high)).all()
    null, real = large.permutation_pvalue().tolist()
    assert null > 0.05
    assert real == pytest.approx(1 / 1001)
    theirs = utilities.bootstrap_ci(many, n_resamples=2000)
    for one, other, ours in zip((low, high), theirs, bootstrap(many, resamples=2000), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, ours)
    low, high = large.bootstrap_ci(statistic="median")
    for one, other in zip((low, high), utilities.bootstrap_ci(many, statistic="median")):
        assert torch.equal(one, other)
    assert ((low < many.median(-1).values) & (many.median(-1).values < high)).all()


def test_statistics_say_what_they_need() -> None:
    with pytest.raises(
        ValueError, match="stderr needs a number for each example: sweep with reduce="
    ):
        result(torch.zeros(2)).stderr()
    with pytest.raises(
        ValueError, match="effect needs the corrupted run itself: sweep with baseline="
    ):
        result(torch.zeros(2, 3)).effect()
    with pytest.raises(ValueError, match="at least 2 examples; there is 1"):
        result(torch.zeros(2, 1)).stderr()
    with pytest.raises(ValueError, match=r"clean_baseline has shape \(2,\)"):
        result(torch.zeros(2, 3), torch.zeros(3)).normalized(torch.zeros(2))


class Frame:
    """As much of a pandas data frame as patching asks for; pandas is not needed to test it."""

    def __init__(self, rows: list[Any], columns: list[str]) -> None:
        self.rows, self.columns = [list(row) for row in rows], list(columns)

    def to_numpy(self) -> Tensor:
        return torch.tensor(self.rows)


def test_tables_are_data_frames(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def fake(name: str, *rest: Any) -> Any:
        return SimpleNamespace(DataFrame=Frame) if name == "pandas" else real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", fake)
    table = patching.make_df_from_ranges([2, 3], ["layer", "pos"])
    assert table.rows == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    table = Frame([[1, 4], [0, 2]], ["layer", "pos"])
    flat, used = patching.generic_activation_patch(
        llama.model,
        llama.corrupted,
        llama.cache,
        score,
        patching.layer_pos_patch_setter,
        "resid_pre",
        index_df=table,
        return_index_df=True,
    )
    whole = llama.sweep("get_act_patch_resid_pre")
    assert_near(flat, torch.stack([whole[1, 4], whole[0, 2]]), llama.corrupted_logits)
    assert used.rows == table.rows
    kept = llama.sweep("get_act_patch_mlp_out", metric={"a": scores, "b": scores}, reduce="none")
    long = kept.to_dataframe()
    assert long.columns == ["metric", "layer", "pos", "example", "value"]
    assert len(long.rows) == 2 * 3 * LENGTH * BATCH
    assert long.rows[-1] == ["b", 2, LENGTH - 1, BATCH - 1, kept.values[1, 2, -1, -1].item()]
    assert kept.index_df.rows[:2] == [[0, 0], [0, 1]]


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *rest: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        patching.make_df_from_ranges([2], ["layer"])


def test_wrong_questions_are_refused(llama: Pair) -> None:
    with pytest.raises(ValueError, match="'scores' returned shape"):
        llama.sweep("get_act_patch_resid_pre", metric={"scores": scores})
    with pytest.raises(ValueError, match=r"each of the 3 examples; 'metric' returned shape \(\)"):
        llama.sweep("get_act_patch_resid_pre", reduce="none")
    with pytest.raises(ValueError, match="reduce is 'scalar', 'mean' or 'none'; got 'sum'"):
        llama.sweep("get_act_patch_resid_pre", reduce="sum")
    with pytest.raises(ValueError, match="axes begin with 'layer'"):
        llama.sweep("get_act_patch_resid_pre", index_axis_names=["layer", "foo"])
    with pytest.raises(ValueError, match="index_axis_names or index_df, one of the two"):
        llama.sweep("get_act_patch_resid_pre", index_axis_names=None)
    with pytest.raises(ValueError, match="a PatchingResult has index_df"):
        llama.sweep("get_act_patch_resid_pre", baseline=True, return_index_df=True)
    with pytest.raises(KeyError, match=r"clean_cache has no 'blocks\.0\.hook_resid_pre'"):
        patching.get_act_patch_resid_pre(llama.model, llama.corrupted, {}, score)
    _, bare = llama.model.run_with_cache(llama.clean[:1], remove_batch_dim=True)
    with pytest.raises(ip.EditShapeError, match="without remove_batch_dim=True"):
        patching.get_act_patch_resid_pre(llama.model, llama.corrupted, bare, score)


def test_training_mode_is_refused(llama: Pair) -> None:
    llama.module.train()
    try:
        with pytest.raises(ValueError, match=r"training mode\. Call model\.eval\(\) first"):
            llama.sweep("get_act_patch_resid_pre")
    finally:
        llama.module.eval()


def test_the_pocket_model_keeps_a_landmark_at_its_name_until_block_five() -> None:
    model = ip.load("pocket")
    clean, corrupted = model.to_tokens(CLEAN), model.to_tokens(CORRUPT)
    assert clean.shape == corrupted.shape
    paris, rome = model.to_single_token(" Paris"), model.to_single_token(" Rome")

    def lead(logits: Tensor) -> Tensor:
        return logits[:, -1, paris] - logits[:, -1, rome]

    logits, cache = model.run_with_cache(clean)
    found = patching.get_act_patch_resid_pre(
        model, corrupted, cache, lead, reduce="none", baseline=True
    )
    back = found.normalized(lead(logits))[..., 0]
    differs = int((clean != corrupted).nonzero()[0, 1])
    assert back[0].argmax() == differs
    assert back[0, differs] > 0.6
    assert back[6].argmax() == clean.shape[1] - 1
    assert back[6, -1] > 0.8
    assert abs(back[0, -1]) < 1e-5


def test_prompts_of_different_lengths_are_refused() -> None:
    model = ip.load("pocket", device="cpu")
    _, cache = model.run_with_cache("The capital of France is", prepend_bos=True)
    corrupt = model.to_tokens("The capital of Germany is", prepend_bos=False)
    with pytest.raises(ValueError, match="must have the same number of tokens"):
        patching.get_act_patch_resid_pre(model, corrupt, cache, lambda logits: logits[0, -1, 0])
