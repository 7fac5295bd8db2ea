"""`HookedTransformerConfig`: a model's sizes and habits, with the flags that TransformerLens keeps there."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from interpose.models.weights.config import describe

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

FLAGS = {
    "use_attn_result": ("attn.hook_result",),
    "use_split_qkv_input": ("hook_q_input", "hook_k_input", "hook_v_input"),
    "use_attn_in": ("hook_attn_in",),
    "use_hook_mlp_in": ("hook_mlp_in",),
}
"""Flags, and the sites that each makes part of "everything". They can be hooked by name without it."""


class HookedTransformerConfig:
    """What a model is like, as attributes: ``cfg.n_layers``, ``cfg.d_model``, ``cfg.use_attn_result``."""

    def __init__(
        self,
        model: TransformerModel | None = None,
        *,
        default_prepend_bos: bool | None = None,
        **fields: Any,
    ) -> None:
        if model is None or fields:
            raise NotImplementedError(
                "models from scratch are not there yet: a config describes a model that is loaded. Build one with "
                "transformers (GPT2Config, LlamaConfig) and give it as hf_model, or ip.wrap your own module."
            )
        known = describe(model)
        tower = model.anatomy.towers[0] if model.anatomy.towers else None
        norms = {name for block in tower.blocks for name in block.norms} if tower else set()
        vars(self).update(asdict(known))
        self._model = model
        self.default_prepend_bos = default_prepend_bos
        self.attn_scale = known.d_head**0.5 if known.d_head else None
        self.use_attn_scale = True
        self.use_normalization_before_and_after = {"ln1", "ln1_post"} <= norms
        causal = getattr(model.root, "can_generate", lambda: True)()
        self.attention_dir = "causal" if causal else "bidirectional"
        self.n_params = known.n_params
        self.seed = None
        self.use_attn_result = False
        self.use_split_qkv_input = False
        self.use_attn_in = False
        self.use_hook_mlp_in = False
        self.ungroup_grouped_query_attention = False

    def __getattr__(self, name: str) -> Any:  # for type checkers: fields come from the model
        raise AttributeError(
            f"the config has no {name!r}. It has: {', '.join(sorted(vars(self)))}."
        )

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights now."""
        return next(self._model.module.parameters()).dtype

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**shown, "device": self.device, "dtype": self.dtype}

    @property
    def flagged(self) -> tuple[str, ...]:
        """The ends of the names of sites that flags make part of "everything"."""
        return tuple(end for flag, ends in FLAGS.items() if getattr(self, flag) for end in ends)

    def __repr__(self) -> str:
        shown = "\n".join(f"  {name}={value!r}" for name, value in sorted(self.to_dict().items()))
        return f"HookedTransformerConfig(\n{shown}\n)"
