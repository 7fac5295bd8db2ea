"""Offloaded weights, as accelerate does it: each part's forward brings its own, and they are on meta in between."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

import interpose as ip
from interpose.models.transformer import TransformerModel
from tests.models import tiny

TOKENS = torch.tensor([[3, 4, 5, 6]])


def offloaded(module: Any, chosen: str = "") -> Any:
    """The module with its weights away, and forwards that bring them for as long as they run."""
    for path, part in list(module.named_modules()):
        kept = {n: p.detach().clone() for n, p in part._parameters.items() if p is not None}
        if not kept or chosen not in path:
            continue

        def put(part: Any, kept: Any, device: str) -> None:
            for name, value in kept.items():
                part._parameters[name] = nn.Parameter(value.to(device), requires_grad=False)

        def forward(part: Any, *args: Any, _old: Any, _kept: Any, **kwargs: Any) -> Any:
            put(part, _kept, "cpu")
            try:
                return _old(*args, **kwargs)
            finally:
                put(part, _kept, "meta")

        new = functools.partial(forward, part, _old=part.forward, _kept=kept)
        part._old_forward = part.forward
        part._hf_hook = types.SimpleNamespace(execution_device="cpu")
        part.forward = functools.update_wrapper(new, part.forward)
        put(part, kept, "meta")
    return module


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("chosen", ["", "1"])
def test_offloaded_models_run_and_have_module_paths(name: str, chosen: str) -> None:
    bare = TransformerModel(tiny.build(name, layers=2))
    model = TransformerModel(offloaded(tiny.build(name, layers=2), chosen))
    assert model.device == torch.device("cpu")
    assert torch.equal(model(TOKENS), bare(TOKENS))
    path = next(p for p, part in model.module.named_modules() if p.endswith("1") and "." in p)
    silent = [ip.zero(path, at=(slice(None), 0))]
    _, cache = model.run_with_cache(TOKENS, names_filter=path)
    _, expected = bare.run_with_cache(TOKENS, names_filter=path)
    assert torch.equal(cache[next(iter(cache))], expected[next(iter(expected))])
    edited = model.run_with_hooks(TOKENS, hooks=silent)
    assert torch.equal(edited, bare.run_with_hooks(TOKENS, hooks=silent))
    assert not torch.equal(edited, bare(TOKENS))


@pytest.mark.parametrize("chosen", ["", "1"])
def test_semantic_sites_of_offloaded_models_say_what_to_do(chosen: str) -> None:
    model = TransformerModel(offloaded(tiny.build("llama", layers=2), chosen))
    for ask in (
        lambda: model.sites,
        lambda: model.run_with_cache(TOKENS),
        lambda: model.check(),
        lambda: ip.logit_lens(model, TOKENS, progress=False),
    ):
        with pytest.raises(ip.Unsupported, match="weights of LlamaForCausalLM are offloaded"):
            repr(ask())


def test_a_model_without_any_weights_is_told_to_load_them() -> None:
    model = TransformerModel(tiny.build("llama", layers=1).to("meta"))
    with pytest.raises(ip.Unsupported, match="Load its weights first"):
        len(model.sites)
