"""Every method gives for texts, padded tokens, what a tokenizer returns and lists what it gives for each text alone.

With a tokenizer that has a token for padding, and with one that has a single special token, as GPT-2's has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from tests.models import texts as small

CLEAN = ["the cat sat on the mat", "a dog ran in the park and the cat saw it", "the dog sat"]
CORRUPT = ["the dog sat on the mat", "a cat ran in the park and the dog saw it", "the cat sat"]
LEAD = ip.metrics.logit_difference(20, 33)
EPS = torch.finfo(torch.float32).eps


@functools.cache
def model_of(kind: str) -> Any:
    """GPT-2, tiny, whose positions are embedded; its tokenizer pads with a token of its own, or with its only one."""
    if kind == "pad token":
        return small.speaking("gpt2")
    model = small.speaking("gpt2", pad=False, bos_token="</s>")
    model.config.pad_token_id = None
    assert model.tokenizer.bos_token_id == model.tokenizer.eos_token_id == model._filler()
    assert model.tokenizer.pad_token_id is None
    return model


KINDS = ["pad token", "one token for all"]


def copied(model: Any, texts: Sequence[str], side: str) -> dict[str, Tensor]:
    """Padded tokens and their mask, by hand; nothing is remembered of them."""
    rows = [model.to_tokens(text)[0].tolist() for text in texts]
    length, pad = max(map(len, rows)), model._filler()
    made: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": []}
    for row in rows:
        missing = length - len(row)
        for name, fill, part in (("input_ids", pad, row), ("attention_mask", 0, [1] * len(row))):
            filled = [fill] * missing
            made[name].append(filled + part if side == "left" else part + filled)
    return {name: torch.tensor(value) for name, value in made.items()}


def tokenized(model: Any, texts: Sequence[str]) -> Any:
    """What a tokenizer returns of texts of different lengths: plain lists, and more than the model takes."""
    given = model.tokenizer(list(texts), return_special_tokens_mask=True, return_length=True)
    assert isinstance(given["input_ids"], list)
    assert {"special_tokens_mask", "length", "attention_mask"} <= set(given)
    given["token_type_ids"] = [[0] * len(row) for row in given["input_ids"]]
    return given


FORMS: dict[str, Callable[[Any, Sequence[str]], Any]] = {
    "texts": lambda model, texts: list(texts),
    "tokens, right": lambda model, texts: model.to_tokens(texts, padding_side="right"),
    "tokens, left": lambda model, texts: model.to_tokens(texts, padding_side="left"),
    "rows of them": lambda model, texts: list(model.to_tokens(texts)),
    "mask, right": lambda model, texts: copied(model, texts, "right"),
    "mask, left": lambda model, texts: copied(model, texts, "left"),
    "lists": lambda model, texts: [model.to_tokens(text)[0].tolist() for text in texts],
    "tokenizer": tokenized,
}


def forms(model: Any, *, some: bool = False) -> Iterable[str]:
    """All, or some for methods that take longer. With a pad token, copies are understood as well."""
    alone = model._pad_alone() is not None
    if some:
        yield from (
            ("tokens, right", "copy") if alone else ("mask, right", "tokens, left", "tokenizer")
        )
        return
    yield from FORMS
    if alone:
        yield "copy"


def formed(model: Any, form: str, texts: Sequence[str]) -> Any:
    if form == "copy":
        return copied(model, texts, "right")["input_ids"]
    return FORMS[form](model, texts)


def close(found: Tensor, wanted: Tensor) -> bool:
    """Equal but for how a few hundred float32 operations round in another batch."""
    assert found.shape == wanted.shape
    size = max(float(wanted.nan_to_num().abs().max()), 1.0)
    return torch.allclose(
        found.float(), wanted.float(), rtol=0, atol=2**9 * EPS * size, equal_nan=True
    )


def mean(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).mean(0)


def beside(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), -1)


def sweep(model: Any, a: Any, b: Any, **options: Any) -> Tensor:
    return ip.sweep(
        model, a, b, **{"metric": LEAD, "over": "layer", "progress": False} | options
    ).each


def gradient(method: Any, **options: Any) -> Callable[..., Tensor]:
    options = {"metric": LEAD, "site": "resid_pre", "over": "layer"} | options
    return lambda model, a, b: method(model, a, **options).values


Method = Callable[[Any, Any, Any], Tensor]
MEANS: dict[str, Method] = {
    "ablation": lambda m, a, b: ip.ablation(m, a, metric=LEAD).values,
    "mean ablation": lambda m, a, b: (
        ip.ablation(
            m, a, metric=LEAD, replace_by="mean", reference=CLEAN, per_position=False
        ).values
    ),
    "attention_knockout": lambda m, a, b: (
        ip.attention_knockout(m, a, metric=LEAD, query=-1, key=1).values
    ),
    "attribution_patching": lambda m, a, b: (
        ip.attribution_patching(m, a, b, metric=LEAD, over=("layer", "head")).values
    ),
    "compare_prompts": lambda m, a, b: ip.compare_prompts(m, a, b, answer=20).values,
    "direct_logit_attribution": lambda m, a, b: (
        ip.direct_logit_attribution(m, a, answer=20, by="head").values
    ),
    "edge_attribution": lambda m, a, b: ip.edge_attribution(m, a, b, metric=LEAD).values,
    "function_vector": lambda m, a, b: ip.function_vector(m, a, head=[(0, 1), (1, 0)]).parts,
    "gradient_times_activation": gradient(ip.gradient_times_activation),
    "integrated_gradients": gradient(ip.integrated_gradients, steps=2),
    "path_patching": lambda m, a, b: ip.path_patching(m, a, b, metric=LEAD).values,
    "saliency": gradient(ip.saliency),
}
"""Methods whose result is a mean over texts."""
EACH: dict[str, Method] = {
    "activation_patching": lambda m, a, b: (
        ip.activation_patching(m, a, b, metric=LEAD, family="attn_head_out_all_pos").each
    ),
    "Experiment": lambda m, a, b: (
        ip.Experiment(model=m, inputs=a, metrics=LEAD, edits=[ip.zero("z", layer=1, pos=-1)])
        .run(m)
        .edited
    ),
    "measure": lambda m, a, b: ip.measure(m, a, LEAD, edits=[ip.scale("z", 3.0, layer=0)]).edited,
    "measure the loss": lambda m, a, b: ip.measure(m, a, ip.metrics.loss()).without,
    "sweep with an edit": lambda m, a, b: sweep(m, a, None, edit=ip.zero, site="z"),
    "sweep of pairs": sweep,
    "sweep at the last position": lambda m, a, b: sweep(m, a, b, pos=-1, align="end"),
}
"""Methods with a number for each text."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*MEANS, *EACH])
def test_all_forms_of_texts_give_what_each_gives_alone(name: str, kind: str) -> None:
    model, run = model_of(kind), (MEANS | EACH)[name]
    parts = [run(model, *pair) for pair in zip(CLEAN, CORRUPT)]
    assert all(float((part - parts[0]).abs().max()) > 1e-4 for part in parts[1:])
    alone = (mean if name in MEANS else beside)(parts)
    for form in forms(model, some="measure" not in name):
        found = run(model, *(formed(model, form, some) for some in (CLEAN, CORRUPT)))
        assert close(found, alone), form


# Methods whose results are put together in other ways.


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_count_each_token_of_each_text_once(kind: str) -> None:
    model, site = model_of(kind), "blocks.1.hook_resid_post"
    with torch.no_grad():
        values = [model.run_with_cache(text, names_filter=site)[1][site][0] for text in CLEAN]
    wanted = torch.cat(values).double()
    for form in forms(model):
        given = formed(model, form, CLEAN)
        # As one batch, and by itself; a list by itself is of batches, here of one text each.
        for loader in [given] if form == "rows of them" else [[given], given]:
            found = ip.activation_statistics(model, loader, site, progress=False)[site]
            assert found.count == len(wanted), form
            assert close(found.mean, wanted.mean(0)), form
            assert close(found.variance, wanted.var(0)), form


@pytest.mark.parametrize("kind", KINDS)
def test_max_activating_finds_the_same_places(kind: str) -> None:
    model, options = model_of(kind), {"layer": 1, "neuron": [4, 9], "k": 30, "progress": False}
    alone = functools.reduce(
        lambda one, other: one.merge(other), [ip.max_activating(model, t, **options) for t in CLEAN]
    )
    for form in forms(model):
        found = ip.max_activating(model, formed(model, form, CLEAN), **options)
        assert found.count == 3, form
        assert torch.equal(found.texts, alone.texts), form
        assert torch.equal(found.positions, alone.positions), form
        assert torch.equal(found.windows, alone.windows), form
        assert close(found.values, alone.values), form


@pytest.mark.parametrize("kind", KINDS)
def test_head_scores_have_no_padding_among_their_queries(kind: str) -> None:
    model = model_of(kind)
    alone = [ip.head_scores(model, "previous", texts=text) for text in CLEAN]
    queries = [score.protocol["queries"] for score in alone]
    wanted = sum(score.values * count for score, count in zip(alone, queries)) / sum(queries)
    for form in forms(model):
        found = ip.head_scores(model, "previous", texts=formed(model, form, CLEAN))
        assert found.protocol["queries"] == sum(queries), form
        assert close(found.values, wanted), form


@pytest.mark.parametrize("kind", KINDS)
def test_probes_read_the_last_token_of_each_text(kind: str) -> None:
    model, texts = model_of(kind), [*CLEAN, *CORRUPT]
    labels, options = [0, 1, 0, 1, 0, 1], {"layer": [1], "folds": 2, "control": False}
    alone = ip.probe(model, texts, labels, batch_size=1, **options)
    for form in forms(model):
        found = ip.probe(model, formed(model, form, texts), labels, **options)
        assert close(found.weights, alone.weights), form


@pytest.mark.parametrize("kind", KINDS)
def test_lenses_are_fitted_on_and_read_at_text_alone(kind: str) -> None:
    model = model_of(kind)
    steps = [ip.TunedLens.fit(model, text, steps=1).kl for text in CLEAN]  # of one text each
    lens = ip.TunedLens.fit(model, CLEAN, steps=2)
    read = {"pos": -1, "answer": 20}
    through = torch.stack([lens(model, text, **read).values for text in CLEAN])
    alone = torch.stack([ip.logit_lens(model, text, **read).values for text in CLEAN])
    for form in forms(model, some=True):
        given = formed(model, form, CLEAN)
        found = ip.TunedLens.fit(model, given, steps=2)
        assert any(close(found.kl[:1], step) for step in steps), form
        assert close(found.matrices, lens.matrices), form
        assert close(ip.logit_lens(model, given, **read).values, alone), form
        assert close(lens(model, given, **read).values, through), form


def test_circuits_and_alignments_are_of_text_alone() -> None:
    model = model_of("one token for all")
    scores = ip.edge_attribution(model, CLEAN, CORRUPT, metric=LEAD)

    def both(a: Any, b: Any, **options: Any) -> list[Tensor]:
        circuit = ip.faithfulness(model, a, b, metric=LEAD, scores=scores, sizes=[5], **options)
        search = {
            "answer": [20, 33, 21],
            "layer": 1,
            "steps": 1,
            "held_out": [2],
            "placebo": False,
        }
        found = ip.alignment_search(model, a, b, **search, **options)
        return [circuit.values, found.losses, found.directions]

    alone = both(CLEAN, CORRUPT, batch_size=1)
    for form in forms(model, some=True):
        made = both(formed(model, form, CLEAN), formed(model, form, CORRUPT), batch_size=1)
        assert all(map(close, made, alone)), form


ONE: dict[str, Callable[[Any, Any], Tensor]] = {
    "attention_patterns": lambda m, text: ip.attention_patterns(m, text).values,
    "causal_tracing": lambda m, text: (
        ip.causal_tracing(m, text, subject=[1], answer=20, samples=2).values
    ),
    "patchscope": lambda m, text: ip.patchscope(m, text, text, into_pos=1, answer=20).values,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ONE)
def test_methods_of_one_text_take_a_row_of_padded_ones(name: str, kind: str) -> None:
    model, run, number = model_of(kind), ONE[name], 2
    alone = run(model, CLEAN[number])
    for side in ("left", "right"):
        tokens, given = model.to_tokens(CLEAN, padding_side=side), copied(model, CLEAN, side)
        one = {key: value[number] for key, value in given.items()}
        for form in (tokens[number], tokens[number : number + 1], one):
            assert close(run(model, form), alone)
    assert close(run(model, model.to_tokens(CLEAN[number])[0].tolist()), alone)
    assert close(run(model, dict(model.tokenizer(CLEAN[number]))), alone)


# Runs and generation.


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_runs_and_their_losses_know_the_padding(kind: str) -> None:
    model = model_of(kind)
    alone = [model(text)[0] for text in CLEAN]
    each = [model(text, return_type="loss", loss_per_token=True)[0] for text in CLEAN]
    for side in ("left", "right"):
        tokens = model.to_tokens(CLEAN, padding_side=side)
        for rows, given in {
            (0, 1, 2): tokens,
            (1, 2): tokens[1:],
            (2, 0): tokens.flip(0)[::2],
        }.items():
            if given.untyped_storage() is not tokens.untyped_storage() and kind != "pad token":
                continue  # a copy
            logits = model(given)
            for row, number in enumerate(rows):
                length = len(alone[number])
                part = logits[row, -length:] if side == "left" else logits[row, :length]
                assert close(part, alone[number])
        assert close(model(tokens, return_type="loss"), torch.cat(each).mean())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_mean_over_the_batch_leaves_padding_out(kind: str) -> None:
    model, site = model_of(kind), "blocks.0.hook_mlp_out"
    parts = [model.run_with_cache(text, names_filter=site)[1][site][0] for text in CLEAN]
    average = torch.cat(parts).mean(0)
    for side in ("left", "right"):
        tokens, longest = model.to_tokens(CLEAN, padding_side=side), 1
        assert bool((model.mask_of(tokens)[longest] == 1).all())
        plain = model.run_with_cache(tokens, names_filter=site)[1][site]
        assert float((plain.mean((0, 1)) - average).abs().max()) > 1e-2  # padding would be seen
        _, cache = model.run_with_cache(tokens, names_filter=site, hooks=[ip.mean(site)])
        assert close(cache[site][longest, 3], average)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_goes_on_from_each_texts_last_token(kind: str) -> None:
    model, options = model_of(kind), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 7}
    alone = [
        model.generate(text, return_type="tokens", **options)[0, -4:].tolist() for text in CLEAN
    ]
    for form in forms(model):
        if form == "rows of them":
            continue
        given = formed(model, form, CLEAN)
        if form == "lists":
            given = copied(model, CLEAN, "right")
            given = {name: value.tolist() for name, value in given.items()}
        found = model.generate(given, return_type="tokens", **options)
        assert found[:, -4:].tolist() == alone, form
    for form in forms(model, some=True):
        found = model.generate_batch(formed(model, form, CLEAN), max_new_tokens=4, do_sample=False)
        assert [found.generated[number] for number in range(3)] == alone, form
