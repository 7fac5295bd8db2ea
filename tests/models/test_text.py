"""Strings to tokens and back, and batches of different lengths."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import interpose as ip
from interpose.models.transformer import TransformerModel
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.models.texts import BOS, EOS, PAD, TEXTS, speaking, tokenizer

pytestmark = pytest.mark.bits


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.build("llama")


def having(module: Any, **options: Any) -> Any:
    return TransformerModel(module, tokenizer(**options))


# From strings to tokens.


def test_a_text_is_a_batch_of_one_on_the_models_device(llama: Any) -> None:
    model = having(llama)
    tokens = model.to_tokens("the cat")
    assert tokens.dtype == torch.long
    assert tokens.device == model.device
    assert tokens.tolist() == [model.tokenizer("the cat")["input_ids"]]


def test_several_texts_are_padded_on_the_side_asked_for(llama: Any) -> None:
    model = having(llama)
    short, long = (model.to_tokens(text)[0].tolist() for text in ("the cat", TEXTS[0]))
    filling = [PAD] * (len(long) - len(short))
    assert model.to_tokens(["the cat", TEXTS[0]]).tolist() == [[*short, *filling], long]
    left = model.to_tokens(["the cat", TEXTS[0]], padding_side="left")
    assert left.tolist() == [[*filling, *short], long]
    left_by_habit = having(llama, padding_side="left")
    assert torch.equal(left_by_habit.to_tokens(["the cat", TEXTS[0]]), left)
    with pytest.raises(ValueError, match="padding_side is 'left' or 'right'; got 'middle'"):
        model.to_tokens("the cat", padding_side="middle")


@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_is_the_tokenizers_habit_unless_told_and_never_doubled(
    llama: Any, adds_bos: bool
) -> None:
    model = having(llama, adds_bos=adds_bos)
    rows = {
        asked: model.to_tokens("the cat", prepend_bos=asked)[0].tolist()
        for asked in (None, True, False)
    }
    assert rows[True] == [BOS, *rows[False]]
    assert rows[None] == rows[adds_bos]
    assert BOS not in rows[False]
    padded = model.to_tokens(["the cat", TEXTS[0]], prepend_bos=True, padding_side="left")
    assert padded[0].tolist() == [PAD] * (padded.shape[1] - 3) + rows[True]


def test_a_bos_that_the_text_has_itself_is_left_alone(llama: Any) -> None:
    plain, adding = having(llama), having(llama, adds_bos=True)
    cat = plain.to_tokens("the cat")[0].tolist()
    assert plain.to_tokens("<s>the cat", prepend_bos=True).tolist() == [[BOS, *cat]]
    assert plain.to_tokens("<s>the cat", prepend_bos=False).tolist() == [[BOS, *cat]]
    assert adding.to_tokens("<s>the cat", prepend_bos=False).tolist() == [[BOS, *cat]]


def test_without_a_bos_token_none_can_be_prepended(llama: Any) -> None:
    model = having(llama, bos_token=None)
    assert model.to_tokens("the cat", prepend_bos=False).shape == (1, 2)
    with pytest.raises(ValueError) as error:
        model.to_tokens("the cat", prepend_bos=True)
    assert str(error.value) == (
        "the tokenizer has no BOS token to prepend; leave prepend_bos out to do as the tokenizer "
        "does."
    )


def test_berts_cls_is_its_bos(llama: Any) -> None:
    model = having(llama, adds_bos=True, bos_token=None, cls_token="<s>")
    assert model.to_tokens("the cat", prepend_bos=True)[0, 0] == BOS
    assert model.to_tokens("the cat", prepend_bos=False)[0, 0] != BOS


def test_a_tokenizer_without_pad_token_pads_with_another(llama: Any) -> None:
    model = having(llama, pad=False)
    llama_has = model.config.pad_token_id
    try:
        model.config.pad_token_id = None
        assert model.to_tokens(["the cat", TEXTS[0]])[0, -1] == EOS
        model.config.pad_token_id = 7
        assert model.to_tokens(["the cat", TEXTS[0]])[0, -1] == 7
        model.config.pad_token_id = 99  # the embedding ends before it
        assert model.to_tokens(["the cat", TEXTS[0]])[0, -1] == EOS
    finally:
        model.config.pad_token_id = llama_has


@pytest.mark.parametrize("pad", [False, True])
def test_the_tokenizer_stays_as_it_was(llama: Any, pad: bool) -> None:
    given = tokenizer(pad=pad, model_max_length=30)
    given.backend_tokenizer.enable_truncation(5)
    given.backend_tokenizer.enable_padding(length=9)
    before = given.backend_tokenizer.to_str(), copy.deepcopy(given.init_kwargs)
    attributes = {k: copy.deepcopy(v) for k, v in vars(given).items() if k != "_tokenizer"}
    model = TransformerModel(llama, given)
    with torch.no_grad():
        model(TEXTS, padding_side="left")
    model.to_tokens(" ".join(TEXTS * 9), truncate=False)
    model.to_str_tokens(TEXTS, prepend_bos=True)
    model.to_string(model.to_tokens(TEXTS))
    assert (given.backend_tokenizer.to_str(), given.init_kwargs) == before
    assert {k: v for k, v in vars(given).items() if k != "_tokenizer"} == attributes
    assert given.pad_token == ("<pad>" if pad else None)


def test_long_texts_are_cut_to_the_context(llama: Any) -> None:
    model = having(llama)
    text = " ".join(TEXTS * 5)
    assert model.config.max_position_embeddings == 64
    cut = pytest.warns(UserWarning, match=r"a text of \d+ tokens is cut to the 64")
    with cut:
        assert model.to_tokens(text).shape == (1, 64)
    with cut:
        assert model.to_tokens(text, prepend_bos=True).shape == (1, 64)
    with cut:
        assert model(text).shape[:2] == (1, 64)
    long = model.to_tokens(text, truncate=False)
    assert long.shape[1] > 64
    assert model(text, truncate=False).shape[:2] == long.shape  # rotary positions have no end
    with pytest.warns(UserWarning, match="cut to the 10"):
        assert having(llama, model_max_length=10).to_tokens(text).shape == (1, 10)
    exact = model.to_string(long[0, :64])
    if (
        model.to_tokens(exact).shape[1] == 64
    ):  # a text that just fits is not cut, and not warned about
        assert torch.equal(model.to_tokens(exact), model.to_tokens(exact, truncate=False))


def test_only_texts_become_tokens(llama: Any) -> None:
    model = having(llama)
    for wrong in ([], [1, 2], 3, ["a", 1]):
        with pytest.raises(TypeError, match="a text or a list of texts is needed; got"):
            model.to_tokens(wrong)


def test_without_a_tokenizer_the_error_says_how_to_give_one(llama: Any) -> None:
    message = (
        "this model was wrapped without a tokenizer, so it takes tokens and not text. Give it one: "
        "ip.wrap(module, tokenizer=...), or call it with a tensor of token ids."
    )
    model = TransformerModel(llama)
    for use in (model.to_tokens, model.to_str_tokens, model.to_single_token, model):
        with pytest.raises(ip.Unsupported) as error:
            use("the cat")
        assert str(error.value) == message


def test_a_processor_brings_its_tokenizer(llama: Any) -> None:
    model = TransformerModel(llama, processor=SimpleNamespace(tokenizer=tokenizer()))
    assert torch.equal(model.to_tokens("the cat"), having(llama).to_tokens("the cat"))


# From tokens to strings.


def test_strings_come_back(llama: Any) -> None:
    model = having(llama, adds_bos=True)
    tokens = model.to_tokens(TEXTS[:2])
    assert model.to_string(model.to_tokens(TEXTS[0])[0]) == f"<s>{TEXTS[0]}"
    assert model.to_string(tokens) == model.tokenizer.batch_decode(tokens)
    assert model.to_string(tokens.tolist()) == model.to_string(tokens)
    assert model.to_string(tokens[1].numpy()) == f"<s>{TEXTS[1]}"
    assert model.to_string([]) == ""
    assert model.to_string(BOS) == model.to_string(torch.tensor(BOS)) == "<s>"


def test_each_token_as_a_string(llama: Any) -> None:
    model = having(llama, adds_bos=True)
    pieces = model.to_str_tokens("the cat sat")
    assert pieces == ["<s>", "the", " cat", " sat"]
    assert model.to_str_tokens("the cat sat", prepend_bos=False) == pieces[1:]
    assert model.to_str_tokens(["the cat sat", "a"]) == [pieces, ["<s>", "a"]]
    tokens = model.to_tokens("the cat sat")
    for same in (tokens, tokens[0], tokens[0].tolist(), tokens[0].numpy()):
        assert model.to_str_tokens(same) == pieces
    batch = model.to_str_tokens(model.to_tokens(["the cat sat", "a"]))
    assert batch == [pieces, ["<s>", "a", "<pad>", "<pad>"]]


def test_spaces_of_sentencepiece_tokens_are_kept(llama: Any) -> None:
    words = {"<unk>": 0, "\u2581the": 1, "\u2581cat": 2, "s": 3}
    made = Tokenizer(models.WordPiece(words, unk_token="<unk>", continuing_subword_prefix=""))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    model = TransformerModel(
        llama, PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    )
    assert model.to_str_tokens("the cats") == [" the", " cat", "s"]
    assert model.to_string(model.to_tokens("the cats")[0]) == "the cats"


def test_a_word_may_be_asked_for_as_it_is_shown(llama: Any) -> None:
    """Though the tokenizer puts another space before it, as Llama's does."""
    words = {"<unk>": 0, "\u2581": 1, "\u2581cat": 2, "s": 3}
    made = Tokenizer(models.WordPiece(words, unk_token="<unk>", continuing_subword_prefix=""))
    prepend, replace = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
    made.normalizer = normalizers.Sequence([prepend, replace])
    made.decoder = decoders.Metaspace()
    words_of = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    model = TransformerModel(llama, words_of)
    assert model.to_tokens(" cat").tolist() == [[1, 2]]
    assert model.to_single_token(" cat") == model.to_single_token("cat") == 2
    with pytest.raises(ValueError, match="is 2 tokens and not one"):
        model.to_single_token("cats")


def test_single_tokens(llama: Any) -> None:
    model = having(llama, adds_bos=True)
    token = model.to_single_token(" cat")
    assert model.to_single_str_token(token) == " cat"
    with pytest.raises(ValueError) as error:
        model.to_single_token("the cat")
    assert str(error.value) == (
        "'the cat' is 2 tokens and not one: ['the', ' cat']. Most tokenizers have words with the "
        "space before them (' Paris'); look with to_str_tokens, or give the number."
    )


def test_where_a_token_is(llama: Any) -> None:
    model = having(llama, adds_bos=True)
    text = "the cat and the cat"
    pieces = model.to_str_tokens(text)
    assert model.get_token_position(" cat", text) == pieces.index(" cat") == 2
    assert model.get_token_position(" cat", text, mode="last") == len(pieces) - 1
    assert model.get_token_position(" cat", text, prepend_bos=False) == 1
    token, tokens = model.to_single_token(" cat"), model.to_tokens(text)
    for same in (tokens, tokens[0], tokens[0].tolist()):
        assert model.get_token_position(token, same) == 2
    with pytest.raises(ValueError, match=r"the token ' sat' is not among \['<s>', 'the', ' cat'"):
        model.get_token_position(" sat", text)
    with pytest.raises(ValueError, match="a position is in one text; got a batch of 3"):
        model.get_token_position(" cat", model.to_tokens(TEXTS))
    with pytest.raises(ValueError, match="mode is 'first' or 'last'; got 'any'"):
        model.get_token_position(" cat", text, mode="any")


# What a padded batch needs.


def test_only_padding_brings_a_mask_and_only_on_the_left_positions(llama: Any) -> None:
    model = having(llama)
    assert model.prepare("the cat").keys() == {"input_ids"}
    assert model.prepare(["the cat", "the dog"]).keys() == {"input_ids"}
    texts = ["the cat", "the cat sat on"]
    right = model.prepare(texts)
    assert right.keys() == {"input_ids", "attention_mask"}
    assert right["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    left = model.prepare(texts, padding_side="left", prepend_bos=True)
    assert left["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert left["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert left["input_ids"][:, -3:].tolist()[0] == model.to_tokens("<s>the cat")[0].tolist()


def test_positions_are_left_to_models_that_count_otherwise() -> None:
    # RoBERTa counts from padding_idx + 1, BLOOM takes no positions at all.
    for kind, model_type in (("masked", "roberta"), ("causal", "bloom")):
        made = speaking(model_type, kind).prepare(["the cat", TEXTS[0]], padding_side="left")
        assert made.keys() == {"input_ids", "attention_mask"}


def test_tokens_are_prepared_too(llama: Any) -> None:
    model = having(llama)
    tokens = model.to_tokens(TEXTS, padding_side="left")
    made, expected = model.prepare(tokens), model.prepare(TEXTS, padding_side="left")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in made)
    assert model.prepare([3, 4]).keys() == {"input_ids"}
    assert model.prepare([3, 4])["input_ids"].shape == (1, 2)
    for wrong in (torch.zeros(2, 3, 4, dtype=torch.long), torch.zeros(2, 3), torch.zeros(2) > 0):
        with pytest.raises(TypeError, match=r"tokens are integers of shape \[batch, pos\] or"):
            model.prepare(wrong)


def test_an_empty_text_cannot_be_run(llama: Any) -> None:
    with pytest.raises(ValueError, match="the text '' has no tokens, so there is nothing to run"):
        having(llama).prepare(["the cat", ""])
    made = having(llama).prepare(["the cat", ""], prepend_bos=True)
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_padding_is_told_by_a_token_of_its_own_at_the_ends(llama: Any) -> None:
    model = having(llama)
    tokens = torch.tensor([[PAD, PAD, 5, PAD, 6], [7, 8, 9, PAD, PAD], [PAD] * 5])
    assert model.mask_of(tokens).tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1] * 5]
    assert model.mask_of(torch.tensor([[5, PAD, 6]])) is None
    assert having(llama, pad=False).mask_of(tokens) is None
    assert having(llama, pad=False, pad_token="</s>").mask_of(tokens) is None
    assert TransformerModel(llama).mask_of(tokens) is None


# Batches give what each text gives alone.

CAUSAL = [
    "gpt2",
    "llama",
    "mistral",
    "opt",
    "bloom",
    "gpt_neox",
    "falcon",
    "gemma2",
    "phi3",
    "qwen2",
]
ALL = [(name, "causal", side) for name in CAUSAL for side in ("left", "right")]
ALL += [("t5", "encoder_decoder", side) for side in ("left", "right")]
ALL += [("bert", "masked", side) for side in ("left", "right")]
ALL += [("roberta", "masked", "left"), ("bart", "encoder_decoder", "right")]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


def at_text(value: Tensor, row: int, length: int, longest: int, side: str) -> Tensor:
    """The part of one row of a batch that belongs to its text; of what has no positions, all."""
    if value.shape[1] != longest:
        return value[row]
    return value[row, longest - length :] if side == "left" else value[row, :length]


@pytest.mark.parametrize(("name", "kind", "side"), ALL)
@torch.no_grad()
def test_a_padded_text_gives_what_it_gives_alone(name: str, kind: str, side: str) -> None:
    model = speaking(name, kind)
    if name == "mistral":
        assert model.config.sliding_window == 4
    tower = "encoder." if kind == "encoder_decoder" else ""
    sites = [f"{tower}blocks.*.hook_resid_post", f"{tower}blocks.*.attn.hook_z"]
    logits, cache = model.run_with_cache(TEXTS, padding_side=side, names_filter=sites)
    tokens = model.to_tokens(TEXTS, padding_side=side)
    extra = {"decoder_input_ids": torch.ones(3, 1, dtype=torch.long)} if tower else {}
    unmasked = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **extra).logits
    longest = tokens.shape[1]
    missed = 0.0
    for row, text in enumerate(TEXTS):
        alone, kept = model.run_with_cache(text, names_filter=sites)
        length = model.to_tokens(text).shape[1]
        assert len(kept) == len(cache) == 2 * len(model.anatomy.towers[0].blocks)
        for key, value in [("logits", alone), *kept.items()]:
            batched = logits if key == "logits" else cache[key]
            part = at_text(batched, row, length, longest, side)
            assert distance(value[0], part) < 1e-5, (key, text)
        missed = max(missed, distance(alone[0], at_text(unmasked, row, length, longest, side)))
    # What is to the right of a text is nothing to a causal model, with or without a mask.
    assert missed > 1e-2 if kind != "causal" or side == "left" else missed < 1e-5


@torch.no_grad()
def test_positions_matter_where_they_are_embedded() -> None:
    model = speaking("gpt2")
    given = model.prepare(TEXTS, padding_side="left")
    right = model(**given).logits
    del given["position_ids"]
    assert distance(right[0, -3:], model(**given).logits[0, -3:]) > 1e-2


def test_a_model_that_padding_changes_is_refused() -> None:
    model = speaking("bart", "encoder_decoder")
    with pytest.raises(ip.Unsupported) as error:
        model(TEXTS, padding_side="left")
    first, second = str(error.value).split(" off in a trial")
    assert first.startswith(
        "BartForConditionalGeneration computes something else for a text that is padded on the left ("
    )
    assert second == (
        "), also with a mask.\n  Run texts of one length together, or try padding_side='right'."
    )
    model(["the cat", "the dog"], padding_side="left")  # nothing to pad
    fnet = speaking("fnet", "masked")  # it mixes all positions, and takes no mask
    for side in ("left", "right"):
        with pytest.raises(ip.Unsupported, match="FNetForMaskedLM computes something else"):
            fnet(TEXTS, padding_side=side)


def test_a_trial_leaves_no_trace_and_no_hook_hears_it() -> None:
    model = speaking("llama")
    model.train()
    heard = []
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: heard.append(1))]):
        before = state_of(model.module)
        model.prepare(TEXTS, padding_side="left")
        assert heard == []
        assert same_state(before, state_of(model.module))
        model("the cat")
    handle = model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: heard.append(2))
    model.prepare(TEXTS, padding_side="right")
    handle.remove()
    assert heard == [1]


def pieces(words: list[str], kind: str) -> Any:
    """A tokenizer with a token for each of some words, which writes spaces as GPT-2, sentencepiece or BERT does."""
    made: Any
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
    else:
        made = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], 0))
        scheme = "always" if kind == "sentencepiece" else "never"
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


MARKED = [
    "?",
    "\u2581",
    "\u2581in",
    "in",
    "\u2581Paris",
    "Paris",
    "(",
    '"',
    ":",
    "\u2581Mur",
    "ray",
]


def answered(model: Any, before: str, answer: str) -> int:
    return int(model.to_answer(answer, model.to_tokens(before)[0]))


def test_an_answer_without_its_space_is_asked_about(llama: Any) -> None:
    model = TransformerModel(llama, pieces(MARKED, "bare"))
    ids = {word: number for number, word in enumerate(MARKED)}
    assert answered(model, "in", " Paris") == ids["\u2581Paris"]
    for before in ("in", " in", "in:"):
        with pytest.raises(ValueError, match="Which is meant") as caught:
            answered(model, before, "Paris")
        assert "Write ' Paris'" in str(caught.value)
        assert f"or {ids['Paris']}, the number" in str(caught.value)
    for before in ("in (", 'in "', "in "):  # nothing or a beginning before it: as it stands
        assert answered(model, before, "Paris") == ids["Paris"]
    assert answered(model, " Mur", "ray") == ids["ray"]  # no token has it with a space


def test_the_same_token_with_and_without_a_space_is_not_asked_about(llama: Any) -> None:
    spaced = TransformerModel(llama, pieces(MARKED, "sentencepiece"))
    assert answered(spaced, "in", "Paris") == answered(spaced, "in", " Paris") == 4
    words = ["?", "in", "Paris", "##s"]
    cut = TransformerModel(llama, pieces(words, "wordpiece"))
    assert answered(cut, "in", "Paris") == answered(cut, "in", " Paris") == 2


def test_metrics_and_methods_ask_about_an_answer_without_its_space() -> None:
    model = ip.load("pocket")
    clean, corrupt = "The Eiffel Tower is in", "The Trevi Fountain is in"
    for metric in (
        ip.metrics.logit("Paris"),
        ip.metrics.logit_difference(" Paris", "Rome"),
        ip.metrics.probability("Paris"),
    ):
        with pytest.raises(ValueError, match="Which is meant"):
            ip.sweep(model, clean, corrupt, over="layer", metric=metric, progress=False)
    for method in (ip.logit_lens, ip.direct_logit_attribution):
        with pytest.raises(ValueError, match="Which is meant"):
            method(model, clean, answer="Paris")
    token = model.to_single_token("Paris")
    found = ip.logit_lens(model, clean, answer=token)  # a number is taken as it is
    assert found is not None


def test_several_tokens_that_are_one_with_a_space_are_told(llama: Any) -> None:
    words = [word for word in MARKED if word != "Paris"]
    words += ["Par", "is"]
    model = TransformerModel(llama, pieces(words, "bare"))
    with pytest.raises(ValueError, match=r"Did you mean ' Paris', which is one\?"):
        model.to_single_token("Paris")


@pytest.mark.parametrize("tokens", [[[3, 99]], [[3, -1]], torch.tensor([[3, 1000]])])
def test_tokens_beyond_the_vocabulary_are_named(llama: Any, tokens: Any) -> None:
    wrong = int(torch.as_tensor(tokens)[0, 1])
    with pytest.raises(
        IndexError, match=f"token {wrong} is not there: the model has tokens 0 to 98"
    ):
        TransformerModel(llama)(tokens)


def test_floats_that_should_be_tokens_are_told_from_embeddings(llama: Any) -> None:
    model = TransformerModel(llama)
    with pytest.raises(TypeError, match=r"Tokens as floats: tokens.long\(\)"):
        model(torch.tensor([[1.0, 2.0]]))
    width = llama.config.hidden_size
    assert model(torch.randn(1, 3, width)).shape[:2] == (1, 3)


def test_tokens_beyond_the_positions_are_counted() -> None:
    model = ip.load("pocket")
    long = torch.randint(3, 1000, (1, 261), generator=torch.Generator().manual_seed(0))
    for run in (lambda: model(long), lambda: ip.logit_lens(model, long, progress=False)):
        with pytest.raises(ValueError, match="a text has 261 tokens, and the model 256 positions"):
            run()
    assert model(long[:, -256:]).shape[1] == 256


def test_positions_that_are_computed_have_no_end(llama: Any) -> None:
    model = TransformerModel(llama)
    length = llama.config.max_position_embeddings + 3
    assert model(torch.full((1, length), 5)).shape[1] == length
