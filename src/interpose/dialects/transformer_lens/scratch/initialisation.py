"""Initial weights, by the modes that a config names. Biases begin at zero, norms at one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.utilities.initialisation import fans


@torch.no_grad()
def draw(module: nn.Module, cfg: HookedTransformerConfig) -> None:
    """Draw every weight matrix of a module, in order: with the config's seed always the same.

    Args:
        module: whose parameters called ``W_...`` are drawn.
        cfg: ``init_mode``, ``initializer_range`` and ``seed`` count.
    """
    generator = None if cfg.seed is None else torch.Generator("cpu").manual_seed(int(cfg.seed))
    for name, weight in module.named_parameters():
        if "W_" in name or name.endswith("rel_pos_bias.weight"):
            drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")  # as its seed
            _fill(drawn, name, cfg, generator)
            weight.copy_(drawn)


def _fill(
    weight: Tensor, name: str, cfg: HookedTransformerConfig, generator: torch.Generator | None
) -> None:
    mode, gain = cfg.init_mode, cfg.initializer_range
    fan_in, fan_out = fans(weight)
    if mode == "gpt2":
        spread = gain
    elif mode.startswith("xavier"):
        spread = gain * math.sqrt(2 / (fan_in + fan_out))
    elif mode.startswith("kaiming"):
        spread = gain * math.sqrt(2 / fan_in)
    elif "unembed" in name:
        spread = 1 / fan_in
    else:
        spread = 1.0 if "embed" in name else fan_in**-0.5
    if mode.endswith("uniform"):
        bound = spread * math.sqrt(3)
        weight.uniform_(-bound, bound, generator=generator)
    else:
        weight.normal_(std=spread, generator=generator)
