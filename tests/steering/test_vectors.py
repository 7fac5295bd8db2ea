"""Steering vectors: made, against formulas by hand; added, against hooks of torch; kept in files; refused."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.edits.models import block_of, built, ids, talking, wrapped

pytestmark = pytest.mark.bits

QUIET: dict[str, Any] = {"progress": False}


@functools.cache
def kinds() -> tuple[Tensor, Tensor]:
    """Tokens of two kinds: what they end with tells them apart."""
    drawn = torch.randint(3, 60, (16, 7), generator=torch.Generator().manual_seed(3))
    drawn[:8, -1] = torch.tensor([60, 61] * 4)
    drawn[8:, -1] = torch.tensor([70, 71] * 4)
    return drawn[:8], drawn[8:]


def values(model: Any, tokens: Tensor, layer: int, pos: Any = -1) -> Tensor:
    _, cache = model.run_with_cache(tokens, names_filter=("resid_post", layer))
    found = cache["resid_post", layer]
    return (found.mean(1) if isinstance(pos, slice) else found[:, pos]).double()


@pytest.mark.parametrize("by", ["means", "pca", "pca_diff", "probe"])
def test_a_direction_is_what_its_formula_says(by: str) -> None:
    model = wrapped("llama")
    vector = ip.steering_vector(model, *kinds(), by=by, **QUIET)
    assert vector.layers == [0, 1, 2]
    assert vector.by == by
    for layer in vector.layers:
        there, away = (values(model, tokens, layer) for tokens in kinds())
        assert (there.mean(0) - away.mean(0)).norm() > 0.3
        moved, apart = there.mean(0) - away.mean(0), there - away
        found = vector[layer].double()
        # However it was found, added once it moves the one mean to the other as far as it goes.
        assert float(found @ moved) == pytest.approx(float(found @ found), rel=1e-4)
        unit = found / found.norm()
        if by == "means":
            torch.testing.assert_close(found, moved, atol=1e-5, rtol=1e-4)
        elif by.startswith("pca"):
            apart = apart - apart.mean(0) if by == "pca_diff" else apart
            # No direction has more of the differences along it.
            most = torch.linalg.eigvalsh(apart.mT @ apart)[-1]
            assert float((apart @ unit).square().sum()) == pytest.approx(float(most), rel=1e-4)
        else:
            scores = torch.cat([there, away]) @ unit
            assert scores[:8].min() > scores[8:].max()
        spread = ((there @ unit).var() + (away @ unit).var()) / 2
        known = abs(float(moved @ unit)) / float(spread.sqrt())
        assert float(vector.separation[layer]) == pytest.approx(known, rel=1e-3)


def test_of_one_text_of_each_kind_nothing_is_known_of_their_spread() -> None:
    there, away = kinds()
    found = ip.steering_vector(wrapped("llama"), there[:1], away[:1], **QUIET)
    assert found.separation.isnan().all()
    assert found.directions.norm(dim=-1).min() > 0


def test_texts_of_any_length_give_what_each_gives_alone() -> None:
    """repeng masks padding on the left only; here nothing is padded."""
    model = talking()
    positive, negative = ["Hello there world", "Hello"], ["there world Hello world there", "world"]
    for pos in (-1, slice(None), slice(1, None)):
        found = ip.steering_vector(model, positive, negative, pos=pos, layer=[1], **QUIET)
        means = []
        for texts in (positive, negative):
            rows = [
                model.run_with_cache(t, names_filter=("resid_post", 1))[1]["resid_post", 1][0]
                for t in texts
            ]
            each = [row[pos].mean(0) if isinstance(pos, slice) else row[pos] for row in rows]
            means.append(torch.stack(each).mean(0))
        torch.testing.assert_close(found[1], means[0] - means[1], atol=1e-5, rtol=1e-4)


def test_it_is_made_of_a_store_as_of_the_texts(tmp_path: Path) -> None:
    model = wrapped("llama")
    stores = []
    for name, tokens in zip(("positive", "negative"), kinds()):
        stores.append(
            ip.harvest(model, tokens, ["blocks.1.hook_resid_post"], store=tmp_path / name, **QUIET)
        )
    opened = [ip.open_store(tmp_path / name) for name in ("positive", "negative")]
    found = ip.steering_vector(model, *opened, layer=1, **QUIET)
    live = ip.steering_vector(model, *kinds(), layer=1, **QUIET)
    torch.testing.assert_close(found.directions, live.directions, atol=1e-2, rtol=1e-2)
    assert found.directions.abs().max() > 0.1


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_adding_it_is_what_a_hook_of_torch_does_also_in_a_mixture_of_experts(kind: str) -> None:
    module, model, tokens = built(kind), wrapped(kind), ids()
    vector = 3.0 * ip.steering_vector(model, *kinds(), **QUIET)
    strengths = torch.tensor([0.0, 1.0, -2.0])  # another for each row

    def raw(layer: int) -> Any:
        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            added = strengths[:, None, None] * vector[layer]
            return (out[0] + added, *out[1:]) if isinstance(out, tuple) else out + added

        return hook

    handles = [block_of(module, layer).register_forward_hook(raw(layer)) for layer in (0, 2)]
    expected = module(tokens).logits
    for handle in handles:
        handle.remove()
    plain = module(tokens).logits
    found = model.run_with_hooks(tokens, hooks=[vector.add(strengths, layer=[0, 2])])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0], plain[0], atol=1e-4, rtol=1e-4)
    assert (found[1:] - plain[1:]).abs().amax((1, 2)).min() > 1e-2


def test_generated_tokens_are_steered_with_and_without_a_cache_and_padding_is_not_counted() -> None:
    """In other tools positions count from the current pass, so that with a cache no generated token is ever steered."""
    model = talking()
    vector = 6.0 * ip.steering_vector(wrapped("llama"), *kinds(), layer=1, **QUIET).unit()
    vector = dataclasses.replace(vector, model_type="")
    prompts = ["Hello there world Hello", "Hello"]  # the second is padded
    seen: list[tuple[int, int]] = []

    def by_hand(prompt: str, steps: int) -> list[int]:
        tokens = model.to_tokens(prompt)
        length = tokens.shape[1]

        def hook(value: Tensor, hook: Any) -> Tensor:
            value[:, length:] += vector[1]
            seen.append((length, value.shape[1]))
            return value

        for _ in range(steps):
            logits = model.run_with_hooks(tokens, hooks=[(("resid_post", 1), hook)])
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens[0, length:].tolist()

    edit = vector.add(layer=1, phase="generated")
    asked: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "return_type": "tokens",
        "eos_token_id": None,
    }
    expected = [by_hand(prompt, 6) for prompt in prompts]
    for cached in (True, False):
        with model.hooks([edit]):
            made = model.generate(prompts, use_cache=cached, **asked)
        assert made[:, -6:].tolist() == expected
    assert model.generate(prompts, **asked)[:, -6:].tolist() != expected
    with pytest.raises(ip.NeverFired), model.hooks([vector.add(layer=1, pos=40)]):
        model.generate(prompts, **asked)


def test_its_edits_do_what_they_are_called() -> None:
    model, tokens = wrapped("llama"), ids()
    vector = ip.steering_vector(model, *kinds(), layer=[1], **QUIET)
    unit = vector[1] / vector[1].norm()
    _, plain = model.run_with_cache(tokens, names_filter=("resid_post", 1))
    was = plain["resid_post", 1]

    def after(edit: ip.Edit) -> Tensor:
        _, cache = model.run_with_cache(tokens, names_filter=("resid_post", 1), hooks=[edit])
        return cache["resid_post", 1]

    dots = was @ unit
    close: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(after(vector.add(2.0)), was + 2 * vector[1], **close)
    torch.testing.assert_close(after(vector.scale(3.0)), was + 2 * dots[..., None] * unit, **close)
    assert (after(vector.project_out()) @ unit).abs().max() < 1e-4 < dots.abs().max()
    assert (after(vector.project_cap(high=0.0)) @ unit).max() < 1e-4
    turned = after(vector.add_keeping_norm(2.0))
    torch.testing.assert_close(turned.norm(dim=-1), was.norm(dim=-1), **close)
    bound = float(dots.median())
    some = after(vector.add(2.0, when=vector.fires(layer=1, above=bound)))
    fires = dots > bound
    assert torch.equal(some[~fires], was[~fires])
    torch.testing.assert_close(some[fires], (was + 2 * vector[1])[fires], **close)
    both = after(vector.add(2.0)) + after(vector.add(-2.0)) - 2 * was
    assert both.abs().max() < 1e-3


def test_arithmetic_is_layer_by_layer_and_only_of_the_same_places() -> None:
    one = ip.SteeringVector.of(
        {0: torch.tensor([1.0, 2.0]), 3: torch.tensor([0.0, 4.0])}, model_type="gpt2"
    )
    other = ip.SteeringVector.of({0: torch.tensor([1.0, 0.0]), 3: torch.tensor([0.0, 1.0])})
    mixed = (2 * one - other / 2) * -1
    assert mixed[0].tolist() == [-1.5, -4.0]
    assert mixed[3].tolist() == [0.0, -7.5]
    assert mixed.model_type == "gpt2"
    assert one.without(other)[0].tolist() == [0.0, 2.0]
    assert one.only(3).unit()[3].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="of different places: resid_post of layers"):
        one + other.only(0)
    with pytest.raises(ValueError, match="of different models: 'gpt2' and 'llama'"):
        one + dataclasses.replace(other, model_type="llama")
    with pytest.raises(TypeError):
        one + 1.0  # type: ignore[operator]


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_it_is_kept_to_the_last_bit_and_its_edits_with_it(ending: str, tmp_path: Path) -> None:
    model, tokens = wrapped("llama"), ids()
    vector = ip.steering_vector(model, *kinds(), by="pca", **QUIET)
    again = ip.SteeringVector.load(vector.save(tmp_path / f"x.{ending}"))
    assert torch.equal(again.directions, vector.directions)
    assert repr(again) == repr(vector)
    edit = vector.add(torch.tensor([1.0, 2.0, 0.5]), phase="prompt", layer=[0, 2])
    ip.save_edits(tmp_path / "edits", edit)
    tensors: dict[str, Tensor] = {}
    others = [
        ip.load_edits(tmp_path / "edits")[0],
        eval(edit.to_python(tensors), {"ip": ip, "torch": torch, "tensors": tensors}),
        again.add(torch.tensor([1.0, 2.0, 0.5]), phase="prompt", layer=[0, 2]),
    ]
    wanted = model.run_with_hooks(tokens, hooks=[edit])
    assert not torch.equal(wanted, model(tokens))
    for other in others:
        assert torch.equal(model.run_with_hooks(tokens, hooks=[other]), wanted)


def test_directions_come_from_probes_latents_and_one_head() -> None:
    model, tokens = wrapped("llama"), ids()
    texts, labels = torch.cat(kinds()), [0] * 8 + [1] * 8
    found = ip.probe(model, texts, labels, layer=1, folds=2, control=False, **QUIET).best
    vector = ip.SteeringVector.of(found.direction, layer=1, by="probe")
    assert torch.equal(vector[1], found.direction)
    sae = ip.StandardSAE(model.cfg.d_model, 8)
    row = ip.SteeringVector.of_latent(sae, 3, layer=1)
    torch.testing.assert_close(row[1], sae.W_dec[3].detach())
    with sae.attach(model, ("resid_post", 1)) as there:
        fires = ip.when(site=there.latents, neuron=3, above=1e9)
        never = model.run_with_hooks(tokens, hooks=[row.add(2.0, when=fires)])
        assert torch.equal(never, model(tokens))
        _, cache = model.run_with_cache(tokens, names_filter=there.latents)
        lively = int(cache[there.latents].flatten(0, 1).amax(0).argmax())
        codes = cache[there.latents][..., lively]
        bound = float(codes.median())
        chosen = ip.when(site=there.latents, neuron=lively, above=bound)
        _, after = model.run_with_cache(
            tokens, names_filter=("resid_post", 1), hooks=[row.add(2.0, when=chosen)]
        )
        _, was = model.run_with_cache(tokens, names_filter=("resid_post", 1))
        moved = (after["resid_post", 1] - was["resid_post", 1]).abs().amax(-1) > 0
        assert torch.equal(moved, codes > bound)
        assert 0 < moved.sum() < moved.numel()
    head = ip.steering_vector(model, *kinds(), site="z", head=1, layer=[1], **QUIET)
    _, cache = model.run_with_cache(tokens, names_filter=("z", 1), hooks=[head.add(3.0)])
    _, was = model.run_with_cache(tokens, names_filter=("z", 1))
    change = cache["z", 1] - was["z", 1]
    torch.testing.assert_close(
        change[:, :, 1], (3 * head[1]).expand_as(change[:, :, 1]), atol=1e-4, rtol=1e-4
    )
    assert change[:, :, 0].abs().max() == 0


def test_what_cannot_steer_is_refused() -> None:
    model = wrapped("llama")
    vector = ip.steering_vector(model, *kinds(), layer=1, **QUIET)
    with pytest.raises(ip.Unsupported, match="of a 'llama' model, and this one is 'gpt2'"):
        vector.must_be_of(wrapped("gpt2"))
    narrow = ip.SteeringVector.of(torch.ones(5), layer=1)
    with pytest.raises(ip.EditShapeError, match="has 5 units"):
        narrow.must_be_of(model)
    with pytest.raises(ip.EditShapeError):
        model.run_with_hooks(ids(), hooks=[narrow.add()])
    with pytest.raises(IndexError, match="layer 7 is not there"):
        ip.SteeringVector.of(torch.ones(model.cfg.d_model), layer=7).must_be_of(model)
    with pytest.raises(ValueError, match="NaN or infinity"):
        ip.SteeringVector.of(torch.full((model.cfg.d_model,), torch.nan), layer=1).add()
    with pytest.raises(ValueError, match="have the same mean"):
        ip.steering_vector(model, kinds()[0], kinds()[0], **QUIET)
    with pytest.raises(ValueError, match="takes pairs"):
        ip.steering_vector(model, kinds()[0], kinds()[1][:5], by="pca", **QUIET)
    with pytest.raises(ValueError, match="by is 'means'"):
        ip.steering_vector(model, *kinds(), by="umap", **QUIET)
    with pytest.raises(TypeError, match="site is the vector's own"):
        vector.add(site="mlp_out")
    with pytest.raises(KeyError, match="no direction of layer 2"):
        vector.add(layer=2)
