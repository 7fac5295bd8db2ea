"""`HookedTransformerConfig`: what a model is like, as the plan of a new one or as the description of a loaded one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from interpose.dialects.transformer_lens.utilities.activations import ACTIVATIONS
from interpose.dialects.transformer_lens.utilities.devices import get_device
from interpose.errors import Unsupported
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

_CHOICES: dict[str, tuple[Any, ...]] = {
    "normalization_type": ("LN", "LNPre", "RMS", "RMSPre", None),
    "positional_embedding_type": (
        "standard",
        "rotary",
        "shortformer",
        "alibi",
        "relative_positional_bias",
        "none",
    ),
    "attention_dir": ("causal", "bidirectional"),
    "init_mode": (
        "gpt2",
        "xavier_uniform",
        "xavier_normal",
        "kaiming_uniform",
        "kaiming_normal",
        "muP",
    ),
}


@dataclass(kw_only=False, repr=False)
class HookedTransformerConfig:
    """The sizes and habits of a model: ``HookedTransformer(HookedTransformerConfig(n_layers=1, ...))``.

    The names and defaults are TransformerLens's. -1 and None stand for the usual: ``n_heads`` for ``d_model //
    d_head``, ``d_mlp`` for ``4 * d_model``, ``attn_scale`` for the root of ``d_head``, ``d_vocab`` for what the
    tokenizer has.
    """

    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int
    model_name: str | None = "custom"
    n_heads: int = -1
    d_mlp: int | None = None
    act_fn: str | None = None
    """``relu``, ``gelu``, ``gelu_new``, ``gelu_fast``, ``gelu_pytorch_tanh``, ``silu``, ``solu``, or ``solu_ln``."""
    d_vocab: int = -1
    eps: float = 1e-5
    use_attn_result: bool = False
    use_attn_scale: bool = True
    attn_scale: float = -1.0
    """What scores are divided by."""
    use_split_qkv_input: bool = False
    use_hook_mlp_in: bool = False
    use_attn_in: bool = False
    use_qk_norm: bool = False
    use_local_attn: bool = False
    """Layers of which ``attn_types`` says ``local`` look back ``window_size`` positions, their own included."""
    ungroup_grouped_query_attention: bool = False
    original_architecture: str | None = None
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
    tokenizer_name: str | None = None
    window_size: int | None = None
    attn_types: list[str] | None = None
    init_mode: str = "gpt2"
    normalization_type: str | None = "LN"
    """``LN`` or ``RMS``; with ``Pre`` behind it for one without weights, as folding leaves it; None for none at all."""
    device: Any = None
    n_devices: int = 1
    attention_dir: str = "causal"
    attn_only: bool = False
    seed: int | None = None
    """Of the initial weights. The program's own random numbers are left alone."""
    initializer_range: float = -1.0
    """With ``gpt2`` the standard deviation, by default 0.8 / sqrt(d_model); else a gain, by default 1."""
    init_weights: bool = True
    """False leaves the weights as memory has them, for a state dict that is to be loaded."""
    scale_attn_by_inverse_layer_idx: bool = False
    positional_embedding_type: str = "standard"
    """How positions come in: added to the stream (``standard``), to what queries and keys read (``shortformer``),
    by turning queries and keys (``rotary``), on the scores (``alibi``, ``relative_positional_bias``), or not."""
    final_rms: bool = False
    d_vocab_out: int = -1
    parallel_attn_mlp: bool = False
    rotary_dim: int | None = None
    n_params: int | None = None
    use_hook_tokens: bool = False
    gated_mlp: bool = False
    default_prepend_bos: bool | None = True
    dtype: Any = torch.float32
    tokenizer_prepends_bos: bool | None = None
    n_key_value_heads: int | None = None
    post_embedding_ln: bool = False
    rotary_base: float = 10000
    trust_remote_code: bool = False
    rotary_adjacent_pairs: bool = False
    load_in_4bit: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None
    relative_attention_max_distance: int | None = None
    relative_attention_num_buckets: int | None = None
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_normalization_before_and_after: bool = False
    attn_scores_soft_cap: float = -1.0
    output_logits_soft_cap: float = -1.0
    use_NTK_by_parts_rope: bool = False
    NTK_by_parts_low_freq_factor: float = 1.0
    NTK_by_parts_high_freq_factor: float = 4.0
    NTK_by_parts_factor: float = 8.0
    NTK_original_ctx_len: int = 8192
    uses_rms_norm: bool = False
    layer_norm_folding: bool = False
    rotary_base_local: float | None = None
    rotary_scaling_factor: float = 1.0
    use_yarn_rope: bool = False
    yarn_factor: float = 1.0
    yarn_attention_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        self._fill_in()
        self._check()

    def _fill_in(self) -> None:
        """Put the usual where nothing was said."""
        if self.n_heads == -1:
            self.n_heads = self.d_model // self.d_head
        if self.d_mlp is None and not self.attn_only:
            self.d_mlp = 4 * self.d_model
        if self.initializer_range < 0:
            self.initializer_range = 0.8 / self.d_model**0.5 if self.init_mode == "gpt2" else 1.0
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.positional_embedding_type == "rotary" and self.rotary_dim is None:
            self.rotary_dim = self.d_head
        if self.use_attn_scale and self.attn_scale == -1.0:
            self.attn_scale = self.d_head**0.5
        if isinstance(self.dtype, str):
            self.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        self.device = torch.device(get_device() if self.device is None else self.device)
        self.n_params = self._parameters_of_blocks()

    def _parameters_of_blocks(self) -> int:
        """How many there are in the maps of all blocks, without biases and norms."""
        maps = 4 * self.d_head * self.n_heads
        if not self.attn_only and self.d_mlp is not None:
            maps += self.d_mlp * (3 if self.gated_mlp else 2)
        return self.n_layers * self.d_model * maps

    def _check(self) -> None:
        """Refuse what contradicts itself, and what cannot be built."""
        sizes = {"d_model": 1, "d_head": 1, "n_ctx": 1, "n_heads": 1, "n_layers": 0}
        for name, least in sizes.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}; got {getattr(self, name)}.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {choices}; got {getattr(self, name)!r}")
        if not self.attn_only and self.act_fn not in ACTIVATIONS:
            raise ValueError(
                f"act_fn is one of {', '.join(ACTIVATIONS)}, unless attn_only=True; got {self.act_fn!r}"
            )
        if self.gated_mlp and self.is_layer_norm_activation():
            raise ValueError(
                "a gated MLP has no norm inside: act_fn='solu_ln' needs gated_mlp=False."
            )
        shared = self.n_key_value_heads
        if shared is not None and (shared < 1 or self.n_heads % shared):
            raise ValueError(
                f"{self.n_heads} heads cannot share {self.n_key_value_heads} keys and values evenly."
            )
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.d_head):
            raise ValueError(f"rotary_dim is even, and at most d_head; got {self.rotary_dim}.")
        self._check_positions()
        unsupported = {
            "num_experts": "mixtures of experts",
            "load_in_4bit": "quantised weights",
            "tie_word_embeddings": "tied embeddings",
            "use_yarn_rope": "positions turned as YaRN does",
            "rotary_base_local": "positions turned otherwise in local layers",
        }
        for name, what in unsupported.items():
            if getattr(self, name):
                raise Unsupported(
                    f"{name}: models from scratch have no {what}; load one of transformers."
                )
        if self.n_devices > 1:
            raise Unsupported("n_devices: a model from scratch is on one device.")

    def _check_positions(self) -> None:
        if self.use_local_attn:
            if self.window_size is None or self.attn_types is None:
                raise ValueError("use_local_attn needs window_size and attn_types.")
            if len(self.attn_types) != self.n_layers or set(self.attn_types) - {"global", "local"}:
                raise ValueError(
                    f"attn_types says 'global' or 'local' for each of {self.n_layers} layers; got {self.attn_types}"
                )
        if self.positional_embedding_type == "relative_positional_bias":
            count, farthest = (
                self.relative_attention_num_buckets or 0,
                self.relative_attention_max_distance or 0,
            )
            if count < 4 or farthest <= count // 2:
                raise ValueError(
                    "relative_positional_bias needs relative_attention_num_buckets, at least 4, and a "
                    f"relative_attention_max_distance of more than half of them; got {count} and {farthest}."
                )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> HookedTransformerConfig:
        """A config from its fields."""
        return cls(**config_dict)

    @classmethod
    def unwrap(cls, config: dict[str, Any] | HookedTransformerConfig) -> HookedTransformerConfig:
        """A config, made from a dict if it is one."""
        return cls.from_dict(config) if isinstance(config, dict) else config

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def is_layer_norm_activation(self) -> bool:
        """Whether neurons go through a norm after their activation."""
        return self.act_fn is not None and self.act_fn.endswith("_ln")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copying, pickling and notebooks
            raise AttributeError(name)
        raise AttributeError(
            f"the config has no {name!r}. It has: {', '.join(sorted(vars(self)))}."
        )

    @property
    def flagged(self) -> tuple[str, ...]:
        """The ends of the names of sites that flags make part of "everything"."""
        return tuple(end for flag, ends in FLAGS.items() if getattr(self, flag) for end in ends)

    def __repr__(self) -> str:
        shown = "\n".join(f"  {name}={value!r}" for name, value in sorted(self.to_dict().items()))
        return f"HookedTransformerConfig(\n{shown}\n)"


class LoadedConfig(HookedTransformerConfig):
    """The description of a model that is loaded: its sizes are read from it, device and dtype are those of now."""

    def __init__(self, model: TransformerModel, *, default_prepend_bos: bool | None = None) -> None:
        known = describe(model)
        tower = model.anatomy.towers[0] if model.anatomy.towers else None
        norms = {name for block in tower.blocks for name in block.norms} if tower else set()
        causal = getattr(model.root, "can_generate", lambda: True)()
        defaults = {field.name: field.default for field in fields(HookedTransformerConfig)}
        vars(self).update(defaults | asdict(known))
        del vars(self)["device"], vars(self)["dtype"]
        self._model = model
        self.default_prepend_bos = default_prepend_bos
        self.attn_scale = known.d_head**0.5 if known.d_head else None  # type: ignore[assignment]
        self.use_normalization_before_and_after = {"ln1", "ln1_post"} <= norms
        of_module = getattr(model.root, "config", None)
        self.decoder_start_token_id = getattr(of_module, "decoder_start_token_id", None)
        self.attention_dir = "causal" if causal else "bidirectional"
        if known.d_mlp is not None:
            self.n_params = self._parameters_of_blocks()
        if "fold_ln" in getattr(model, "_processed", ()) and known.normalization_type:
            self.normalization_type = f"{known.normalization_type}Pre"

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
        return {**super().to_dict(), "device": self.device, "dtype": self.dtype}
