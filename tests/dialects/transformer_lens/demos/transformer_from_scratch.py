"""GPT-2 written by hand: it takes the weights of the published one, gives its logits, samples and trains."""

import math
from typing import Any

import torch
from torch import Tensor, nn

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import HookedTransformer

TEXT = "When Mary and John went to the store, John gave a drink to"


class LayerNorm(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.w, self.b = (
            nn.Parameter(torch.ones(cfg.d_model)),
            nn.Parameter(torch.zeros(cfg.d_model)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * self.w + self.b


class Embed(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.W_E[tokens]


class PosEmbed(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.W_pos[: tokens.shape[1]]


class Attention(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        for role in "QKV":
            setattr(
                self, f"W_{role}", nn.Parameter(torch.empty(cfg.n_heads, cfg.d_model, cfg.d_head))
            )
            setattr(self, f"b_{role}", nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)))
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, cfg.d_model))
        self.b_O = nn.Parameter(torch.zeros(cfg.d_model))
        self.register_buffer("IGNORE", torch.tensor(-1e5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("bpd,hdk->bhpk", x, getattr(self, f"W_{role}"))
            + getattr(self, f"b_{role}")[:, None]
            for role in "QKV"
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(later, float(self.IGNORE)).softmax(-1)
        return torch.einsum("bhpk,hkd->bpd", pattern @ v, self.W_O) + self.b_O


class MLP(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.b_in, self.b_out = (
            nn.Parameter(torch.zeros(cfg.d_mlp)),
            nn.Parameter(torch.zeros(cfg.d_model)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return utils.gelu_new(x @ self.W_in + self.b_in) @ self.W_out + self.b_out


class Block(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.ln1, self.attn = LayerNorm(cfg), Attention(cfg)
        self.ln2, self.mlp = LayerNorm(cfg), MLP(cfg)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Unembed(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_U = nn.Parameter(torch.empty(cfg.d_model, cfg.d_vocab))
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W_U + self.b_U


class Mine(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.embed, self.pos_embed = Embed(cfg), PosEmbed(cfg)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.ln_final, self.unembed = LayerNorm(cfg), Unembed(cfg)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.pos_embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln_final(x))


def demo() -> dict[str, Any]:
    reference = HookedTransformer.from_pretrained(
        "gpt2-small", fold_ln=False, center_unembed=False, center_writing_weights=False
    )
    tokens = reference.to_tokens(TEXT)
    logits, cache = reference.run_with_cache(tokens)
    mine = Mine(reference.cfg)
    left = mine.load_state_dict(reference.state_dict(), strict=False)
    with torch.no_grad():
        ours = mine(tokens)
        norm = mine.blocks[0].ln1(cache["resid_pre", 0])
    found = {
        "missing": left.missing_keys,
        "left over": sorted(left.unexpected_keys)[:3],
        "far off": bool((ours - logits).abs().max() > 1e-3),
        "logits": ours[0, -1, :6],
        "norm": norm[0, 2, :4],
        "parameters": sorted(reference.state_dict()),
        "sorted": sorted(reference.tokenizer.vocab.items(), key=lambda pair: pair[1])[300:303],
    }
    written = tokens
    for _ in range(5):
        with torch.no_grad():
            written = torch.cat([written, mine(written)[:, -1:].argmax(-1)], dim=1)
    found["written"] = reference.to_string(written[0, tokens.shape[1] :])
    found["the same"] = reference.generate(TEXT, max_new_tokens=5, do_sample=False, verbose=False)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3, weight_decay=1e-2)
    losses = []
    for _ in range(3):
        loss = utils.lm_cross_entropy_loss(mine(tokens), tokens)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found | {"losses": losses}
