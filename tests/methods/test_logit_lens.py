"""The logit lens is the model's own end, put behind every layer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from interpose.methods.logit_lens import LogitLens
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.pages import loads_nothing
from tests.sweeps import oracle

TYPES = ["gpt2", "llama", "gemma2", "gpt_neox", "granite", "cohere", "mixtral", "mamba"]
TEXT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def pocket() -> ip.TransformerModel:
    found = ip.load("pocket")
    assert isinstance(found, ip.TransformerModel)
    return found


def streams_by_hand(module: Any, tokens: Tensor) -> list[Tensor]:
    """What each block returns, by raw hooks."""
    kept: list[Tensor] = []

    def keep(_: Any, args: Any, output: Any) -> None:
        kept.append((output if isinstance(output, Tensor) else output[0]).clone())

    handles = [block.register_forward_hook(keep) for block in oracle.blocks(module)]
    with torch.no_grad():
        module(tokens)
    for handle in handles:
        handle.remove()
    return kept


def said_by_hand(module: Any, tokens: Tensor, stream: Tensor) -> Tensor:
    """The bare module's logits, with another stream put in where its last block ends."""

    def replace(_: Any, args: Any, output: Any) -> Any:
        return stream if isinstance(output, Tensor) else (stream, *output[1:])

    handle = oracle.blocks(module)[-1].register_forward_hook(replace)
    with torch.no_grad():
        logits: Tensor = module(tokens).logits
    handle.remove()
    return logits


@pytest.mark.parametrize("name", TYPES)
def test_every_number_is_what_the_bare_module_says_with_that_stream_at_its_end(name: str) -> None:
    module = tiny.build(name, layers=3)
    tokens, _ = oracle.pair(batch=2)
    answer = [5, 9]
    lens = ip.logit_lens(ip.wrap(module), tokens, answer=answer, top=4)
    with torch.no_grad():
        own = module(tokens).logits.log_softmax(-1)
    streams = streams_by_hand(module, tokens)
    assert lens.axes["layer"] == list(range(len(streams)))
    for layer, stream in enumerate(streams):
        logits = said_by_hand(module, tokens, stream)
        if layer == len(streams) - 1:
            assert torch.equal(logits.log_softmax(-1), own)
        chances = logits.softmax(-1)
        best = chances.topk(4).values
        torch.testing.assert_close(lens.values[:, layer], best[..., 0])
        torch.testing.assert_close(lens.top_probabilities[:, layer], best)
        assert (chances.gather(-1, lens.top_ids[:, layer]) - best).abs().max() < 1e-6
        kl = (own.exp() * (own - logits.log_softmax(-1))).sum(-1)
        torch.testing.assert_close(lens.kl[:, layer], kl, atol=1e-5, rtol=1e-4)
        for row, token in enumerate(answer):
            mine = logits[row, :, token]
            torch.testing.assert_close(lens.answer_logit[row, layer], mine)
            torch.testing.assert_close(lens.answer_probability[row, layer], chances[row, :, token])
            assert torch.equal(lens.answer_rank[row, layer], (logits[row] > mine[:, None]).sum(-1))
    assert lens.kl[:, 0].max() > 0.01  # or nothing was tested


@pytest.mark.parametrize("name", TYPES)
def test_a_few_logits_are_those_of_all_without_unembedding_them(name: str) -> None:
    module = tiny.build(name, layers=3)
    tokens, _ = oracle.pair(batch=2)
    model = ip.wrap(module)
    few = ip.logit_lens(model, tokens, logits_of=[7, 11], pos=[-1, 2], layer=[0, -1])
    assert few.axes["answer"] == [7, 11]
    assert few.axes["pos"] == [2, 12]
    assert few.unit == "logits"
    for number, token in enumerate((7, 11)):
        whole = ip.logit_lens(model, tokens, answer=token, pos=[2, 12], layer=[0, -1])
        torch.testing.assert_close(few.values[number], whole.answer_logit, atol=1e-5, rtol=1e-4)


def test_only_what_is_asked_for_is_unembedded(pocket: ip.TransformerModel) -> None:
    ip.logit_lens(pocket, TEXT)  # the model is looked at once
    rows: list[int] = []
    head = pocket.module.lm_head.register_forward_hook(
        lambda _, args, output: rows.append(output.shape[:-1].numel())
    )
    ip.logit_lens(pocket, TEXT, layer=[1, 4], pos=[-1, -2])
    rows.clear()  # the hook is new, and what rests on there being none is tried again
    lens = ip.logit_lens(pocket, TEXT, layer=[1, 4], pos=[-1, -2])
    assert sum(rows) == 2 + 2 * 2  # the forward's own two, and those of two layers
    assert lens.protocol["unembeddings"] == 4
    rows.clear()
    ip.logit_lens(pocket, TEXT, logits_of=[" Mary"])
    rows.clear()  # a stop learns in its first run which modules are called once
    ip.logit_lens(pocket, TEXT, logits_of=[" Mary"])
    assert rows == []  # what is done to logits behind the unembedding is known of the model
    head.remove()


def test_the_pocket_model_knows_the_name_in_the_last_layer_alone(
    pocket: ip.TransformerModel,
) -> None:
    lens = ip.logit_lens(pocket, TEXT, answer=" Mary")
    assert torch.equal(lens.top_ids[-1], pocket(TEXT)[0].topk(5).indices)
    token, chance = lens.best(layer=6, pos=13)[0]
    assert token == " Mary"
    assert chance == pytest.approx(pocket(TEXT)[0, -1].softmax(-1).max().item(), abs=1e-6)
    assert lens.answer_rank[:, -1].tolist()[-2:] == [1, 0]
    assert lens.answer_rank[0, -1] > 100
    assert lens.tokens == pocket.to_str_tokens(TEXT)
    shown = repr(lens)
    assert "' Mary'  89%" in shown
    assert len(shown.splitlines()) < 40


def test_texts_of_different_lengths_are_read_from_the_end(pocket: ip.TransformerModel) -> None:
    texts = [TEXT, "The capital of Japan is", "The Eiffel Tower is in"]
    answers = [" Mary", " Tokyo", " Paris"]
    lens = ip.logit_lens(pocket, texts, answer=answers, pos=-1, batch_size=2)
    assert list(lens.axes) == ["example", "layer", "pos"]
    for number, text in enumerate(texts):
        alone = ip.logit_lens(pocket, text, answer=answers[number], pos=-1)
        torch.testing.assert_close(lens.kl[number], alone.kl, atol=1e-5, rtol=1e-4)
        assert torch.equal(lens.answer_rank[number], alone.answer_rank)
    with pytest.raises(ValueError, match=r"the texts have 5 and 14 tokens.*pos=-1"):
        ip.logit_lens(pocket, texts)


@pytest.mark.parametrize("norm", [None, "LN", "RMS"])
def test_a_model_from_scratch_has_the_lens_too(norm: str | None) -> None:
    sizes = {"n_layers": 2, "d_model": 16, "d_head": 8, "n_ctx": 16, "d_vocab": 30, "seed": 0}
    config = HookedTransformerConfig(**sizes, act_fn="gelu", normalization_type=norm)
    model = HookedTransformer(config).eval()
    tokens = torch.arange(8)[None]
    lens = ip.logit_lens(model, tokens)
    _, cache = model.run_with_cache(tokens)
    logits = model.unembed(model.ln_final(cache["resid_post", 0]))
    torch.testing.assert_close(lens.values[0], logits.softmax(-1).amax(-1)[0].detach())
    assert lens.kl[-1].max() < 1e-5
    few = ip.logit_lens(model, tokens, logits_of=[7])
    torch.testing.assert_close(few.values[0, 0], logits[0, :, 7].detach())


def test_a_site_before_the_blocks_and_a_function_in_between(pocket: ip.TransformerModel) -> None:
    before = ip.logit_lens(pocket, TEXT, site="resid_pre", layer=[1])
    after = ip.logit_lens(pocket, TEXT, layer=[0])
    assert torch.equal(before.values, after.values)
    swapped = ip.logit_lens(pocket, TEXT, layer=[2], through=lambda stream, layer: stream * layer)
    torch.testing.assert_close(  # a norm takes no notice of a factor
        swapped.kl, ip.logit_lens(pocket, TEXT, layer=[2]).kl, atol=1e-3, rtol=1e-3
    )


def test_edits_in_scope_are_seen(pocket: ip.TransformerModel) -> None:
    plain = ip.logit_lens(pocket, TEXT, answer=" Mary", pos=-1)
    with pocket.hooks([ip.zero("z", layer=5, head=[0, 2])]):
        edited = ip.logit_lens(pocket, TEXT, answer=" Mary", pos=-1)
    assert torch.equal(edited.answer_logit[:5], plain.answer_logit[:5])
    assert edited.answer_logit[6, 0] < plain.answer_logit[6, 0] - 5


def test_one_token_alone_may_be_asked_for(pocket: ip.TransformerModel) -> None:
    one, listed = (ip.logit_lens(pocket, TEXT, logits_of=of) for of in (" Mary", [" Mary"]))
    assert one.axes["answer"] == [" Mary"]
    assert torch.equal(one.values, listed.values)


def test_wrong_arguments_say_what_to_write(pocket: ip.TransformerModel) -> None:
    with pytest.raises(ValueError, match="'embed' is in no layer"):
        ip.logit_lens(pocket, TEXT, site="embed")
    with pytest.raises(ValueError, match="logits_of has token 99999, and the model tokens 0 to"):
        ip.logit_lens(pocket, TEXT, logits_of=[99999])
    with pytest.raises(ValueError, match="logits_of is empty"):
        ip.logit_lens(pocket, TEXT, logits_of=[])
    with pytest.raises(ValueError, match="pos is empty"):
        ip.logit_lens(pocket, TEXT, pos=[])
    with pytest.raises(IndexError, match="layer 7 is not there"):
        ip.logit_lens(pocket, TEXT, layer=[7])
    with pytest.raises(IndexError, match="pos 14 is not there: text 0 has positions 0 to 13"):
        ip.logit_lens(pocket, TEXT, pos=14)
    with pytest.raises(ValueError, match="put the answer among them"):
        ip.logit_lens(pocket, TEXT, answer=" Mary", logits_of=[" John"])
    with pytest.raises(ValueError, match="as wide as the stream; 'z' has others"):
        ip.logit_lens(pocket, TEXT, site="z")
    with pytest.raises(ValueError, match="at least 1; got 0"):
        ip.logit_lens(pocket, TEXT, top=0)
    with pytest.raises(ValueError, match="2 tokens for 1 examples"):
        ip.logit_lens(pocket, TEXT, answer=[" Mary", " John"])
    with pytest.raises(ValueError, match="leave it out to see the likeliest"):
        ip.logit_lens(pocket, TEXT, logits_of=[" Mary"]).best(layer=0, pos=0)
    with pytest.raises(KeyError, match="say which pos"):
        ip.logit_lens(pocket, TEXT).best(layer=0)


def test_nothing_is_left_behind(pocket: ip.TransformerModel) -> None:
    ip.logit_lens(pocket, TEXT)
    before = state_of(pocket.module)
    grads = [(p.requires_grad, p.grad) for p in pocket.module.parameters()]
    ip.logit_lens(pocket, TEXT, answer=" Mary")
    with pytest.raises(ZeroDivisionError):
        ip.logit_lens(pocket, TEXT, through=lambda stream, layer: stream * (1 // 0))
    assert same_state(before, state_of(pocket.module))
    assert grads == [(p.requires_grad, p.grad) for p in pocket.module.parameters()]


def test_it_is_saved_and_its_page_loads_nothing_and_escapes_tokens(
    pocket: ip.TransformerModel,
) -> None:
    lens = ip.logit_lens(pocket, TEXT, answer=" Mary", pos=[-1])
    again = LogitLens.from_dict(json.loads(json.dumps(lens.to_dict())))
    assert repr(again) == repr(lens)
    assert torch.equal(again.kl, lens.kl)
    assert again.html() == lens.html()
    loads_nothing(lens.html())
    assert ">Mary<br>" in lens.html().replace(" Mary", "Mary")
    words = ["<b>&"] * len(lens.top_tokens)
    spoiled = LogitLens.from_dict({**lens.to_dict(), "top_tokens": words, "tokens": words * 14})
    assert "<b>&<" not in spoiled.html()
    assert "&lt;b&gt;&amp;" in spoiled.html()
    assert "<svg" in lens.svg()
