"""What a sweep cannot do is refused with the reason, and what it cannot do fast is done slowly."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor, nn

import interpose as ip
from interpose.errors import NothingMatched, SiteNotFound, Unsupported
from interpose.models.transformer import TransformerModel
from tests.models import texts, tiny
from tests.sweeps import oracle
from tests.sweeps.oracle import LAYERS, LENGTH, Cell, at

METRIC = ip.metrics.logit_difference(20, 33)


def sweep(model: Any, clean: Any, corrupt: Any = None, **options: Any) -> ip.SweepResult:
    return ip.sweep(model, clean, corrupt, **{"metric": METRIC, "progress": False, **options})


@functools.cache
def gpt2() -> TransformerModel:
    return TransformerModel(oracle.build("gpt2"))


@functools.cache
def bert() -> TransformerModel:
    return TransformerModel(tiny.build("bert", "masked", layers=LAYERS))


# Models that look ahead.


def test_a_model_that_looks_ahead_runs_in_plain_batches() -> None:
    model, (clean, corrupt) = bert(), oracle.pair()
    result = sweep(model, clean, corrupt)
    assert result.tally.plan == "batches"
    assert result.tally.why == "later tokens move what comes before them (not causal)"
    assert str(result.tally).endswith("(not causal)")
    spots = [oracle.Spot(layer) for layer in model.module.bert.encoder.layer]
    cells = [Cell(spot, at(pos)) for spot in spots for pos in range(LENGTH)]
    changed = oracle.patched(model.module, corrupt, clean, cells)[..., -1, :]
    wanted = (changed[..., 20] - changed[..., 33]).reshape(LAYERS, LENGTH, 2)
    effect = wanted - result.baseline[0]
    assert float(effect.abs().max()) >= 1e-2
    assert oracle.near(model.module, result.each[0], wanted)
    assert (
        float(effect[1:, 0].abs().max()) > 1e-3
    )  # positions before the first difference matter too


def test_a_wavefront_of_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        sweep(bert(), *oracle.pair(), plan="wavefront")
    assert str(caught.value) == (
        "plan='wavefront' cannot run on BertForMaskedLM: later tokens move what comes before them (not causal)."
    )


def test_a_wavefront_from_outside_of_the_blocks_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"plan='wavefront' .* hook_embed is in no block"):
        sweep(gpt2(), *oracle.pair(), site="hook_embed", over="site", plan="wavefront")


# Rows that depend on each other.


class Centred(nn.Module):
    """What a module returns, less half of its mean over the batch, if there is one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor) -> Tensor:
        made: Tensor = self.inner(hidden_states)
        return made - 0.5 * made.mean(0, keepdim=True) if len(made) > 1 else made


@pytest.mark.parametrize("patch", ["clean", "corrupt"])
@pytest.mark.parametrize("examples", [1, 2])
def test_rows_that_depend_on_each_other_run_one_per_cell(examples: int, patch: str) -> None:
    """Every example is by itself too: with another beside it, each would be another."""
    module = oracle.build("gpt2")
    module.transformer.h[1].mlp = Centred(module.transformer.h[1].mlp)
    model, (clean, corrupt) = TransformerModel(module), oracle.pair(examples)
    result = sweep(model, clean, corrupt, patch=patch)
    assert result.tally.plan == "one per cell"
    assert result.tally.why.startswith("running rows together moves logits by ")
    ends = (corrupt, clean) if patch == "clean" else (clean, corrupt)
    cells = [
        Cell(oracle.Spot(block), at(pos)) for block in module.transformer.h for pos in range(LENGTH)
    ]
    for example in range(examples):
        base, source = (each[example : example + 1] for each in ends)
        changed = oracle.patched(module, base, source, cells)[:, 0, -1]
        wanted = (changed[:, 20] - changed[:, 33]).reshape(LAYERS, LENGTH)
        start = oracle.logits(module, base)[0, -1]
        assert float((wanted - (start[20] - start[33])).abs().max()) >= 1e-2
        assert oracle.near(model.module, result.baseline[0, example], start[20] - start[33])
        assert oracle.near(model.module, result.each[0, ..., example], wanted)


@pytest.mark.parametrize("plan", ["wavefront", "batches"])
def test_running_dependent_rows_together_is_refused(plan: str) -> None:
    module = oracle.build("gpt2")
    module.transformer.h[1].mlp = Centred(module.transformer.h[1].mlp)
    with pytest.raises(Unsupported, match=f"plan='{plan}' cannot run .* running rows together"):
        sweep(TransformerModel(module), *oracle.pair(), plan=plan)


# Models that no sweep can run on.


def test_training_mode_is_refused() -> None:
    model = TransformerModel(oracle.build("gpt2"))
    model.module.train()
    with pytest.raises(Unsupported, match=r"training mode. Call model\.eval\(\) first"):
        sweep(model, *oracle.pair())


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders_are_refused_with_the_reason(name: str) -> None:
    model = TransformerModel(tiny.build(name, "encoder_decoder"))
    with pytest.raises(Unsupported, match="no one stack of blocks that reads tokens"):
        sweep(model, *oracle.pair())


def test_a_stream_of_another_shape_is_refused_with_the_reason() -> None:
    model = TransformerModel(tiny.build("deepseek_v4"))
    with pytest.raises(Unsupported, match="no sweep can run on DeepseekV4ForCausalLM"):
        sweep(model, *oracle.pair())


# Arguments.


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"plan": "fast"}, ValueError, "plan is one of auto, wavefront, batches, one per cell; got 'fast'"),
        ({"patch": "up"}, ValueError, "patch is 'clean' or 'corrupt'; got 'up'"),
        ({"over": ("layer", "token")}, ValueError, "over names some of site, layer, head, neuron, pos"),
        ({"over": ("layer", "layer")}, ValueError, "each once"),
        ({"over": ()}, ValueError, "over names some of"),
        ({"site": ["z", "q"]}, ValueError, r"several sites need over=\('site', ...\)"),
        ({"site": "z", "over": ("layer", "head"), "head": [4]}, IndexError, "head 4 is not there: .* heads 0 to 3"),
        ({"site": "z", "over": ("layer", "head"), "head": [-5]}, IndexError, "head -5 is not there: .* heads 0 to 3"),
        ({"over": ("layer", "head")}, ValueError, "no axis of heads|has no heads|without heads"),
        ({"pos": [LENGTH]}, IndexError, rf"pos {LENGTH} is not there"),
        ({"pos": []}, IndexError, "pos is empty: a text has"),
        ({"layer": [LAYERS]}, (IndexError, SiteNotFound), "3"),
        ({"layer": [-LAYERS - 1]}, (IndexError, SiteNotFound), "-4"),
        ({"site": "resid_per"}, (SiteNotFound, NothingMatched), "resid_per"),
        ({"site": "post", "over": ("layer", "neuron"), "neuron": [999]}, IndexError, "999"),
        ({"metric": 3}, TypeError, "a metric is one of ip.metrics, or a function of logits; got 3"),
        ({"metric": lambda x: x[:, -1]}, ValueError, r"shape \(2,\); this one returned shape \(2, 99\)"),
        ({"metric": lambda x: x.mean()}, ValueError, r"shape \(2,\); this one returned shape \(\)"),
        ({"metric": ip.metrics.logit([1, 2, 3])}, ValueError, "3 tokens for 2 examples"),
        ({"metric": ip.metrics.logit_difference([1, 2], [3])}, ValueError, "1 tokens for 2 examples"),
        ({"metric": ip.metrics.logit(1, pos=LENGTH)}, IndexError, "13"),
        ({"metric": {}}, ValueError, "metric"),
        ({"align": "middle"}, ValueError, "align"),
        ({"over": ("layer", "neuron"), "neuron": []}, IndexError, "neuron is empty: .* 0 to 31"),
        ({"over": ("layer", "neuron"), "neuron": [32]}, IndexError, "neuron 32 is not there: .* 0 to 31"),
        ({"over": ("layer", "neuron"), "neuron": [-33]}, IndexError, "neuron -33 is not there: .* 0 to 31"),
        ({"edit": ip.zero("z")}, TypeError, r"or a function that makes one at each place; got zero\('z'\)"),
        ({"edit": lambda site, pos: None}, TypeError, "is to make an edit, such as .*; it made None"),
        ({"edit": ip.knockout}, TypeError, r"lambda site, \*\*part: ip.knockout\(site=site"),
        ({"max_rows": 0}, ValueError, "max_rows"),
        ({"batch_size": 0}, ValueError, "batch_size"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_arguments_are_named(options: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        sweep(gpt2(), *oracle.pair(), **options)


def test_patching_needs_a_second_text() -> None:
    with pytest.raises(
        ValueError, match=r"patching needs a second text: give corrupt=..., or edit=ip.zero"
    ):
        sweep(gpt2(), oracle.pair()[0])


def test_pairs_of_different_lengths_are_shown_token_by_token() -> None:
    model = texts.speaking("gpt2")
    with pytest.raises(ValueError) as caught:
        sweep(model, ["the cat", "the cat sat"], ["the dog", "the cat sat on"])
    assert str(caught.value) == (
        "pair 1 has 3 and 4 tokens, so that positions do not correspond:\n"
        "  clean:   the |  cat |  sat\n"
        "  corrupt: the |  cat |  sat |  on\n"
        "Choose words with the same number of tokens; in ip.sweep, align='end' lets both end together."
    )


@pytest.mark.parametrize("align", [None, "end"])
@pytest.mark.parametrize("missing", ["clean", "corrupt"])
def test_as_many_corrupted_texts_as_clean_ones(align: str | None, missing: str) -> None:
    two, one = ["the cat sat", "the dog sat"], ["the dog sat"]
    clean, corrupt = (one, two) if missing == "clean" else (two, one)
    with pytest.raises(ValueError, match=rf"{len(clean)} clean texts and {len(corrupt)} corrupted"):
        sweep(texts.speaking("gpt2"), clean, corrupt, over="layer", align=align)


def test_positions_of_texts_of_several_lengths_are_refused() -> None:
    rows = [oracle.pair(1, length)[0][0] for length in (9, 11)]
    others = [oracle.pair(1, length)[1][0] for length in (9, 11)]
    with pytest.raises(ValueError, match="the texts have 9 to 11 tokens"):
        sweep(gpt2(), rows, others)


def test_mappings_of_different_shapes_are_refused() -> None:
    clean, corrupt = oracle.pair()
    with pytest.raises(ValueError, match="pair 0 has 13 and 12 tokens"):
        sweep(gpt2(), {"input_ids": clean}, {"input_ids": corrupt[:, 1:]})


def test_a_value_that_all_rows_share_is_refused() -> None:
    """GPT-2's positions are embedded once for the whole batch: no row has a value of its own there."""
    for edit in (None, ip.zero):
        with pytest.raises((ValueError, Unsupported), match="hook_pos_embed"):
            sweep(gpt2(), *oracle.pair(), site="hook_pos_embed", over=("site", "pos"), edit=edit)
