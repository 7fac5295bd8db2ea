"""Every method at its edges: one token, no tokenizer, inference mode, 16 and 64 bits, answers of several tokens.

Each gives what it gives for each text alone (or in the bits of which all others are roundings), or says why not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from tests.methods.test_texts import CLEAN, CORRUPT, EACH, LEAD, MEANS, ONE, beside, close, mean
from tests.models import texts as small

METHODS: dict[str, Any] = MEANS | EACH | {
    "head_scores": lambda m, a, b: ip.head_scores(m, "previous", texts=a).values,
    "logit_lens": lambda m, a, b: ip.logit_lens(m, a, pos=-1, answer=20).values,
    "max_activating": lambda m, a, b: ip.max_activating(m, a, layer=1, neuron=[4], k=2, progress=False).values,
    "probe": lambda m, a, b: ip.probe(m, [*a, *b], [0, 1] * len(a), layer=[1], folds=2, control=False).weights,
    "run_variants": lambda m, a, b: ip.run_variants(
        m, a[1:2], [ip.Variant([ip.zero("z", layer=1, head=0)])], metric=LEAD, progress=False).measured(),
    "statistics": lambda m, a, b: ip.activation_statistics(
        m, a, "blocks.1.hook_resid_post", progress=False)["blocks.1.hook_resid_post"].mean,
    "TunedLens": lambda m, a, b: ip.TunedLens.fit(m, a, steps=1, progress=False).matrices,
}  # fmt: skip
OF_ONE = {name: (lambda m, a, b, run=run: run(m, a[0])) for name, run in ONE.items()}
ALL: dict[str, Callable[[Any, Any, Any], Tensor]] = METHODS | OF_ONE
GRADIENTS = """
    attribution_patching edge_attribution gradient_times_activation integrated_gradients saliency TunedLens
""".split()


@functools.cache
def speaking(dtype: torch.dtype = torch.float32) -> Any:
    model = small.speaking("gpt2")
    model.module.to(dtype)
    return model


@functools.cache
def wanted(name: str) -> Tensor:
    """What a method gives in 64 bits."""
    return ALL[name](speaking(torch.float64), CLEAN, CORRUPT).double()


def tokens(model: Any, texts: list[str]) -> list[list[int]]:
    return [model.to_tokens(text)[0].tolist() for text in texts]


def of_itself(model: Any, a: Any, b: Any) -> Tensor:
    """Mean ablation whose reference is the texts themselves."""
    return ip.ablation(
        model, a, metric=LEAD, replace_by="mean", reference=a, per_position=False, progress=False
    ).values


@pytest.mark.parametrize("name", ALL)
def test_tokens_without_a_tokenizer_give_what_texts_give(name: str) -> None:
    model = speaking()
    bare = ip.wrap(model.module)
    assert getattr(bare, "tokenizer", None) is None
    run = of_itself if name == "mean ablation" else ALL[name]
    found = run(bare, tokens(model, CLEAN), tokens(model, CORRUPT))
    assert close(found, run(model, CLEAN, CORRUPT))


@pytest.mark.parametrize("name", ALL)
def test_inference_mode_changes_nothing_or_says_that_there_are_no_gradients(name: str) -> None:
    model = speaking()
    if name in GRADIENTS:
        with torch.inference_mode(), pytest.raises(ip.Unsupported, match="inference_mode"):
            ALL[name](model, CLEAN, CORRUPT)
        return
    with torch.inference_mode():
        found = ALL[name](model, CLEAN, CORRUPT)
    assert close(found.clone(), ALL[name](model, CLEAN, CORRUPT))


ROUNDING = {torch.float32: 2.0**-14, torch.bfloat16: 2.0**-2}
"""Of the largest value: some roundings of all that it is the difference of."""


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    "name", [name for name in ALL if name not in ("TunedLens", "causal_tracing")]
)
def test_sixteen_and_sixty_four_bits_agree_to_rounding(name: str, dtype: torch.dtype) -> None:
    """A tuned lens divides by gradients and causal tracing draws noise, which other bits draw elsewhere."""
    exact = wanted(name)
    found = ALL[name](speaking(dtype), CLEAN, CORRUPT).double()
    assert bool(found.isfinite().eq(exact.isfinite()).all())
    size = float(exact[exact.isfinite()].abs().max())
    apart = float((found - exact).nan_to_num().abs().max())
    assert apart <= ROUNDING[dtype] * size


@pytest.mark.parametrize("name", [*MEANS, *EACH])
def test_texts_of_one_token_give_what_each_gives_alone(name: str) -> None:
    model, run = speaking(), (MEANS | EACH)[name]
    one, other = [[20], [33], [21]], [[33], [21], [20]]
    if name in REFUSED:
        with pytest.raises((ValueError, IndexError), match=REFUSED[name]):
            run(model, one, other)
        return
    parts = [run(model, [a], [b]) for a, b in zip(one, other)]
    found = run(model, one, other)
    assert bool(found.isfinite().all())
    assert close(found, (mean if name in MEANS else beside)(parts))


REFUSED = {
    "measure the loss": "texts of at least two tokens",
    "attention_knockout": "pos 1 is not there: text 0 has positions 0 to 0",
}
OF_ONE_TOKEN: dict[str, Callable[[Any], Tensor]] = {
    "attention_patterns": lambda m: ip.attention_patterns(m, [[20]]).values,
    "causal_tracing": lambda m: (
        ip.causal_tracing(m, [[20]], subject=[0], answer=20, samples=2).values
    ),
    "logit_lens": lambda m: ip.logit_lens(m, [[20]], answer=20).values,
    "patchscope": lambda m: ip.patchscope(m, [[20]], [[20]], into_pos=0, answer=20).values,
}


@pytest.mark.parametrize("name", OF_ONE_TOKEN)
def test_methods_of_one_text_take_one_token(name: str) -> None:
    assert bool(OF_ONE_TOKEN[name](speaking()).isfinite().all())


def test_a_token_alone_has_nothing_else_to_look_at() -> None:
    with pytest.raises(ip.EditError, match="position 0 has no key left to look at"):
        ip.attention_knockout(speaking(), [[20]], metric=LEAD, query=-1, key=0)


TWO = "cat sat"
ANSWERS: dict[str, Callable[[Any], Any]] = {
    "metric": lambda m: ip.ablation(m, CLEAN, metric=ip.metrics.logit(TWO)),
    "instead": lambda m: ip.ablation(m, CLEAN, metric=ip.metrics.logit_difference(20, TWO)),
    "direct_logit_attribution": lambda m: ip.direct_logit_attribution(m, CLEAN, answer=TWO),
    "compare_prompts": lambda m: ip.compare_prompts(m, CLEAN, CORRUPT, answer=TWO),
    "logit_lens": lambda m: ip.logit_lens(m, CLEAN, pos=-1, answer=TWO),
    "logits_of": lambda m: ip.logit_lens(m, CLEAN, pos=-1, logits_of=[TWO]),
    "causal_tracing": lambda m: ip.causal_tracing(m, CLEAN[0], subject=[1], answer=TWO),
    "patchscope": lambda m: ip.patchscope(m, CLEAN[0], CLEAN[0], into_pos=1, answer=TWO),
    "alignment_search": lambda m: ip.alignment_search(
        m, CLEAN, CORRUPT, answer=[TWO] * 3, layer=1, placebo=False
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_several_tokens_is_refused_with_its_tokens(name: str) -> None:
    model = speaking()
    assert len(tokens(model, [TWO])[0]) == 2
    with pytest.raises(ValueError, match=r"'cat sat' is 2 tokens and not one: \["):
        ANSWERS[name](model)
