"""What is said of an autoencoder, against the same computed text by text with raw torch."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from tests.bounds import assert_near
from tests.models import tiny
from tests.sae.oracles import codes_of, made, output_of
from training import agreement, facts, opinions, stories

TEXTS = [[3 + (5 * row + place) % 40 for place in range(1 + (3 * row) % 7)] for row in range(12)]
SITE = "blocks.0.hook_resid_post"
QUIET: dict[str, Any] = {"progress": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return ip.wrap(tiny.build("gpt2"))


def sae_for(model: Any, kind: str = "JumpReLUSAE", **options: Any) -> Any:
    return made(kind, model.cfg.d_model, 24, about={"hook_name": SITE}, **options)


def block(model: Any) -> torch.nn.Module:
    found: torch.nn.Module = model.module.get_submodule("transformer.h.0")
    return found


def raw(model: Any, row: list[int], change: Any = None) -> tuple[Tensor, Tensor]:
    """The value at the site and the logits of one text alone, with torch's own hooks."""
    seen = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        seen.append(value.detach().clone())
        if change is None:
            return None
        new = change(value)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    handle = block(model).register_forward_hook(hook)
    try:
        with torch.no_grad():
            logits = model.module(torch.tensor([row])).logits[0]
    finally:
        handle.remove()
    return seen[0][0], logits


def loss_of(logits: Tensor, row: list[int], first: int) -> list[float]:
    """Of each prediction from a position on."""
    logs = logits.double().log_softmax(-1)
    return [-float(logs[place, row[place + 1]]) for place in range(first, len(row) - 1)]


@pytest.mark.parametrize("first", [0, 1])
def test_every_number_is_what_it_says(model: Any, first: int) -> None:
    sae = sae_for(model)
    found = ip.evaluate_sae(
        TEXTS, sae, model=model, pos=slice(first, None), batch_size=3, prepend_bos=False, **QUIET
    )
    values = torch.cat([raw(model, row)[0][first:] for row in TEXTS])
    codes = codes_of(sae, values)
    out = output_of(sae, codes, values)
    assert 0 < (codes != 0).float().mean() < 1
    near = {
        "explained_variance": 1
        - (out - values).square().sum() / (values - values.mean(0)).square().sum(),
        "mse": (out - values).square().sum(-1).mean(),
        "cosine": torch.nn.functional.cosine_similarity(out, values, dim=-1).mean(),
        "norm_ratio": (out.norm(dim=-1) / values.norm(dim=-1)).mean(),
        "bias": out.square().sum() / (out * values).sum(),
        "l0": (codes != 0).sum(-1).float().mean(),
        "l1": codes.abs().sum(-1).mean(),
        "dead": ((codes != 0).sum(0) == 0).float().mean(),
    }
    for name, number in near.items():
        assert_near(found[name], number, 10.0)
    assert_near(found.density, (codes != 0).double().mean(0))
    assert sum(found.histogram().values()) == 24

    mean = values.mean(0)

    def changed(new: Any) -> list[Tensor]:
        def change(value: Tensor) -> Tensor:
            return torch.cat([value[:, :first], new(value[:, first:])], dim=1)

        return [raw(model, row, change)[1] for row in TEXTS]

    ways = {
        "loss": [raw(model, row)[1] for row in TEXTS],
        "loss_replaced": changed(lambda x: output_of(sae, codes_of(sae, x[0]), x[0])[None]),
        "loss_zero": changed(torch.zeros_like),
        "loss_mean": changed(lambda x: mean.expand_as(x)),
    }
    losses = {
        name: [one for logits, row in zip(all_, TEXTS) for one in loss_of(logits, row, first)]
        for name, all_ in ways.items()
    }
    for name, each in losses.items():
        assert_near(found[name], sum(each) / len(each), 10.0)
    mine = {name: sum(each) / len(each) for name, each in losses.items()}
    assert abs(mine["loss_zero"] - mine["loss"]) > 1e-3  # else the next says nothing
    wanted = (mine["loss_zero"] - mine["loss_replaced"]) / (mine["loss_zero"] - mine["loss"])
    assert found["recovered"] == pytest.approx(wanted, rel=1e-2)
    for name, way in (("kl", "loss_replaced"), ("kl_zero", "loss_zero")):
        far = []
        for clean, other, row in zip(ways["loss"], ways[way], TEXTS):
            for place in range(first, len(row) - 1):
                logs = [one[place].double().log_softmax(-1) for one in (clean, other)]
                far.append(float((logs[0].exp() * (logs[0] - logs[1])).sum()))
        assert_near(found[name], sum(far) / len(far), 10.0)
    assert found.protocol["predictions"] == len(losses["loss"])
    assert found.protocol["vectors"] == len(values)


def test_padding_texts_one_by_one_stores_and_vectors_give_the_same(
    model: Any, tmp_path: Path
) -> None:
    sae = sae_for(model)
    sae.about["seqpos_slice"] = [1, None]
    whole = ip.evaluate_sae(TEXTS, sae, model=model, prepend_bos=False, **QUIET)
    assert whole.protocol["positions"] == "1:"
    single = ip.evaluate_sae(TEXTS, sae, model=model, prepend_bos=False, batch_size=1, **QUIET)
    store = ip.harvest(model, TEXTS, SITE, store=tmp_path / "s", prepend_bos=False, progress=False)
    stored = ip.evaluate_sae(store, sae, model=model, **QUIET)
    vectors = ip.evaluate_sae(store, sae, **QUIET)
    there = sae.attach(model)
    attached = ip.evaluate_sae(TEXTS, there, prepend_bos=False, **QUIET)
    there.detach()
    for other in (single, stored, vectors, attached):
        for name, number in other.numbers.items():
            assert_near(number, whole[name], 10.0)
    assert "loss" not in vectors.numbers
    assert set(stored.numbers) == set(whole.numbers)


def test_an_autoencoder_that_keeps_everything_recovers_everything(model: Any) -> None:
    width = model.cfg.d_model
    sae = ip.StandardSAE(width, 2 * width, about={"hook_name": SITE})
    with torch.no_grad():
        eye = torch.eye(width)
        sae.W_dec.copy_(torch.cat([eye, -eye]))
        sae.W_enc.copy_(torch.cat([eye, -eye]).T)
    found = ip.evaluate_sae(TEXTS, sae, model=model, prepend_bos=False, **QUIET)
    for name in ("explained_variance", "cosine", "norm_ratio", "bias", "recovered"):
        assert found[name] == pytest.approx(1, abs=1e-4), name
    assert_near(found["kl"], 0.0, 1.0)


def test_a_transcoder_is_measured_where_it_writes(model: Any) -> None:
    width = model.cfg.d_model
    sae = made("TopKSAE", width, 24, d_out=width, skip=True)
    sae.about |= {
        "hook_name": "blocks.0.ln2.hook_normalized",
        "hook_name_out": "blocks.0.hook_mlp_out",
    }
    found = ip.evaluate_sae(TEXTS, sae, model=model, prepend_bos=False, **QUIET)
    given, wanted = [], []
    for row in TEXTS:
        _, cache = model.run_with_cache(torch.tensor([row]), prepend_bos=False)
        given.append(cache["blocks.0.ln2.hook_normalized"][0])
        wanted.append(cache["blocks.0.hook_mlp_out"][0])
    x, y = torch.cat(given), torch.cat(wanted)
    out = output_of(sae, codes_of(sae, x), x)
    assert_near(found["mse"], (out - y).square().sum(-1).mean(), 10.0)
    assert found["loss_replaced"] != found["loss"]


def test_the_autoencoder_that_comes_along_explains_the_middle_of_the_pocket_model() -> None:
    model, sae = ip.load("pocket", device="cpu"), ip.SAE.from_pretrained("pocket")
    draw = Random("autoencoder")
    texts = [kind.document(draw) for kind in (agreement, facts, opinions, stories) * 6]
    found = ip.evaluate_sae(texts, sae.attach(model), **QUIET)
    assert found.protocol["positions"] == "1:"
    assert found["l0"] < model.cfg.d_model / 8
    assert found["explained_variance"] > 0.9
    assert found["recovered"] > 0.9
