"""Modular addition in full batches: losses, and the waves of the embedding, the neurons and the logits."""

from typing import Any

import torch

from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig

PRIME = 13


def demo() -> dict[str, Any]:
    cfg = HookedTransformerConfig(
        n_layers=1,
        n_heads=4,
        d_model=32,
        d_head=8,
        d_mlp=64,
        act_fn="relu",
        normalization_type=None,
        d_vocab=PRIME + 1,
        d_vocab_out=PRIME,
        n_ctx=3,
        init_weights=True,
        device="cpu",
        seed=999,
    )
    model = HookedTransformer(cfg)
    for name, weight in model.named_parameters():
        if "b_" in name:
            weight.requires_grad = False
    a, b = torch.meshgrid(torch.arange(PRIME), torch.arange(PRIME), indexing="ij")
    data = torch.stack([a.flatten(), b.flatten(), torch.full((PRIME**2,), PRIME)], dim=1)
    labels = (data[:, 0] + data[:, 1]) % PRIME
    order = torch.randperm(PRIME**2, generator=torch.Generator().manual_seed(598))
    train, test = order[:50], order[50:]
    found: dict[str, Any] = {
        "trained": sorted(
            name for name, weight in model.named_parameters() if weight.requires_grad
        ),
        "first weights": model.W_E[0, :4],
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1.0, betas=(0.9, 0.98))
    losses = []
    for _ in range(12):
        loss = right(model(data[train]), labels[train])
        losses.append([loss.item(), right(model(data[test]), labels[test]).item()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found["losses"] = losses
    with torch.no_grad():
        return found | waves(model, data)


def right(logits: Any, labels: Any) -> Any:
    """The loss at the last position, in double precision."""
    chances = logits[:, -1].to(torch.float64).log_softmax(-1)
    return -chances.gather(-1, labels[:, None]).mean()


def waves(model: Any, data: Any) -> dict[str, Any]:
    basis = [torch.ones(PRIME)]
    turn = 2 * torch.pi * torch.arange(PRIME) / PRIME
    for frequency in range(1, PRIME // 2 + 1):
        basis += [torch.cos(turn * frequency), torch.sin(turn * frequency)]
    fourier = torch.stack([wave / wave.norm() for wave in basis])
    logits, cache = model.run_with_cache(data)
    neurons = cache["post", 0][:, -1].reshape(PRIME, PRIME, -1)
    spectrum = fourier @ neurons.permute(2, 0, 1) @ fourier.T
    ov, qk = model.W_E[:-1] @ model.OV[0, 1], model.W_E @ model.QK[0, 2] @ model.W_E.T
    attention = cache["pattern", 0][:, :, -1, :2].reshape(PRIME, PRIME, 4, 2)

    def no_constant(value: Any, hook: Any) -> Any:
        return value - value.mean(0, keepdim=True)

    hooks = [("blocks.0.mlp.hook_post", no_constant)]
    edited = model.run_with_hooks(data, fwd_hooks=hooks)
    return {
        "embedding": (fourier @ model.W_E[:-1]).norm(dim=-1),
        "neurons": spectrum.square().mean(0)[:4, :4],
        "logits": [logits[7, -1, :4], edited[7, -1, :4]],
        "circuits": [ov.AB[3, :4], qk.AB[-1, :5], ov.S[:3], qk.norm()],
        "attention": attention[3, 5],
        "through": (model.W_out[0] @ model.W_U)[0, :5],
    }
