"""A tuned lens begins as the logit lens, comes closer to the model by training, and finds a map that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from tests.leftovers import same_state, state_of
from tests.models import tiny
from training import corpus


@pytest.fixture(scope="module")
def pocket() -> ip.TransformerModel:
    found = ip.load("pocket")
    assert isinstance(found, ip.TransformerModel)
    return found


@pytest.fixture(scope="module")
def lens(pocket: ip.TransformerModel) -> ip.TunedLens:
    texts = list(corpus.documents("lens", 80))
    return ip.TunedLens.fit(pocket, texts, steps=15, learning_rate=3e-3, seed=1)


def divergence(model: ip.TransformerModel, lens: ip.TunedLens | None, texts: list[str]):
    """The mean KL of each layer."""
    made = [ip.logit_lens(model, t) if lens is None else lens(model, t) for t in texts]
    return torch.cat([each.kl for each in made], -1).mean(-1)


def untrained(model: ip.TransformerModel) -> ip.TunedLens:
    return ip.TunedLens.fit(model, torch.arange(5, 13)[None], steps=1, learning_rate=0.0)


def test_an_untrained_lens_is_the_logit_lens(pocket: ip.TransformerModel) -> None:
    text = "The Eiffel Tower is in"
    mine = untrained(pocket)(pocket, text, answer=" Paris")
    plain = ip.logit_lens(pocket, text, answer=" Paris")
    for name in ("values", "kl", "top_ids", "answer_logit", "answer_rank"):
        assert torch.equal(getattr(mine, name), getattr(plain, name)), name


def test_training_brings_every_layer_closer_on_texts_it_has_not_seen(
    pocket: ip.TransformerModel, lens: ip.TunedLens
) -> None:
    held_out = list(corpus.documents("held out", 12))
    before, after = (divergence(pocket, each, held_out) for each in (None, lens))
    assert (after[:-1] < 0.9 * before[:-1]).all(), (before, after)
    assert before[:-1].min() > 0.05
    assert torch.equal(before[-1], after[-1])
    assert not lens.matrices[-1].any()
    assert not lens.offsets[-1].any()
    assert lens.matrices[:-1].flatten(1).any(-1).all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox"])
def test_gradients_are_those_of_the_divergence_and_parameters_get_none(name: str) -> None:
    module = tiny.build(name, layers=3)
    model, tokens = ip.wrap(module), torch.arange(10, 19)[None]
    untrained(model)  # finds the sites
    before = state_of(module)
    lens = ip.TunedLens.fit(model, tokens, steps=30, learning_rate=5e-3)
    assert same_state(before, state_of(module))
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    plain, tuned = ip.logit_lens(model, tokens).kl, lens(model, tokens).kl
    assert (tuned[:-1].mean(-1) < 0.5 * plain[:-1].mean(-1)).all()
    torch.testing.assert_close(lens.kl[0], plain.mean(-1), atol=1e-5, rtol=1e-4)


def test_a_map_that_is_there_is_found() -> None:
    # Of one token, attention is the identity: without norms the last block is x + x W_V W_O + b.
    sizes = {"n_layers": 2, "d_model": 4, "d_head": 4, "n_heads": 1, "n_ctx": 4, "d_vocab": 60}
    config = HookedTransformerConfig(**sizes, attn_only=True, normalization_type=None, seed=0)
    model = HookedTransformer(config).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
    for silent in (model.W_pos, model.blocks[0].attn.W_O, model.blocks[0].attn.b_O):
        silent.zero_()
    model.W_E.mul_(2).sub_(model.W_E.mean(0))
    tokens = torch.arange(60)[:, None]
    lens = ip.TunedLens.fit(model, tokens, steps=300, learning_rate=3e-2, batch_size=60)
    attn = model.blocks[1].attn
    matrix, offset = attn.W_V[0] @ attn.W_O[0], attn.b_V[0] @ attn.W_O[0] + attn.b_O
    # A constant added to all logits says nothing: compare what differences of logits see.
    seen = model.W_U - model.W_U.mean(-1, keepdim=True)
    for found, wanted in ((lens.matrices[0], matrix), (lens.offsets[0], offset)):
        assert wanted.norm() > 0.5
        assert ((found - wanted) @ seen).norm() < 1e-3 * (wanted @ seen).norm()


def test_equal_seeds_give_equal_bits_and_leave_the_random_state_alone() -> None:
    model = ip.wrap(tiny.build("gpt2"))
    texts = [torch.randint(10, 60, (n,)).tolist() for n in (5, 6, 7, 8)]
    state = torch.get_rng_state()
    one, two, other = (ip.TunedLens.fit(model, texts, steps=6, seed=s) for s in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one.matrices, two.matrices)
    assert torch.equal(one.kl, two.kl)
    assert not torch.equal(one.matrices, other.matrices)


def test_it_is_saved_whole_and_loaded_for_models_of_its_shape_alone(
    pocket: ip.TransformerModel, lens: ip.TunedLens, tmp_path: Path
) -> None:
    path = lens.save(tmp_path / "lens.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["lens.safetensors"]
    again = ip.TunedLens.load(path, pocket)
    assert torch.equal(again.matrices, lens.matrices)
    assert (again.protocol, repr(again)) == (lens.protocol, repr(lens))
    other = ip.wrap(tiny.build("gpt2"))
    for refused in (lambda: ip.TunedLens.load(path, other), lambda: lens(other, [[1, 2]])):
        with pytest.raises(ValueError, match="layers 7, width 192, vocabulary 2808; this one has"):
            refused()
    (tmp_path / "folder").mkdir()
    with pytest.raises(Exception, match=r"folder|directory"):
        lens.save(tmp_path / "folder")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "lens.safetensors"]


def test_wrong_arguments_say_so(pocket: ip.TransformerModel, lens: ip.TunedLens) -> None:
    with pytest.raises(ValueError, match="at least 1; got 0"):
        ip.TunedLens.fit(pocket, "The cat", steps=0)
    with torch.inference_mode(), pytest.raises(ip.Unsupported, match="call this outside of it"):
        ip.TunedLens.fit(pocket, "The cat", steps=1)
    with pytest.raises(ValueError, match="trained for resid_post"):
        lens(pocket, "The cat", site="resid_pre")


def test_progress_is_told_and_it_prints(lens: ip.TunedLens) -> None:
    model, told = ip.wrap(tiny.build("gpt2")), []
    made = ip.TunedLens.fit(model, [[11, 12, 13]], steps=2, progress=lambda *far: told.append(far))
    assert told == [(1, 2), (2, 2)]
    assert len(made.kl) == 2
    assert repr(lens).startswith("Tuned lens: steps 15, texts 80")
    assert repr(lens).splitlines()[-1].split() == ["6", "0", "0"]
