"""Alignment search: a planted direction is found, and what is reported is what raw hooks do."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import interpose as ip
from interpose.methods.alignment_search import Alignment, alignment_search
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.models.texts import PAD, speaking
from tests.pages import loads_nothing
from tests.sweeps.oracle import Spot, pair, spot

YES, NO = 40, 41


def planted() -> tuple[GPT2LMHeadModel, Tensor]:
    """A model that says YES or NO by one direction of the last token's stream, and that direction [units].

    Tokens 0 to 15 have it positive, 16 to 31 negative; what else they are is random and at right angles to it.
    """
    config = GPT2Config(
        n_layer=2, n_embd=24, n_head=2, vocab_size=42, n_positions=8, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = GPT2LMHeadModel(config).eval().requires_grad_(False)
        direction = torch.randn(24)
        direction = direction - direction.mean()  # the last norm takes the mean off
        direction = direction / direction.norm()
        rest = torch.randn(42, 24)
    rest = rest - (rest @ direction)[:, None] * direction
    sign = torch.where(torch.arange(42) < 16, 1.0, -1.0)[:, None]
    model.transformer.wte.weight.copy_(0.5 * rest + 4 * sign * direction)
    model.transformer.wpe.weight.zero_()
    for block in model.transformer.h:  # blocks add nothing
        for part in (block.attn.c_proj, block.mlp.c_proj):
            part.weight.zero_()
            part.bias.zero_()
    model.lm_head.weight.zero_()
    model.lm_head.weight[YES] = 0.4 * direction  # unsaturated
    model.lm_head.weight[NO] = -0.4 * direction
    return model, direction


def pairs(count: int = 64) -> tuple[Tensor, Tensor, list[int]]:
    draw = torch.Generator("cpu").manual_seed(5)
    base, source = torch.randint(0, 32, (2, count, 4), generator=draw, device="cpu")
    return base, source, [YES if last < 16 else NO for last in source[:, -1].tolist()]


def test_a_planted_direction_is_found_and_placebos_find_nothing() -> None:
    module, direction = planted()
    model = ip.wrap(module)
    base, source, targets = pairs()
    before, logits = state_of(module), module(base).logits
    assert (logits[:, -1].argmax(-1) == YES).tolist() == (base[:, -1] < 16).tolist()
    found = alignment_search(model, base, source, answer=targets, layer=0, steps=60, lr=0.05)
    assert same_state(before, state_of(module))
    assert float((found.directions[0, 0, 0] @ direction).abs()) > 0.95
    assert found.at(layer=0, pos=-1) >= 0.95
    assert found.baselines["full vector"].item() == 1.0
    for placebo in ("none", "random", "shuffled"):
        assert found.baselines[placebo].item() < 0.8, placebo
    losses = found.losses[0, 0]
    assert losses.shape == (60,)
    assert losses[-5:].mean() < 0.75 * losses[:5].mean()
    again = alignment_search(model, base, source, answer=targets, layer=0, steps=60, lr=0.05)
    assert torch.equal(again.directions, found.directions)
    assert torch.equal(again.losses, found.losses)
    other = alignment_search(model, base, source, answer=targets, layer=0, steps=2, seed=1)
    assert other.held_out != found.held_out


def test_against_one_token_the_search_finds_the_same() -> None:
    module, direction = planted()
    base, source, targets = pairs()
    instead = [YES + NO - target for target in targets]
    found = alignment_search(
        ip.wrap(module), base, source, answer=targets, instead=instead, layer=1, steps=60, lr=0.05,
        placebo=False,
    )  # fmt: skip
    assert float((found.directions[0, 0, 0] @ direction).abs()) > 0.95
    assert found.at(layer=1, pos=-1) >= 0.95
    assert "shuffled" not in found.baselines


def kept(module: Any, place: Spot, tokens: Tensor) -> Tensor:
    """What passes by."""
    found: list[Tensor] = []
    with torch.no_grad(), place.through(found.append):
        module(tokens)
    return found[0]


def swapped(there: Tensor, rows: Tensor, pos: int, value: Tensor) -> Tensor:
    """The value with another's coordinates along orthonormal rows."""
    whole = value.clone()
    whole[:, pos] = value[:, pos] + (there[:, pos] - value[:, pos]) @ rows.T @ rows
    return whole


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox"])
def test_accuracies_are_those_of_raw_hooks(name: str) -> None:
    """The learned subspace, the full vector and nothing, each by one whole forward of the bare module."""
    module = tiny.build(name, layers=3)
    base, source = pair(batch=12)
    with torch.no_grad():
        targets = module(source).logits[:, -1].argmax(-1).tolist()
    assert len(set(targets)) > 1
    found = alignment_search(
        ip.wrap(module), base, source, answer=targets, layer=[0, 2], pos=[5, -1], dimensions=2,
        steps=4, held_out=[1, 4, 7, 8], batch_size=3,
    )  # fmt: skip
    held = [1, 4, 7, 8]
    assert found.held_out == held
    for row, layer in enumerate((0, 2)):
        place = spot(module, name, "resid_post", layer)
        assert place is not None
        there = kept(module, place, source[held])
        for column, pos in enumerate((5, -1)):
            rows = found.directions[row, column]
            torch.testing.assert_close(rows @ rows.T, torch.eye(2), rtol=1e-4, atol=1e-5)

            every = torch.eye(rows.shape[1])
            changes = {"learned": rows, "full vector": every, "none": every[:0]}
            for what, basis in changes.items():
                with torch.no_grad(), place.through(partial(swapped, there, basis, pos)):
                    said = module(base[held]).logits[:, -1].argmax(-1)
                right = (said == torch.tensor([targets[n] for n in held])).float().mean()
                table = found.values if what == "learned" else found.baselines[what]
                assert table[row, column] == right, (what, layer, pos)


def test_the_loss_and_its_gradient_are_those_of_the_whole_model() -> None:
    """One step by hand, through all layers, ends at the same directions."""
    module = tiny.build("llama", layers=3)
    model = ip.wrap(module)
    base, source = pair(batch=4)
    with torch.no_grad():
        targets = module(source).logits[:, -1].argmax(-1)
    found = alignment_search(
        model, base, source, answer=targets.tolist(), layer=1, pos=5, steps=1, lr=0.1, held_out=[3],
        placebo=False,
    )  # fmt: skip
    turn = ip.Rotation(model.cfg.d_model, k=1)
    place = spot(module, "llama", "resid_post", 1)
    assert place is not None
    there = kept(module, place, source[:3])
    with place.through(partial(swapped, there, turn.weight, 5)):
        logits = module(base[:3]).logits[:, -1]
    loss = torch.nn.functional.cross_entropy(logits, targets[:3])
    (turn.raw.grad,) = torch.autograd.grad(loss, [turn.raw])
    torch.optim.Adam(turn.parameters(), lr=0.1).step()
    torch.testing.assert_close(found.losses[0, 0, 0], loss.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.directions[0, 0], turn.weight.detach(), rtol=1e-3, atol=1e-3)
    assert all(value.grad is None for value in module.parameters())
    assert all(value.requires_grad for value in module.parameters())


def agreement() -> tuple[list[str], list[str], list[str], list[str]]:
    """Subjects of either number; the noun before the verb is of the other."""
    nouns = ["key", "dog", "picture", "door", "student", "car", "table", "tree", "bird", "lamp"]
    texts = {
        plural: [
            f"The {noun}{'s' * plural} near the {nouns[(at + 3) % 10]}{'s' * (not plural)}"
            for at, noun in enumerate(nouns)
        ]
        for plural in (False, True)
    }
    base = texts[False] + texts[True] + texts[False] + texts[True]
    source = texts[True][::-1] + texts[False][::-1] + texts[False][::-1] + texts[True][::-1]
    plural = [True] * 10 + [False] * 20 + [True] * 10
    return (
        base,
        source,
        [" are" if p else " is" for p in plural],
        [" is" if p else " are" for p in plural],
    )


def test_the_number_of_the_subject_is_one_direction_in_pocket() -> None:
    model = ip.load("pocket")
    base, source, targets, instead = agreement()
    found = ip.alignment_search(
        model, base, source, answer=targets, instead=instead, layer=4, steps=25, lr=0.05
    )
    assert found.at(layer=4, pos=-1) >= 0.9
    assert found.baselines["random"].item() < 0.75
    assert found.baselines["shuffled"].item() < 0.75
    _, cache = model.run_with_cache("The dogs near the door")
    swap = found.edit(cache, source_pos=-1)
    text = "The new key near the birds"
    ids = [model.to_single_token(word) for word in (" is", " are")]
    plain, changed = (model.run_with_hooks(text, hooks=some)[0, -1, ids] for some in ([], [swap]))
    assert plain[0] > plain[1]
    assert changed[0] < changed[1]


def test_the_result_is_data_and_a_page() -> None:
    module, _ = planted()
    base, source, targets = pairs(16)
    found = alignment_search(
        ip.wrap(module), base, source, answer=targets, layer=[0, 1], pos=[-1, 2], steps=2
    )
    again = Alignment.from_dict(json.loads(json.dumps(found.to_dict())))
    assert torch.equal(again.directions, found.directions)
    assert again.baselines.keys() == found.baselines.keys()
    html = found.html()
    loads_nothing(html)
    assert "shuffled" in html
    with pytest.raises(ValueError, match=r"say which: layer= one of \[0, 1\]"):
        found.edit({})
    with pytest.raises(ValueError, match=r"no layer 9 among \[0, 1\]"):
        found.edit({}, layer=9)
    cache = ip.wrap(module).run_with_cache(source, names_filter="resid_post")[1]
    assert repr(found.edit(cache, layer=1, pos=2)).endswith("layer=1, pos=2)")
    single = alignment_search(ip.wrap(module), base, source, answer=targets, layer=0, steps=2)
    assert "learned" in repr(single)


def test_wrong_arguments_are_refused_with_what_is_there() -> None:
    module, _ = planted()
    model = ip.wrap(module)
    base, source, targets = pairs(8)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"answer": [YES] * 8}, "all pairs have the same target"),
        ({"answer": targets[:3]}, "3 targets for 8 pairs"),
        ({"answer": targets, "held_out": 1.0}, "leaves none to train on"),
        ({"answer": targets, "held_out": [99]}, "names one that is not there"),
        ({"answer": targets, "steps": 0}, "steps is at least 1"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            alignment_search(model, base, source, layer=0, **options)
    with pytest.raises(ValueError, match="give base and source"):
        alignment_search(model, base, None, answer=targets, layer=0)
    with pytest.raises(IndexError, match="layers 0 to 1"):
        alignment_search(model, base, source, answer=targets, layer=7)


def test_places_and_pairs_that_cannot_be_searched_are_refused() -> None:
    model = ip.wrap(tiny.build("gpt2", layers=2).requires_grad_(False))
    base, source = pair(4)
    search = partial(alignment_search, model, base, source, answer=[1, 2, 3, 4], steps=1)
    with pytest.raises(ValueError, match="leaves none to train on or to judge by"):
        search(layer=1, held_out=[])
    with pytest.raises(
        ValueError, match=r"'z' has heads, each with directions of its own. .*head=0"
    ):
        search(layer=1, site="z")
    found = [search(layer=layer) for layer in (1, -1)]
    assert found[1].axes["layer"] == [1]
    assert torch.equal(found[0].directions, found[1].directions)


def test_padding_is_not_seen() -> None:
    model = speaking("llama").requires_grad_(False)
    texts = pair(6, 8, 3)
    padded = [torch.cat([torch.full((6, 3), PAD), rows], 1) for rows in texts]
    search = partial(alignment_search, answer=list(range(6)), layer=1, steps=3, placebo=False)
    one, other = (search(model, *given) for given in (padded, texts))
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-4, atol=1e-4)
