"""Tensors, strengths and texts by row, also where rows have different numbers of positions."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.edits.other_values import other_rows
from interpose.errors import EditShapeError
from tests.edits.models import ids, talking, wrapped

pytestmark = pytest.mark.bits

WIDTH = 32
MASK = torch.zeros(5, 6, dtype=torch.bool)  # rows 0 and 2 have one position, 1 and 4 two, 3 none
for row, places in ((0, [1]), (1, [0, 3]), (2, [4]), (4, [2, 5])):
    MASK[row, places] = True


def value(edit: Any, rows: int = 5) -> Tensor:
    _, cache = wrapped("gpt2").run_with_cache(
        ids(rows), names_filter="blocks.1.hook_resid_post", hooks=[edit]
    )
    found: Tensor = cache["blocks.1.hook_resid_post"]
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [None, [1, 2, 4]])
def test_each_row_gets_its_own_whatever_rows_have_as_many_positions(rows: Any) -> None:
    where: dict[str, Any] = {"layer": 1, "pos": MASK, "rows": rows}
    chosen = list(range(5)) if rows is None else rows
    plain, numbers = value(ip.scale("resid_post", 1.0, layer=1)), drawn(5, 1, WIDTH)
    strength = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.25])
    wanted, partly = plain.clone(), plain.clone()
    for at in chosen:
        wanted[at, MASK[at]] = numbers[at]
        partly[at, MASK[at]] *= 1 - strength[at]
    for given in (numbers, numbers[chosen]):
        assert torch.equal(value(ip.fill("resid_post", given, **where)), wanted)
        assert torch.equal(value(ip.patch("resid_post", given.expand(-1, 6, -1), **where)), wanted)
    for strengths in (strength, strength[chosen], strength[chosen].tolist(), strength.numpy()):
        found = value(ip.zero("resid_post", **where, strength=strengths))
        assert torch.allclose(found, partly, atol=1e-6)


def test_rows_that_only_happen_to_be_as_many_as_have_a_number_of_positions_are_refused() -> None:
    where: dict[str, Any] = {"layer": 1, "pos": MASK}
    for edit in (
        ip.zero("resid_post", **where, strength=torch.ones(2)),
        ip.fill("resid_post", drawn(2, 1, WIDTH), **where),
        ip.patch("resid_post", drawn(2, 6, WIDTH), **where),
    ):
        with pytest.raises(EditShapeError, match=r"2 rows; 'blocks.1.hook_resid_post' has 5"):
            value(edit)


def test_every_row_of_a_source_is_drawn_by_rows_beyond_it() -> None:
    for there in (2, 3, 5):
        chosen = torch.stack([other_rows(12, there, seed) for seed in range(40)])
        assert chosen.min() == 0
        assert chosen.max() == there - 1
        for at in range(12):
            expected = set(range(there)) - ({at} if at < there else set())
            assert set(chosen[:, at].tolist()) == expected, (there, at)
    assert other_rows(3, 1, 0).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "rows", [(0, 2), [0, 2], range(0, 3, 2), torch.tensor([0, 2]), slice(0, 3, 2)]
)
def test_a_text_is_looked_for_in_rows_said_in_any_way(rows: Any) -> None:
    model, said = talking(), ["the cat sat", "the dog sat", "a cat sat"]
    edit = ip.zero("resid_post", layer=1, pos=" cat", rows=rows)
    _, cache = model.run_with_cache(said, names_filter=("resid_post", 1), hooks=[edit])
    gone = (cache["resid_post", 1] == 0).all(-1)
    assert gone.tolist() == [[False, True, False], [False] * 3, [False, True, False]]


@pytest.mark.parametrize("use_cache", [True, False])
def test_what_is_patched_at_a_text_while_text_is_generated_has_rows_of_its_own(
    use_cache: bool,
) -> None:
    model = talking()
    said = ["the cat sat on the cat", "the dog sat on the cat", "the cat sat on the mat"]
    assert model.to_tokens(said).shape == (3, 6)
    there = drawn(3, 6, model.cfg.d_model)
    seen: list[Tensor] = []
    edit = ip.patch("resid_post", there, layer=1, pos=" cat")
    note = ("blocks.1.hook_resid_post", lambda value, hook: seen.append(value.clone()))
    with model.hooks([edit, note]):
        model.generate(said, max_new_tokens=2, use_cache=use_cache, do_sample=False)
    for row, places in enumerate(([1, 5], [5], [1])):
        same = (seen[0][row] == there[row]).all(-1)
        assert same.nonzero().flatten().tolist() == places


@pytest.mark.parametrize("strength", [torch.tensor([0.5, 0.9]), torch.tensor([0.1, 0.5, 0.2, 0.9])])
def test_a_knockout_of_some_rows_has_strengths_for_them_or_for_all(strength: Tensor) -> None:
    model, where = wrapped("gpt2"), ("pattern", 1)
    edit = ip.knockout(1, query=-1, key=0, rows=[1, 3], strength=strength)
    found = model.run_with_cache(ids(4), names_filter=where, hooks=[edit])[1][where]
    plain = model.run_with_cache(ids(4), names_filter=where)[1][where]
    wanted = plain.clone()
    wanted[[1, 3], :, -1, 0] *= 1 - torch.tensor([0.5, 0.9])[:, None]
    wanted = wanted / wanted.sum(-1, keepdim=True)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert float((found - plain).abs().max()) > 1e-3


def test_numbers_of_numpy_and_bounds_of_several_numbers() -> None:
    assert ip.scale("z", numpy.float64(0.5)).to_python() == "ip.scale('z', 0.5)"
    assert repr(ip.zero("z", strength=numpy.float64(0.5))) == "zero('z', strength=0.5)"
    with pytest.raises(EditShapeError, match="low and high are one number each"):
        ip.project_cap("z", drawn(WIDTH), torch.zeros(3), torch.ones(3))
    with pytest.raises(TypeError, match=r"heads are whole numbers; got \[0.5\]"):
        wrapped("gpt2").run_with_hooks(ids(), hooks=[ip.zero("z", layer=1, head=[0.5])])


def test_rows_of_other_lengths_are_not_resampled_from_their_padding() -> None:
    model = ip.load("pocket")
    texts = ["The Eiffel Tower is in", "Hello"]
    with pytest.raises(ip.EditError, match="some would get the padding of others"):
        model.run_with_hooks(texts, hooks=[ip.resample("z", layer=3)])
    same = ["The Eiffel Tower is in", "The Trevi Fountain is in"]
    swapped = model.run_with_hooks(same, hooks=[ip.resample("resid_pre", layer=3)])
    assert torch.allclose(swapped, model(same).flip(0), atol=1e-4)
