"""Variants that change several sites give what raw torch hooks give, one run at a time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from interpose.models.transformer import TransformerModel
from interpose.sweeps.variants import Variant, run_variants
from tests.sweeps import oracle

pytestmark = pytest.mark.bits
SETS = [  # layers and kinds, so that rows of a site are not neighbours
    [(0, "resid_pre"), (2, "mlp_out")],
    [(1, "mlp_out")],
    [(0, "resid_pre"), (1, "resid_pre"), (2, "resid_post")],
    [(2, "mlp_out")],
    [(0, "mlp_out"), (2, "resid_pre")],
    [(1, "resid_pre"), (2, "mlp_out")],
]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj", "bloom", "mamba"])
@pytest.mark.parametrize("max_rows", [None, 4])
def test_several_changes_of_a_row(name: str, max_rows: int | None) -> None:
    model, tokens = TransformerModel(oracle.build(name)), oracle.pair()[0]
    sets = [s for s in SETS if name != "mamba" or all(kind != "mlp_out" for _, kind in s)]
    variants, wanted = [], []
    for number, places in enumerate(sets):

        def act(value: Tensor, hook: Any = None, by: float = 0.3 + number / 4) -> Tensor:
            value[:, 3:] *= by
            return value

        example = 1 if number % 2 else None
        names = [f"blocks.{layer}.hook_{kind}" for layer, kind in places]
        variants.append(Variant(tuple((site, act) for site in names), example))
        with ExitStack() as stack:
            for layer, kind in places:
                spot = oracle.spot(model.module, name, kind, layer)
                assert spot is not None
                stack.enter_context(spot.through(act))
            whole = oracle.logits(model.module, tokens)
        wanted.append(whole if example is None else whole[[example]])
    found = dict(run_variants(model, {"input_ids": tokens}, variants, max_rows=max_rows))
    assert len(found) == len(sets)
    plain = oracle.logits(model.module, tokens)
    for number, each in enumerate(wanted):
        assert oracle.near(model.module, found[number], each), number
        assert not torch.allclose(each, plain[-len(each) :], atol=1e-2)
