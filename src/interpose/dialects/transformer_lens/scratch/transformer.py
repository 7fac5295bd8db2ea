"""`Transformer`: the module behind ``HookedTransformer(HookedTransformerConfig(...))``.

Its parameters have TransformerLens's names and shapes. At every named place stands a `Point`, so what can be hooked
follows from the module itself, and nothing is found out by a probe.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.scratch import initialisation, old_state_dicts
from interpose.dialects.transformer_lens.scratch.attention import Attention, Context
from interpose.dialects.transformer_lens.scratch.mlp import MLP
from interpose.dialects.transformer_lens.scratch.norms import Norm, make_norm
from interpose.dialects.transformer_lens.scratch.points import Point
from interpose.dialects.transformer_lens.utilities.tensors import get_offset_position_ids


class Embed(nn.Module):
    """Token embeddings."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model, dtype=cfg.dtype))
        if cfg.post_embedding_ln:
            self.ln = make_norm(cfg, kind="LN")

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, pos, d_model]."""
        found = self.W_E[tokens]
        return self.ln(found) if hasattr(self, "ln") else found


class PosEmbed(nn.Module):
    """Position embeddings."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model, dtype=cfg.dtype))

    def forward(self, positions: Tensor, batch: int) -> Tensor:
        """[batch, pos, d_model] for positions [pos] or [batch, pos]."""
        return self.W_pos[positions].expand(batch, -1, -1)


class Unembed(nn.Module):
    """From the stream to logits."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        self.W_U = nn.Parameter(torch.empty(cfg.d_model, cfg.d_vocab_out, dtype=cfg.dtype))
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab_out, dtype=cfg.dtype))

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, pos, d_vocab_out]."""
        return stream @ self.W_U + self.b_U


class Block(nn.Module):
    """Attention and an MLP, one after the other or side by side; or attention alone.

    The sites ``hook_resid_pre`` and ``hook_resid_post`` are the block's own input and output.
    """

    def __init__(self, cfg: HookedTransformerConfig, layer: int) -> None:
        super().__init__()
        self.cfg = cfg
        twice = cfg.use_normalization_before_and_after and cfg.normalization_type is not None
        after = None if not twice else str(cfg.normalization_type).removesuffix("Pre")
        self.ln1 = make_norm(cfg)
        if twice:
            self.ln1_post = make_norm(cfg, kind=after)
        if not cfg.attn_only:
            self.ln2 = make_norm(cfg)
            if twice:
                self.ln2_post = make_norm(cfg, kind=after)
        self.attn = Attention(cfg, layer)
        if not cfg.attn_only:
            self.mlp = MLP(cfg)
            self.hook_mlp_in = Point()  # [batch, pos, d_model]
            self.hook_mlp_out = Point()
        if not cfg.attn_only and not cfg.parallel_attn_mlp:
            self.hook_resid_mid = Point()  # [batch, pos, d_model]
        self.hook_resid_pre = Point()
        self.hook_attn_in = Point()
        self.hook_q_input = Point()  # [batch, pos, head, d_model]
        self.hook_k_input = Point()
        self.hook_v_input = Point()
        self.hook_attn_out = Point()
        self.hook_resid_post = Point()

    def forward(self, stream: Tensor, context: Context) -> Tensor:
        """The stream after the block, [batch, pos, d_model]."""
        stream = self.hook_resid_pre(stream)
        given = self.hook_attn_in(stream)
        added = self.attn(self.ln1(given), self._head_inputs(given), context)
        added = self.hook_attn_out(self.ln1_post(added) if hasattr(self, "ln1_post") else added)
        if self.cfg.attn_only:
            return self.hook_resid_post(stream + added)
        if self.cfg.parallel_attn_mlp:
            return self.hook_resid_post(stream + added + self._mlp(stream))
        middle = self.hook_resid_mid(stream + added)
        return self.hook_resid_post(middle + self._mlp(middle))

    def _mlp(self, stream: Tensor) -> Tensor:
        """What the MLP adds."""
        added = self.mlp(self.ln2(self.hook_mlp_in(stream)))
        added = self.ln2_post(added) if hasattr(self, "ln2_post") else added
        return self.hook_mlp_out(added)

    def _head_inputs(self, stream: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """What single heads read, where a hook has changed it: before and after, normed."""
        norm = self.ln1.unheard if isinstance(self.ln1, Norm) else self.ln1
        found = {}
        for role in "qkv":
            point: Point = getattr(self, f"hook_{role}_input")
            if point.heard:
                heads = self.cfg.n_heads
                if not self.cfg.ungroup_grouped_query_attention:
                    heads = len(self.attn.parameter("W", role))
                given = stream.unsqueeze(-2).expand(-1, -1, heads, -1)
                edited = point(given)
                if edited is not given:
                    found[role] = (norm(given), norm(edited))
        return found


class Transformer(nn.Module):
    """A transformer as a config says."""

    main_input_name = "input_ids"

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = Embed(cfg)
        self.hook_embed = Point()  # [batch, pos, d_model]
        if cfg.positional_embedding_type in ("standard", "shortformer"):
            self.pos_embed = PosEmbed(cfg)
            self.hook_pos_embed = Point()  # [batch, pos, d_model]
        if cfg.use_hook_tokens:
            self.hook_tokens = Point()  # [batch, pos]
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layers))
        kind = cfg.normalization_type
        if kind is not None and cfg.final_rms:
            kind = kind.replace("LN", "RMS")
        self.ln_final = make_norm(cfg, kind=kind)
        self.unembed = Unembed(cfg)
        self.register_load_state_dict_pre_hook(old_state_dicts.translate)  # type: ignore[no-untyped-call]
        if cfg.init_weights:
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights anew, as the config says."""
        initialisation.draw(self, self.cfg)

    @property
    def config(self) -> Any:
        """What code for models of transformers asks a config for."""
        cfg = self.cfg
        return SimpleNamespace(
            vocab_size=cfg.d_vocab,
            max_position_embeddings=cfg.n_ctx,
            final_logit_softcapping=cfg.output_logits_soft_cap,
        )

    def can_generate(self) -> bool:
        """Whether it predicts next tokens."""
        return self.cfg.attention_dir == "causal" and self.cfg.d_vocab_out == self.cfg.d_vocab

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        made: Self = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.cfg.device, self.cfg.dtype = self.embed.W_E.device, self.embed.W_E.dtype
        for part in self.modules():
            if isinstance(part, Norm):
                part.dtype = self.cfg.dtype
        return made

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: TransformerLensKeyValueCache | None = None,
    ) -> Tensor:
        """Logits [batch, pos, d_vocab_out].

        Args:
            input_ids: tokens [batch, pos].
            attention_mask: [batch, pos], 0 where there is padding.
            position_ids: [batch, pos]; by default counted from each text's first token.
            inputs_embeds: [batch, pos, d_model], in place of embedded tokens.
            past_key_values: what was read before; the mask is then of that too.
        """
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("a forward pass needs input_ids or inputs_embeds.")
            if self.cfg.use_hook_tokens:
                input_ids = self.hook_tokens(input_ids)
            inputs_embeds = self.embed(input_ids)
        stream = self.hook_embed(inputs_embeds)
        stream, context = self._placed(stream, attention_mask, position_ids, past_key_values)
        for block in self.blocks:
            stream = block(stream, context)
        logits: Tensor = self.unembed(self.ln_final(stream))
        cap = self.cfg.output_logits_soft_cap
        return cap * (logits / cap).tanh() if cap > 0 else logits

    def _placed(
        self,
        stream: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        past: TransformerLensKeyValueCache | None,
    ) -> tuple[Tensor, Context]:
        """The stream with its positions, and what attention is to know of them."""
        batch, new = stream.shape[:2]
        length = new if past is None else new + int(past[0].past_keys.shape[1])
        if length > self.cfg.n_ctx:
            raise ValueError(
                f"{length} tokens, and the model has {self.cfg.n_ctx} positions (n_ctx)."
            )
        if mask is not None and bool((mask != 0).all()):
            mask = None
        of_keys = torch.arange(length, device=stream.device)
        if mask is not None:
            of_keys = get_offset_position_ids(0, mask)  # what is masked inside a text is none of it
        if positions is None:
            positions = of_keys[..., -new:]
        embedded = None
        if hasattr(self, "pos_embed"):
            embedded = self.hook_pos_embed(self.pos_embed(positions, batch))
            if self.cfg.positional_embedding_type == "standard":
                stream, embedded = stream + embedded, None
        shared = None
        if self.cfg.positional_embedding_type == "relative_positional_bias" and len(self.blocks):
            first: Any = self.blocks[0]
            shared = first.attn.rel_pos_bias(length)[:, -new:]
        keys = of_keys if past is not None else None
        return stream, Context(
            positions=positions, of_keys=keys, past=past, mask=mask, embedded=embedded, bias=shared
        )
