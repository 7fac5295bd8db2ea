"""What edges must do, by hand: a forward pass in which every edge has a number, 0 for live and 1 for corrupt.

``masked_gpt2`` is a GPT-2 written out from its parameters, and uses nothing of interpose. ``masked_run`` does the same
to any model through sites that the methods under test use otherwise (``attn.hook_result``, the live stream), so that
autograd takes every gradient through the model's own norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import interpose as ip


def masked_gpt2(
    module: Any, tokens: Tensor, cut: Tensor | None = None, corrupt: list[Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits, and what every writer adds; a reader gets ``cut[writer, reader]`` of the way to the corrupt writer."""
    body, heads = module.transformer, module.config.n_head
    width, size = module.config.n_embd, module.config.n_embd // heads
    written = [body.wte(tokens) + body.wpe(torch.arange(tokens.shape[1]))]
    constant = torch.zeros(width)
    row = 0

    def read() -> Tensor:
        nonlocal row
        stream = sum(written) + constant
        if cut is not None and corrupt is not None:
            for writer, (live, other) in enumerate(zip(written, corrupt)):
                stream = stream + cut[writer, row] * (other - live)
        row += 1
        return stream

    for block in body.h:
        made = []
        for role in range(3):
            for head in range(heads):
                columns = slice(role * width + head * size, role * width + (head + 1) * size)
                x = F.layer_norm(
                    read(), (width,), block.ln_1.weight, block.ln_1.bias, block.ln_1.eps
                )
                made.append(
                    x @ block.attn.c_attn.weight[:, columns] + block.attn.c_attn.bias[columns]
                )
        outs = []
        for head in range(heads):
            q, k, v = made[head], made[heads + head], made[2 * heads + head]
            later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
            scores = (q @ k.mT / size**0.5).masked_fill(later, -torch.inf)
            rows = slice(head * size, (head + 1) * size)
            outs.append(scores.softmax(-1) @ v @ block.attn.c_proj.weight[rows])
        written += outs
        constant = constant + block.attn.c_proj.bias
        x = F.layer_norm(read(), (width,), block.ln_2.weight, block.ln_2.bias, block.ln_2.eps)
        inside = F.gelu(x @ block.mlp.c_fc.weight + block.mlp.c_fc.bias, approximate="tanh")
        written.append(inside @ block.mlp.c_proj.weight + block.mlp.c_proj.bias)
    final = body.ln_f
    return module.lm_head(
        F.layer_norm(read(), (width,), final.weight, final.bias, final.eps)
    ), written


KINDS = ("attn.hook_result", "attn.hook_out", "hook_attn_out", "hook_mlp_out")


def sites(model: Any) -> list[str]:
    """Where writers are seen."""
    layers = range(model.cfg.n_layers)
    return [
        "blocks.0.hook_resid_pre",
        *(f"blocks.{layer}.{kind}" for layer in layers for kind in KINDS),
    ]


def written(model: Any, values: Any, count: int | None = None) -> Tensor:
    """What the first writers add, [writer, batch, pos, d_model], up to constants that all runs share."""
    found = [values["blocks.0.hook_resid_pre"]]
    for layer in range(model.cfg.n_layers):
        at = f"blocks.{layer}."
        if count is not None and len(found) >= count:
            break
        # A multiplier, or a norm at the scale of this run, between the projection and the stream.
        share = (values[f"{at}hook_attn_out"] / values[f"{at}attn.hook_out"])[..., None, :]
        if f"{at}ln1_post.hook_scale" not in model.sites:
            share = share.detach().median()
        found += (values[f"{at}attn.hook_result"] * share).unbind(-2)
        if count is None or len(found) < count:
            found.append(values[f"{at}hook_mlp_out"])
    return torch.stack(found)


def masked_run(model: Any, tokens: Tensor, cut: Tensor, corrupt: Tensor, graph: Any) -> Tensor:
    """Logits of a run in which readers get ``cut[writer, reader]`` of the way to the corrupt writers."""
    live: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: ip.HookPoint) -> None:
        live[hook.name] = value

    def reads(rows: list[int]) -> Any:
        def read(value: Tensor, hook: ip.HookPoint) -> Tensor:
            count = graph.reach[rows[0]]
            apart = corrupt[:count] - written(model, live, count)
            moved = torch.einsum("wr,wbpm->bprm", cut[:count, rows], apart)
            return value + moved.reshape(value.shape)

        return read

    hooks: list[Any] = [(name, keep) for name in sites(model)]
    for layer in range(model.cfg.n_layers):
        for role in "qkv":
            names = [x for x in graph.readers if x.startswith(f"a{layer}.") and x.endswith(role)]
            rows = [graph.readers.index(name) for name in names]
            hooks.append((f"blocks.{layer}.hook_{role}_input", reads(rows)))
        mlp = graph.readers.index(f"m{layer}")
        hooks.append((f"blocks.{layer}.hook_mlp_in", reads([mlp])))
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    return model.run_with_hooks(tokens, fwd_hooks=[*hooks, (last, reads([len(graph.readers) - 1]))])
