"""What a sweep says it took is what went through the blocks, and groups of positions cost least."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.models.transformer import TransformerModel
from interpose.sweeps import execution, planning
from interpose.sweeps.cells import Cell
from interpose.sweeps.planning import Group, groups
from tests.sweeps import oracle
from tests.sweeps.oracle import LENGTH

NORMS = {"gpt2": "ln_1", "llama": "input_layernorm", "mistral": "input_layernorm"}
METRIC = ip.metrics.logit_difference(20, 33)


@contextmanager
def counted(model: TransformerModel, name: str) -> Iterator[list[list[tuple[int, int]]]]:
    """A ``with`` block that sees how many rows and positions each block computes, call by call.

    A block that is passed by is called too, so what counts is its first norm. A norm with another forward is another
    model, which is proven anew: that is not counted.
    """
    blocks = oracle.blocks(model.module)
    found: list[list[tuple[int, int]]] = [[] for _ in blocks]
    with ExitStack() as stack:
        for calls, block in zip(found, blocks):
            norm = block.get_submodule(NORMS[name])

            def see(x: Any, calls: Any = calls, forward: Any = norm.forward) -> Any:
                calls.append(tuple(x.shape[:2]))
                return forward(x)

            norm.forward = see  # no hook: with hooks of others on it, a model runs cell by cell
            stack.callback(delattr, norm, "forward")
        ip.sweep(model, *oracle.pair(), over="layer", layer=[0], metric=METRIC, progress=False)
        for calls in found:
            calls.clear()
        yield found


def token_layers(found: list[list[tuple[int, int]]]) -> int:
    return sum(rows * positions for calls in found for rows, positions in calls)


@functools.cache
def build(name: str, layers: int = 4) -> TransformerModel:
    return TransformerModel(oracle.build(name, layers))


SWEEPS: dict[str, dict[str, Any]] = {
    "positions": {},
    "few rows": {"max_rows": 5},
    "one row": {"max_rows": 1},
    "late positions": {"pos": [-1, -3], "max_rows": 4},
    "late layers": {"layer": [2, 3]},
    "heads": {"site": "z", "over": ("layer", "head")},
    "corrupt": {"patch": "corrupt"},
    "zeros": {"edit": ip.zero, "pos": [4, 11]},
    "batches": {"plan": "batches", "max_rows": 7},
    "one per cell": {"plan": "one per cell", "pos": [3, 9]},
    "all logits": {"metric": ip.metrics.loss()},
    "two batches": {"batch_size": 2},
    "outside of blocks": {"site": ["hook_embed", "blocks.1.hook_resid_pre"], "over": "site"},
}


@pytest.mark.parametrize("options", SWEEPS.values(), ids=SWEEPS)
@pytest.mark.parametrize("name", NORMS)
def test_token_layers_are_those_that_pass_through_the_blocks(
    name: str, options: dict[str, Any]
) -> None:
    model, (clean, corrupt) = build(name), oracle.pair(3)
    options = {"metric": METRIC, "progress": False, **options}
    corrupt_or_none = None if "edit" in options else corrupt
    with counted(model, name) as found:
        result = ip.sweep(model, clean, corrupt_or_none, **options)
    assert result.tally.token_layers == token_layers(found)
    assert result.tally.forwards == max(len(calls) for calls in found)
    cells = result.each[0, ..., 0].numel()
    assert result.tally.one_per_cell == cells * clean.numel() * 4


@pytest.mark.parametrize("name", ["mistral"])
def test_positions_from_a_kv_cache_that_forgets_are_run_again_and_counted(name: str) -> None:
    model, (clean, corrupt) = build(name), oracle.pair()
    with counted(model, name) as found:
        result = ip.sweep(model, clean, corrupt, metric=METRIC, progress=False)
    assert result.tally.plan == "wavefront"
    assert (2, oracle.FIRST) in found[0]  # the prefix
    assert result.tally.token_layers == token_layers(found)


def test_short_floats_are_run_once_more_for_the_noise_floor_and_counted() -> None:
    model = TransformerModel(oracle.build("gpt2").half())
    clean, corrupt = oracle.pair()
    ip.sweep(model, clean, corrupt, over="layer", metric=METRIC, progress=False)
    with counted(model, "gpt2") as found:
        result = ip.sweep(model, clean, corrupt, metric=METRIC, progress=False)
    assert result.tally.token_layers == token_layers(found)


def test_a_mask_of_one_text_alone_takes_two_reference_runs() -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    masked = {"input_ids": clean, "attention_mask": torch.ones_like(clean)}
    with counted(model, "gpt2") as found:
        result = ip.sweep(model, masked, {"input_ids": corrupt}, metric=METRIC, progress=False)
    assert result.tally.forwards == max(len(calls) for calls in found)
    assert result.tally.token_layers == token_layers(found)


def test_names_swapped_in_a_sentence_take_a_thirteenth() -> None:
    """Twelve layers, fifteen tokens of which the eleventh differs: the usual first experiment."""
    model, (clean, corrupt) = build("gpt2", 12), oracle.pair(1, 15, 10)
    corrupt[0, 11:] = clean[0, 11:]
    with counted(model, "gpt2") as found:
        result = ip.sweep(model, clean, corrupt, metric=METRIC, progress=False)
    assert result.tally.one_per_cell == 12 * 15 * 15 * 12
    assert token_layers(found) * 13 <= result.tally.one_per_cell
    assert result.tally.token_layers == token_layers(found)
    assert float(result.effect.abs().max()) >= 1e-2


# Rows.


@pytest.mark.parametrize("max_rows", [1, 4, 6, 10, 64])
def test_no_more_rows_than_allowed(max_rows: int) -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    options = {"max_rows": max_rows, "metric": METRIC, "progress": False}
    allowed = max(max_rows, 2)  # a cell has two examples
    with counted(model, "gpt2") as found:
        result = ip.sweep(model, clean, corrupt, plan="batches", **options)
    rows = [rows for rows, _ in found[0][1:]]  # after the reference run
    assert max(rows) <= allowed
    assert sum(rows) == result.each.numel()
    with counted(model, "gpt2") as found:
        result = ip.sweep(model, clean, corrupt, **options)
    # In the last block some rows may stand for nothing, so that their number is no other axis's.
    assert max(rows for calls in found[:-1] for rows, _ in calls[1:]) <= allowed
    live = 8 * 4 * 2
    beyond = sum(rows for rows, _ in found[-1][1:]) - live
    assert 0 <= beyond <= 6 * len(found[-1])
    passes = -(-live // (allowed // 2 * 2))
    assert result.tally.forwards == 1 + passes


def test_layers_before_a_pass_are_not_computed() -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    with counted(model, "gpt2") as found:
        ip.sweep(model, clean, corrupt, layer=[3], metric=METRIC, progress=False)
    assert [len(calls) for calls in found] == [1, 1, 1, 2]
    assert found[3][1][1] == oracle.LENGTH - oracle.FIRST


def test_the_order_of_axes_costs_nothing() -> None:
    """Passes of a few rows are filled layer by layer, so that late ones pass by most of the blocks."""
    model, ends = build("gpt2"), oracle.pair()
    spent = [
        ip.sweep(model, *ends, over=over, max_rows=9, metric=METRIC, progress=False).tally
        for over in (("layer", "pos"), ("pos", "layer"))
    ]
    assert spent[0].token_layers == spent[1].token_layers
    assert spent[0].forwards == spent[1].forwards


# Groups of positions.


def cost(
    found: Sequence[Group], cells: Sequence[Cell], length: int, layers: int, batch: int, least: int
) -> int:
    """Every pass, every position of every row in the layers it goes through, every prefix."""
    total = 0
    for group in found:
        work = sum((layers - cells[number].layer) * batch for number in group.cells)
        total += layers * least + work * (length - group.start) + layers * batch * group.start
    return total


@pytest.mark.parametrize("seed", range(30))
def test_groups_cost_least_of_all_partitions(seed: int) -> None:
    draw = torch.Generator("cpu").manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw, device="cpu"))

    length, layers, batch = number(3, 10), number(1, 6), number(1, 4)
    first, least = number(0, length), (0, 1, 5, 20, 100)[number(0, 5)]
    cells = [
        Cell(site="", layer=number(0, layers), pos=number(0, length)) for _ in range(number(1, 25))
    ]
    sizes = {"length": length, "layers": layers, "batch": batch, "least": least}
    found = groups(cells, first=first, **sizes)
    alive = [n for n, cell in enumerate(cells) if cell.pos is not None and cell.pos >= first]
    assert sorted(n for group in found for n in group.cells) == alive
    for group in found:
        assert group.start == min(cells[n].pos or 0 for n in group.cells)
    starts = sorted({cells[n].pos or 0 for n in alive})
    options = []
    for size in range(len(starts)):
        for inner in itertools.combinations(starts[1:], size):
            bounds = [starts[0], *inner, length]
            options.append(
                [
                    Group(
                        start=start,
                        cells=tuple(n for n in alive if start <= (cells[n].pos or 0) < end),
                    )
                    for start, end in itertools.pairwise(bounds)
                ]
            )
    if not alive:
        assert found == []
        return
    assert cost(found, cells, **sizes) == min(cost(each, cells, **sizes) for each in options)


def test_more_groups_where_passes_are_cheap() -> None:
    cells = [Cell(site="", layer=layer, pos=pos) for layer in range(12) for pos in range(15)]
    sizes = {"first": 10, "length": 15, "layers": 12, "batch": 1}
    assert len(groups(cells, least=0, **sizes)) > 1
    assert len(groups(cells, least=10**6, **sizes)) == 1


def test_many_positions_are_grouped_quickly_and_none_is_lost() -> None:
    cells = [Cell(site="", layer=layer, pos=pos) for layer in range(2) for pos in range(1000)]
    found = groups(cells, first=3, length=1000, layers=2, batch=1, least=0)
    assert 1 < len(found) <= 96
    live = {n for n, cell in enumerate(cells) if cell.pos is not None and cell.pos >= 3}
    assert {n for group in found for n in group.cells} == live
    assert all((cells[n].pos or 0) >= group.start for group in found for n in group.cells)


def test_cells_without_positions_are_one_group_from_the_first_difference_on() -> None:
    cells = [Cell(site="", layer=layer) for layer in range(4)]
    sizes = {"length": 9, "layers": 4, "batch": 1, "least": 5}
    assert groups(cells, first=4, **sizes) == [Group(start=4, cells=(0, 1, 2, 3))]
    assert groups(cells, first=9, **sizes) == []


def test_long_texts_run_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """8B parameters in 16 bits, 4,096 tokens, on a GPU of 140 GiB: by count, well below 70 GB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (125 << 30, 140 << 30))
    device, gib = torch.device("cuda"), 2**30
    sizes = planning.Sizes(width=4096, inner=14336, heads=32, layers=32, bytes=2, device=device)
    for length, logits in ((4096, 0), (4096, 4096 * 128256), (32768, 0)):
        rows = sizes.most_rows(positions=length, length=length, logits=logits)
        examples = sizes.most_examples(length=length, logits=logits)
        stream = length * 4096 * 2
        scores, inner = 2 * 32 * length**2 * 2, 2 * length * 14336 * 2
        a_row = 4 * stream + inner + scores + 6 * logits
        kept = 32 * 5 * stream + 2 * 2 * logits  # two streams, keys and values, values to patch
        assert rows == examples == 1 or rows * a_row + examples * kept < 40 * gib
    short = sizes.most_rows(positions=32, length=32, logits=0)
    assert short * 32 > 30_000  # enough tokens for any GPU
    assert sizes.most_examples(length=32, logits=0) >= 16


@pytest.mark.parametrize("metric", [METRIC, ip.metrics.loss()], ids=["few logits", "all logits"])
def test_examples_that_do_not_fit_together_run_apart(
    metric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair(batch=5)
    wanted = ip.sweep(model, clean, corrupt, metric=metric, progress=False)
    seen = []
    refer = vars(execution)["refer"]

    def spied(*given: Any, **options: Any) -> Any:
        found = refer(*given, **options)
        seen.append(found.batch)
        return found

    monkeypatch.setattr(execution, "refer", spied)
    logits = LENGTH * 99 if isinstance(metric, ip.metrics.loss) else 0
    sizes = planning.Sizes.of(model)
    monkeypatch.setattr(planning, "_memory", lambda _: 2**40)
    one = 2**40 / sizes.most_examples(length=LENGTH, logits=logits)
    monkeypatch.setattr(planning, "_memory", lambda _: 2.5 * one)
    found = ip.sweep(model, clean, corrupt, metric=metric, progress=False)
    assert seen == [2, 2, 1]
    assert oracle.near(model.module, found.each, wanted.each)
