"""Positions by their text: in each row its own, in padded batches, while text is generated, under checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from tests.edits.models import talking

TEXTS = ["the cat sat on the mat", "a dog saw the cat and ran in the park"]
KINDS = ["llama", "gpt2"]
SITE = ("resid_post", 1)


def pieces(model: Any, tokens: Tensor) -> list[list[str]]:
    return [[model.to_string([token]) for token in row] for row in tokens.tolist()]


def spans(row: list[str], text: str) -> list[range]:
    """Every run of tokens that together are a text, or a space and the text."""
    every = [range(i, j) for i in range(len(row)) for j in range(i + 1, len(row) + 1)]
    return [span for span in every if "".join(row[k] for k in span) in (text, f" {text}")]


def value(model: Any, given: dict[str, Tensor], *hooks: ip.Edit) -> Tensor:
    with torch.no_grad():
        return model.run_with_cache(**given, names_filter=SITE, hooks=hooks)[1][SITE]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", [" the", " cat", " park", "the", " sat on"])
@pytest.mark.parametrize("occurrence", ["all", "first", "last"])
def test_a_text_is_found_in_each_row_wherever_it_is(
    kind: str, side: str, text: str, occurrence: str
) -> None:
    model = talking(kind)
    given = model.prepare([*TEXTS, "in the park the cat ran"], padding_side=side)
    assert (given["attention_mask"] == 0).any()
    rows = pieces(model, given["input_ids"])
    mask = torch.zeros(given["input_ids"].shape, dtype=torch.bool)
    has = []
    for number, row in enumerate(rows):
        found = spans(row, text)
        found = {"first": found[:1], "last": found[-1:]}.get(occurrence, found)
        has += [number] if found else []
        for span in found:
            mask[number, list(span)] = True
    assert mask.any()
    where = {"pos": text, "occurrence": occurrence, "layer": 1}
    if len(has) < 3:
        with pytest.raises(ip.NothingSelected, match=f"{text!r} is not in row"):
            value(model, given, ip.fill("resid_post", 3.0, **where))
        where["rows"] = has
    plain = value(model, given)
    expected = torch.where(mask[..., None], torch.tensor(3.0), plain)
    assert torch.equal(value(model, given, ip.fill("resid_post", 3.0, **where)), expected)
    new = torch.randn(plain.shape)
    found = value(model, given, ip.patch(ip.at("resid_post", **where), new))
    assert torch.equal(found, torch.where(mask[..., None], new, plain))
    # By text alone, as a model is called by most people.
    with torch.no_grad():
        _, cache = model.run_with_cache(
            [*TEXTS, "in the park the cat ran"],
            padding_side=side,
            names_filter=SITE,
            hooks=[ip.fill("resid_post", 3.0, **where)],
        )
    assert torch.equal(cache[SITE], expected)


def test_several_texts_and_several_counts_are_one_selection() -> None:
    model = talking()
    given = model.prepare(TEXTS, padding_side="left")
    rows = pieces(model, given["input_ids"])
    counts = [len(spans(row, " the")) for row in rows]
    assert counts == [1, 2]
    mask = torch.tensor(
        [
            [
                bool({p} & {q for t in (" the", " cat") for s in spans(row, t) for q in s})
                for p in range(len(row))
            ]
            for row in rows
        ]
    )
    plain = value(model, given)
    found = value(model, given, ip.scale("resid_post", 2.0, layer=1, pos=[" the", " cat"]))
    assert torch.equal(found, torch.where(mask[..., None], 2 * plain, plain))
    # What rows have in different numbers is written, and read one by one only.
    with pytest.raises(ip.NothingSelected, match="rows have 2 and 3 of the positions"):
        model.run_with_cache(
            **given, names_filter=ip.at("resid_post", layer=1, pos=[" the", " cat"])
        )
    with torch.no_grad():
        there = ip.at("resid_post", layer=1, pos=" the", occurrence="last")
        _, part = model.run_with_cache(**given, names_filter=there)
    last = [spans(row, " the")[-1].start for row in rows]
    assert torch.equal(part[SITE], plain[torch.arange(2), last][:, None])
    # A vector, and a strength, for each row.
    strength = torch.tensor([1.0, -0.5])
    found = value(
        model,
        given,
        ip.add("resid_post", torch.arange(32.0), layer=1, pos=" the", strength=strength),
    )
    the = torch.tensor(
        [[p in {q for s in spans(row, " the") for q in s} for p in range(len(row))] for row in rows]
    )
    expected = plain + the[..., None] * strength[:, None, None] * torch.arange(32.0)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_text_is_left_out_where_it_is() -> None:
    model = talking()
    given = model.prepare(TEXTS, padding_side="left")
    rows = pieces(model, given["input_ids"])
    plain = value(model, given)
    for exclude, spared in (
        ({"pos": " cat"}, lambda row: True),
        ({"pos": " cat", "rows": 1}, lambda row: row == 1),
        ({"pos": " mat"}, lambda row: True),  # in one row only
    ):
        edit = ip.zero("resid_post", layer=1, exclude=exclude)
        found = value(model, given, edit)
        for number, row in enumerate(rows):
            kept = {q for s in spans(row, exclude["pos"]) for q in s} if spared(number) else set()
            for place in range(len(row)):
                same = torch.equal(found[number, place], plain[number, place])
                assert same == (place in kept), (exclude, number, place)


def test_padding_is_no_text() -> None:
    model = talking()
    filler = model.to_string([0])
    given = model.prepare(TEXTS, padding_side="left")
    assert (given["input_ids"] == 0).any()
    with pytest.raises(ip.NothingSelected, match="is not in row 0"):
        value(model, given, ip.zero("resid_post", layer=1, pos=filler))


def test_a_text_that_is_not_there_is_shown_the_tokens() -> None:
    model = talking()
    with pytest.raises(ip.NothingSelected) as caught:
        model.run_with_hooks("the cat sat", hooks=[ip.zero("z", layer=1, pos=" dog")])
    shown = model.to_str_tokens("the cat sat")
    assert str(caught.value) == (
        f"zero('z', layer=1, pos=' dog'): ' dog' is not in row 0, whose tokens are {shown}.\n  A text is one "
        "or more whole tokens, with or without the space in front; positions may also be numbers."
    )
    for wrong, kind, said in (
        ([" cat", 3], TypeError, "pos is numbers or texts, not both"),
        ("", TypeError, "pos is a number, several, a slice or a text; got ''"),
    ):
        with pytest.raises(kind, match=said):
            model.run_with_hooks("the cat sat", hooks=[ip.zero("z", layer=1, pos=wrong)])
    silent = ip.wrap(model.module)
    with pytest.raises(ip.Unsupported, match="without a tokenizer"):
        silent.run_with_hooks(torch.tensor([[5, 6]]), hooks=[ip.zero("z", layer=1, pos=" cat")])
    embedded = torch.randn(1, 4, 32)
    with pytest.raises(ip.Unsupported, match="needs the tokens of the run and a tokenizer"):
        model.run_with_hooks(inputs_embeds=embedded, hooks=[ip.zero("z", layer=1, pos=" cat")])


# While text is generated.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "where",
    [
        {"pos": " the"},
        {"pos": " the", "occurrence": "last"},
        {"phase": "prompt", "exclude": {"pos": " cat"}},
        {"phase": "generated", "rows": [1]},
        {"pos": torch.tensor([True] * 3 + [False] * 20)},
        {"pos": [-1, 12]},
        {"exclude": {"phase": "prompt"}},
    ],
    ids=str,
)
def test_an_edit_means_the_same_with_and_without_a_kv_cache(
    kind: str, where: dict[str, Any]
) -> None:
    model = talking(kind)
    given = model.prepare(TEXTS, padding_side="left")
    length = given["input_ids"].shape[1]
    if isinstance(where.get("pos"), Tensor):
        where = {"pos": where["pos"][:length]}
    shift = torch.linspace(-4, 4, 32)
    made = []
    for use_cache in (True, False):
        edit = ip.add("resid_post", shift, layer=0, **where)
        with model.record(["resid_post"], hooks=[edit]) as cache:
            tokens = model.generate(
                TEXTS, max_new_tokens=5, do_sample=False, use_cache=use_cache, return_type="tokens"
            )
        made.append((tokens, cache["resid_post", 0], cache["resid_post", 2]))
    assert torch.equal(made[0][0], made[1][0])
    for a, b in zip(made[0][1:], made[1][1:]):
        assert torch.allclose(a, b, atol=1e-4 * float(b.abs().max()))
    mask = torch.cat([given["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)[
        :, : made[0][1].shape[1]
    ]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        _, plain = model.run_with_cache(
            input_ids=made[0][0][:, :-1],
            attention_mask=mask,
            position_ids=positions,
            names_filter=("resid_post", 0),
        )
    moved = (made[0][1] - plain["resid_post", 0]).abs().amax(-1) > 1
    moved &= mask.bool()
    assert moved.any()
    assert not moved[mask.bool()].all()


def test_a_patch_in_the_prompt_lasts_through_a_generation() -> None:
    model = talking()
    source_text, text = "a dog sat on the park", "the cat sat on the mat"
    with torch.no_grad():
        _, whole = model.run_with_cache(source_text, names_filter="resid_pre")
    length = len(model.to_str_tokens(text))
    assert whole["resid_pre", 1].shape[1] >= length
    source = {name: whole[name][:, :length] for name in whole}
    made = []
    for use_cache in (True, False):
        options = {
            "max_new_tokens": 4,
            "do_sample": False,
            "use_cache": use_cache,
            "return_type": "tokens",
        }
        for edit in (
            ip.patch("resid_pre", source, layer=1, pos=[1, 2]),
            ip.patch("resid_pre", {n: v[:, 1:3] for n, v in source.items()}, layer=1, pos=[2, 1]),
            ip.patch("resid_pre", whole, layer=1, pos=[1, 2], source_pos=[1, 2]),
        ):
            with model.record(("resid_pre", 1), hooks=[edit]) as cache:
                made.append(model.generate(text, **options))
            assert torch.allclose(
                cache["resid_pre", 1][:, 1:3], source["blocks.1.hook_resid_pre"][:, 1:3]
            )
    assert all(torch.equal(made[0], other) for other in made[1:])
    said = r"position \d+ of 'blocks\.1\.hook_resid_pre' is selected. Narrow it"
    too_far = pytest.raises(ip.EditError, match=said)
    with too_far, model.hooks([ip.patch("resid_pre", source, layer=1)]):
        model.generate(text, max_new_tokens=3, do_sample=False)


def test_what_never_applied_is_said_at_the_end_and_not_before() -> None:
    model = talking()
    for use_cache in (True, False):
        options = {"max_new_tokens": 3, "do_sample": False, "use_cache": use_cache}
        with model.hooks([ip.zero("z", layer=1, pos=3), ip.zero("z", layer=1, phase="generated")]):
            model.generate("the cat", **options)
        for edit in (ip.zero("z", layer=1, pos=90), ip.knockout(1, query=90, key=0)):
            made: list[Any] = []
            never = pytest.raises(ip.NeverFired, match="never fired: no position that it selects")
            with never, model.hooks([edit]):
                made.append(model.generate("the cat", **options))
            assert made
        never = pytest.raises(ip.NeverFired, match=r"the cache at .* never fired: no position")
        with never, model.record(ip.at("z", layer=1, pos=90)):
            model.generate("the cat", **options)


def test_a_kv_cache_of_ones_own_goes_on_from_its_positions() -> None:
    model = talking()
    tokens = model.to_tokens("the cat sat on the mat")
    whole = value(model, {"input_ids": tokens}, ip.zero("resid_post", layer=1, pos=" on"))
    place = pieces(model, tokens)[0].index(" on")
    assert whole[0, place].abs().max() == 0
    with torch.no_grad():
        past = model(input_ids=tokens[:, : place - 1], use_cache=True).past_key_values
        _, rest = model.run_with_cache(
            input_ids=tokens[:, place - 1 :],
            past_key_values=past,
            names_filter=SITE,
            hooks=[
                ip.zero("resid_post", layer=1, pos=" on"),
                ip.add("resid_post", 1.0, layer=1, pos=place + 1),
            ],
        )
    assert rest[SITE][0, 1].abs().max() == 0
    assert torch.allclose(rest[SITE][0, 2], whole[0, place + 1] + 1, atol=1e-4)


# Under activation checkpointing the tokens are gone when a block is repeated.


def test_texts_are_remembered_for_what_a_checkpoint_repeats() -> None:
    model = talking()
    module = model.module
    given, other = (
        model.prepare(TEXTS, padding_side="left"),
        model.prepare(["the dog and the cat sat", TEXTS[1]], padding_side="left"),
    )
    assert given["input_ids"].shape == other["input_ids"].shape
    edits = [ip.scale("resid_post", 0.3, layer=1, pos=" cat"), ip.knockout(1, query=-1, key=" the")]

    def grad(*batches: dict[str, Tensor]) -> Tensor:
        module.zero_grad()
        with model.hooks(edits):
            losses = [module(**batch, use_cache=False).logits.square().mean() for batch in batches]
            torch.stack(losses).sum().backward()
        return module.get_input_embeddings().weight.grad.clone()

    module.train()
    for part in module.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    try:
        plain = [grad(given), grad(other)]
        module.gradient_checkpointing_enable()
        assert torch.equal(grad(given), plain[0])
        assert torch.equal(grad(other), plain[1])
        assert not torch.equal(*plain)
        # Two passes before one backward: each is repeated with its own tokens.
        both = grad(given, other)
        assert torch.allclose(both, plain[0] + plain[1], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(2 * plain[0], plain[0] + plain[1], rtol=1e-2, atol=1e-4)
        assert torch.equal(grad(given), plain[0])
    finally:
        module.gradient_checkpointing_disable()
        module.zero_grad()
        module.eval()


def test_packed_texts_take_numbers_and_refuse_what_they_cannot_mean() -> None:
    model = talking()
    texts = ["the cat sat", "a dog ran in"]
    with pytest.raises(ip.Unsupported, match="for generate_batch give numbers"):
        model.generate_batch(
            texts, hooks=[ip.zero("resid_post", layer=1, pos=" cat")], max_new_tokens=2
        )
    with pytest.raises(ip.Unsupported, match="rows and positions mean nothing there"):
        model.generate_batch(
            texts, hooks=[ip.zero("resid_post", layer=1, rows=0)], max_new_tokens=2
        )
    with pytest.raises(ip.Unsupported, match="rows and positions mean nothing there"):
        model.generate_batch(
            texts, names_filter=ip.at("resid_post", layer=1, pos=1), max_new_tokens=2
        )
    edit = ip.zero("resid_post", layer=1, exclude={"pos": 0})
    with pytest.raises(ip.Unsupported, match="with per_request=True"):
        model.generate_batch(texts, hooks=[edit], max_new_tokens=2)
    names = {"names_filter": SITE, "max_new_tokens": 2}
    result = model.generate_batch(texts, hooks=[edit], per_request=True, **names)
    rows = result.rows(SITE)
    assert torch.equal(rows.values.abs().sum(-1) > 0, rows.position == 0)
