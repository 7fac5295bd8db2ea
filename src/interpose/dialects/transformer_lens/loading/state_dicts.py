"""State dicts of loaded models under TransformerLens's names, which courses load into models of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from interpose.errors import Unsupported
from interpose.models.transformer import TransformerModel
from interpose.models.weights.readonly import writable
from interpose.models.weights.views import block_weights, end_weights


class StateDicts(TransformerModel):
    """The part of a `HookedTransformer` that lists its weights, and takes other ones."""

    _as_transformers = False
    """Whether state dicts have the names of transformers."""

    def tl_parameters(self) -> dict[str, Tensor]:
        """Every weight by TransformerLens's name and in its shape: ``blocks.0.attn.W_Q``. Read-only views."""
        found: dict[str, Tensor] = {}
        parts = ("embed", "pos_embed", "ln_final", "unembed")
        for name, getter in end_weights(self.anatomy, lambda: self.cfg.n_ctx).items():
            if name.startswith(parts):
                found[name] = getter()
        for tower in self.anatomy.towers:
            for block in tower.blocks:
                for name, getter in block_weights(block).items():
                    found[f"{tower.prefix}blocks.{block.index}.{name}"] = getter()
        return found

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The items of `tl_parameters`."""
        return iter(self.tl_parameters().items())

    get_params = tl_parameters

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Weights by TransformerLens's names, with its masks; with arguments, the module's own state dict."""
        if self._as_transformers or args or kwargs:
            found: dict[str, Any] = self.module.state_dict(*args, **kwargs)
            return found
        try:
            weights = self.tl_parameters()
        except Unsupported as error:
            raise Unsupported(
                f"{error}\n  So there is no state dict under TransformerLens's names: model.module.state_dict() has "
                "the module's own."
            ) from None
        return with_masks({name: writable(value) for name, value in weights.items()}, self.cfg)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights under TransformerLens's names, or under the module's own."""
        if self._as_transformers or "embed.W_E" not in state_dict:
            return self.module.load_state_dict(state_dict, *args, **kwargs)
        read(self.tl_parameters, state_dict)
        return _IncompatibleKeys([], [])  # as torch says that all keys matched


def with_masks(state: dict[str, Tensor], cfg: Any) -> dict[str, Tensor]:
    """A state dict with the buffers that TransformerLens writes, and its users delete or load elsewhere.

    Args:
        state: the state dict, which is added to.
        cfg: the model's config.
    """
    if cfg.n_ctx is None:
        return state
    mask = torch.ones(cfg.n_ctx, cfg.n_ctx, dtype=torch.bool, device=cfg.device)
    mask = mask.tril() if cfg.attention_dir == "causal" else mask
    for layer in range(cfg.n_layers):
        state[f"blocks.{layer}.attn.mask"] = mask
        state[f"blocks.{layer}.attn.IGNORE"] = torch.tensor(-torch.inf, device=cfg.device)
    return state


@torch.no_grad()
def read(views: Callable[[], dict[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write a state dict under TransformerLens's names into a model's own parameters.

    Args:
        views: gives the model's, by the same names, as views of its parameters.
        state: the new ones. Masks and rotary tables are left out.
    """
    buffers = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")
    given = {name: value for name, value in state.items() if not name.endswith(buffers)}
    weights = {name: writable(value) for name, value in views().items()}
    if missing := sorted(given.keys() ^ weights.keys()):
        raise ValueError(
            f"a state dict under TransformerLens's names must have each weight once; not in both: {missing[:6]}."
        )
    for name, value in given.items():
        if value.shape != weights[name].shape:
            raise ValueError(
                f"{name!r} is {list(value.shape)} in the state dict, and {list(weights[name].shape)} in the model."
            )
        weights[name].copy_(value)
    for name, now in views().items():
        if not torch.equal(now, given[name].to(now)):
            raise Unsupported(
                f"{name!r} cannot be loaded: the module has no parameter of its own for it (a bias that its class "
                "does not have, or embeddings that are one with the unembedding)."
            )
