"""What a sweep is given: texts that differ in other things than tokens, tokens with padding, and mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.models.transformer import TransformerModel
from tests.models import texts
from tests.sweeps import oracle
from tests.sweeps.oracle import LAYERS, LENGTH, Cell, at

pytestmark = pytest.mark.bits

METRIC = ip.metrics.logit_difference(20, 33)
ONES = torch.ones(1, 4, dtype=torch.long)


def sweep(model: Any, clean: Any, corrupt: Any = None, **options: Any) -> ip.SweepResult:
    return ip.sweep(model, clean, corrupt, **{"metric": METRIC, "progress": False, **options})


def kinds(tokens: Tensor, kind: int) -> dict[str, Tensor]:
    """Tokens of which those from the fourth on are of a kind, which GPT-2 embeds too."""
    types = torch.zeros_like(tokens)
    types[:, 4:] = kind
    return {"input_ids": tokens, "token_type_ids": types}


def test_runs_may_differ_in_something_else_than_tokens() -> None:
    model, (tokens, _) = TransformerModel(oracle.build("gpt2")), oracle.pair()
    clean, corrupt = kinds(tokens, 1), kinds(tokens, 2)
    places = [2, 4, LENGTH - 1]
    cells = [Cell(oracle.Spot(b), at(pos)) for b in oracle.blocks(model.module) for pos in places]
    last = oracle.patched(model.module, corrupt, clean, cells)[..., -1, :]
    wanted = (last[..., 20] - last[..., 33]).reshape(LAYERS, len(places), 2)
    for plan in ("wavefront", "one per cell"):
        result = sweep(model, clean, corrupt, pos=places, plan=plan)
        assert oracle.near(model.module, result.each[0], wanted), plan
        assert float(result.effect.abs().max()) > 1e-2
        same = result.baseline[0].expand(LAYERS, 2)
        assert oracle.near(model.module, result.each[0][:, 0], same), plan


def test_what_only_one_run_is_given_may_matter_everywhere() -> None:
    model, (tokens, _) = TransformerModel(oracle.build("gpt2")), oracle.pair()
    clean, corrupt = kinds(tokens, 1), {"input_ids": tokens}
    found = [sweep(model, clean, corrupt, plan=plan) for plan in ("wavefront", "one per cell")]
    assert float(found[1].effect[:, 0].abs().max()) > 1e-2
    assert oracle.near(model.module, found[0].each, found[1].each)


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_with_padding_are_measured_at_the_end_of_each_text(side: str) -> None:
    model = texts.speaking("llama", layers=LAYERS)
    said = ["the cat sat on the mat", "the dog sat"]
    tokens = model.to_tokens(said, padding_side=side)
    assert model.mask_of(tokens) is not None
    with torch.no_grad():
        wanted = torch.stack([model(text)[0, -1] for text in said])
        column = model(tokens, return_type="logits")[:, -1]
    assert side == "left" or float((column - wanted).abs().max()) > 1e-2
    result = sweep(model, tokens, over="layer", edit=ip.zero)
    assert oracle.near(model.module, result.clean[0], wanted[:, 20] - wanted[:, 33])
    measured = ip.measure(model, tokens, METRIC)
    assert oracle.near(model.module, measured.without, result.clean)


@pytest.mark.parametrize(
    ("clean", "corrupt", "error", "said"),
    [
        ([], [], ValueError, "there is no text: give at least one"),
        ([5, "the", 7], None, TypeError, r"texts are strings, or tokens, integers .*; got \[5, 'the', 7\]"),
        (torch.ones(1, 4), None, TypeError, r"integers \[pos\] or \[batch, pos\] in .*; got \[1, 4\]"),
        (torch.ones(1, 1, 4).long(), None, TypeError, r"got \[1, 1, 4\]"),
        ({"inputs_embeds": torch.ones(1, 4, 8)}, None, ValueError, r"has input_ids, tokens .*; got inputs_embeds"),
        ({"input_ids": ONES, "use_cache": False}, None, ValueError, "'use_cache' is False: a mapping of texts"),
        ({"input_ids": ONES, "attention_mask": torch.ones(1, 1, 4, 4)}, None, ValueError, r"1, 1, 4, 4"),
        ({"input_ids": ONES, "attention_mask": ONES[:, 1:]}, None, ValueError, r"_mask' is \(1, 3\): .*\[1, 4\]"),
        ({"input_ids": ONES, "attention_mask": ONES * 0}, None, ValueError, "text 0 has no tokens"),
    ],
)  # fmt: skip
def test_texts_that_are_none_are_refused(clean: Any, corrupt: Any, error: Any, said: str) -> None:
    model = TransformerModel(oracle.build("gpt2"))
    with pytest.raises(error, match=said):
        sweep(model, clean, corrupt, edit=ip.zero)


def test_a_text_beyond_the_models_positions_is_refused_and_not_cut() -> None:
    model = ip.load("pocket")
    long = "When Mary and John went to the store, " * 40
    with pytest.raises(ValueError, match=r"a text has \d+ tokens, and the model 256 positions"):
        ip.sweep(model, long, long, metric=ip.metrics.logit(" Mary"), progress=False)


def test_a_bare_module_is_refused_with_the_way_to_wrap_it() -> None:
    module = ip.load("pocket").module
    with pytest.raises(ip.Unsupported, match=r"ip.wrap\(module, tokenizer\); got GPT2LMHeadModel"):
        ip.sweep(module, "a", "b", metric=ip.metrics.logit(" Mary"), progress=False)
    with pytest.raises(ip.Unsupported, match=r"ip.load\(name\), or wrap one .* ip.wrap\(module"):
        ip.batches(module, "a")


def test_texts_may_come_from_a_generator() -> None:
    model = ip.load("pocket")
    texts = ["The Eiffel Tower is in", "The capital of Japan is"]
    found = ip.batches(model, (text for text in texts))
    assert sum(len(batch) for batch in found) == 2


def test_a_metric_at_padding_is_refused() -> None:
    model = texts.speaking("gpt2", layers=LAYERS)
    given = ["the cat sat on the mat", "the dog sat"]
    metric = ip.metrics.logit(20, pos=1)
    with pytest.raises(
        ValueError, match=r"logit\(20, pos=1\) looks at position 1 of 6, which is masked in text 1"
    ):
        sweep(model, given, edit=ip.zero, metric=metric, align="end", pos=-1, over="layer")
    alone = sweep(model, given[1], edit=ip.zero, metric=metric, pos=-1, over="layer")
    shifted = ip.metrics.logit(20, pos=-2)
    ended = sweep(model, given, edit=ip.zero, metric=shifted, align="end", pos=-1, over="layer")
    assert torch.allclose(ended.each[..., 1:], alone.each, atol=1e-4)
