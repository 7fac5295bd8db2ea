"""Small models, and edits made on them by raw torch hooks, which know nothing of interpose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import interpose as ip
from tests.models import tiny
from tests.models.texts import speaking

LAYERS = 3


@functools.cache
def built(kind: str) -> Any:
    torch.manual_seed(0)
    return tiny.build(kind, layers=LAYERS).eval()


@functools.cache
def wrapped(kind: str) -> Any:
    return ip.wrap(built(kind))


@functools.cache
def talking(kind: str = "llama") -> Any:
    """A tiny model that reads text."""
    torch.manual_seed(0)
    return speaking(kind, layers=LAYERS)


def ids(rows: int = 3, length: int = 6) -> Tensor:
    drawn = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(1))
    assert len(drawn.unique(dim=0)) == rows
    return drawn


def block_of(module: nn.Module, layer: int) -> nn.Module:
    return module.get_submodule(
        f"transformer.h.{layer}" if hasattr(module, "transformer") else f"model.layers.{layer}"
    )


def projection_of(module: nn.Module, layer: int) -> nn.Module:
    name = "attn.c_proj" if hasattr(module, "transformer") else "self_attn.o_proj"
    return block_of(module, layer).get_submodule(name)


def heads_of(module: Any) -> int:
    return int(module.config.num_attention_heads)


def by_hand(
    module: nn.Module, site: str, layer: int, change: Callable[[Tensor], Tensor], **given: Any
) -> Tensor:
    """Logits with a value changed by a raw hook: ``resid_post``, or ``z`` [batch, pos, head, d_head]."""
    if site == "resid_post":

        def after(_: Any, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (change(output[0]), *output[1:])
            return change(output)

        handle = block_of(module, layer).register_forward_hook(after)
    else:
        heads = heads_of(module)

        def before(_: Any, args: Any) -> Any:
            value = args[0].reshape(*args[0].shape[:2], heads, -1)
            return (change(value).reshape(args[0].shape), *args[1:])

        handle = projection_of(module, layer).register_forward_pre_hook(before)
    try:
        return module(**given, use_cache=False).logits
    finally:
        handle.remove()


def gradient(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """The gradient of the embeddings, of a loss that every logit takes part in."""
    weight = module.get_input_embeddings().weight
    weight.requires_grad_(True)
    logits = run()
    ramp = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
    (found,) = torch.autograd.grad((logits * ramp).sum() + logits.square().mean(), weight)
    return found
