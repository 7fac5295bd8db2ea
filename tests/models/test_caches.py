"""Caches of transformers leave the model behind: pickled, saved and copied, they keep every name of their sites."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.models.transformer import TransformerModel
from tests.models import tiny


def through_torch(cache: ip.Cache) -> ip.Cache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file)  # weights only: it is nothing but data


def through_pickle(cache: ip.Cache) -> ip.Cache:
    return pickle.loads(pickle.dumps(cache))


WAYS = [through_torch, through_pickle, copy.deepcopy, copy.copy]


def model_of(name: str = "llama", kind: str = "causal") -> Any:
    return TransformerModel(tiny.build(name, kind, layers=2))


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_knows_every_name_and_not_the_model(way: Callable[[Any], Any]) -> None:
    model = model_of()
    tokens = torch.tensor([[3, 4, 5]])
    _, cache = model.run_with_cache(tokens)
    path = model.sites["blocks.1.hook_resid_post"].aliases[0]
    weak = weakref.ref(model.module)
    kept = way(cache)
    del model, cache
    gc.collect()
    assert weak() is None  # neither the cache nor its copy keeps it alive
    expected = kept["blocks.1.hook_resid_post"]
    for name in (
        ("resid_post", 1),
        ("resid_post", -1),
        "blocks.1.hook_out",
        "blocks.-1.hook_out",
        path,
    ):
        assert torch.equal(kept[name], expected), name
        assert name in kept
    with pytest.raises(ip.SiteNotFound, match="The model has layers 0 to 1"):
        kept["resid_post", 2]
    with pytest.raises(ip.SiteNotFound, match=r"kept only when named: .*\('result', 1\)"):
        kept["result", 1]


@pytest.mark.parametrize("way", WAYS[:3])
def test_a_copy_has_the_numbers_and_shares_no_memory(way: Callable[[Any], Any]) -> None:
    _, cache = model_of().run_with_cache(torch.tensor([[3, 4, 5]]))
    kept = way(cache)
    assert list(kept) == list(cache)
    assert all(torch.equal(kept[name], cache[name]) for name in cache)
    assert all(kept[name].data_ptr() != cache[name].data_ptr() for name in cache)


def test_a_file_has_short_names_too(tmp_path: Any) -> None:
    _, cache = model_of().run_with_cache(torch.tensor([[3, 4, 5]]))
    cache.save(tmp_path / "x.safetensors")
    kept = ip.Cache.load(tmp_path / "x.safetensors")
    assert torch.equal(kept["resid_post", -1], cache["resid_post", 1])
    with pytest.raises(ip.SiteNotFound, match="The model has layers 0 to 1"):
        kept["resid_post", 2]


def test_a_copy_of_values_that_were_kept_without_copies_is_not_stale() -> None:
    model = ip.wrap(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(inplace=True)))
    _, cache = model.run_with_cache(torch.randn(2, 3), clone=False)
    with pytest.raises(ip.StaleValue):
        pickle.dumps(cache)  # its first value is not what it was
    _, cache = model.run_with_cache(torch.randn(2, 3), names_filter="1", clone=False)
    cache["1"].add_(0)
    with pytest.raises(ip.StaleValue):
        copy.deepcopy(cache)
    _, cache = model.run_with_cache(torch.randn(2, 3), names_filter="1", clone=False)
    assert torch.equal(copy.deepcopy(cache)["1"], cache["1"])


def test_an_encoder_decoders_copy_means_its_decoder() -> None:
    model = model_of("t5", "encoder_decoder")
    given = tiny.inputs(model.module)
    _, cache = model.run_with_cache(**given)
    kept = through_pickle(cache)
    assert torch.equal(kept["blocks.0.hook_resid_post"], cache["decoder.blocks.0.hook_resid_post"])


def test_a_recording_is_as_free_of_the_model() -> None:
    model = model_of()
    with model.record("blocks.*.hook_resid_post") as cache:
        model(torch.tensor([[3, 4, 5]]))
    assert torch.equal(through_pickle(cache)["resid_post", -1], cache["resid_post", 1])
