"""The sites and parts of a model from scratch, as discovery would describe them, read off the module itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from interpose.dialects.transformer_lens.scratch.attention import Attention
from interpose.dialects.transformer_lens.scratch.norms import Norm
from interpose.dialects.transformer_lens.scratch.points import Point
from interpose.dialects.transformer_lens.scratch.transformer import Block, Transformer
from interpose.models.discovery import anatomy
from interpose.models.discovery.anatomy import Anatomy, Endpoint
from interpose.models.naming import table
from interpose.sites.grammar import OUTPUT, Tail
from interpose.sites.tree import Site

_INPUT = Tail(port="input", leaf=(0,))
_AXES = {
    **dict.fromkeys(("q", "k", "v", "rot_q", "rot_k", "z"), table.HEADS),
    **dict.fromkeys(("attn_scores", "pattern"), table.PAIRS),
    **dict.fromkeys(("result", "q_input", "k_input", "v_input"), table.RESULTS),
    **dict.fromkeys(("pre", "pre_linear", "mid", "post"), table.INSIDE),
    "scale": ("batch", "pos", "1"),
    "tokens": ("batch", "pos"),
    "unembed_out": ("batch", "pos", "d_vocab"),
}
_NAMED = (
    "attn_in",
    "mlp_in",
    "q_input",
    "k_input",
    "v_input",
    "result",
    "out",
    "unembed_in",
    "unembed_out",
)
_ABOUT = {"mid": "neurons before their norm", "tokens": "the tokens"}
_WEIGHTS = {
    "attn": ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"),
    "mlp": ("W_in", "W_gate", "W_out", "b_in", "b_out"),
}


class PointTable(table.Table):
    """The sites of a model from scratch: its points, and the blocks' own inputs and outputs."""

    def __init__(self, module: Transformer) -> None:
        self.sites: dict[str, Site] = {}
        self.absent: dict[str, str] = dict(_absent(module))
        for name, endpoint in _endpoints(module):
            stem, _, kind = name.rpartition("hook_")
            inner = stem.startswith("blocks.")
            kind = f"unembed_{kind}" if stem == "unembed." else kind
            self.sites[name] = Site(
                name=name,
                canonical=name,
                stem=name,
                path=name,
                tail=endpoint.tail,
                module=endpoint.module,
                kind=kind,
                layer=int(stem.split(".")[1]) if inner else None,
                axes=_axes(stem, kind),
                about=_ABOUT.get(kind) or table.ABOUT.get(kind, kind),
                primary=kind not in _NAMED,
            )


def _axes(stem: str, kind: str) -> tuple[str, ...]:
    if stem.endswith(("q_norm.", "k_norm.")):
        return ("batch", "pos", "head", "1") if kind == "scale" else table.HEADS
    if stem.endswith("mlp.ln.") and kind == "normalized":
        return table.INSIDE
    return _AXES.get(kind, table.STREAM)


def _endpoints(module: Transformer) -> Iterator[tuple[str, Endpoint]]:
    """Every name with its endpoint, in an order like that of other models."""
    for name, part in module.named_modules():
        if isinstance(part, Block):
            yield f"{name}.hook_resid_pre", Endpoint(path=name, module=part, tail=_INPUT)
            yield f"{name}.hook_resid_post", Endpoint(path=name, module=part, tail=OUTPUT)
        elif isinstance(part, Attention):
            yield f"{name}.hook_out", Endpoint(path=name, module=part, tail=OUTPUT)
        elif isinstance(part, Point) and not name.endswith(("hook_resid_pre", "hook_resid_post")):
            yield name, Endpoint(path=name, module=part, tail=OUTPUT)
    yield "unembed.hook_in", Endpoint(path="unembed", module=module.unembed, tail=_INPUT)
    yield "unembed.hook_out", Endpoint(path="unembed", module=module.unembed, tail=OUTPUT)


def _absent(module: Transformer) -> Iterator[tuple[str, str]]:
    """Names that other models have, and why this one has not."""
    cfg = module.cfg
    if not hasattr(module, "pos_embed"):
        kind = cfg.positional_embedding_type
        yield "hook_pos_embed", f"positions are not embedded (positional_embedding_type={kind!r})"
    if cfg.normalization_type is None:
        for kind in ("scale", "normalized"):
            yield f"ln_final.hook_{kind}", "the model has no norms (normalization_type=None)"
    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}"
        if cfg.positional_embedding_type != "rotary":
            for role in "qk":
                yield f"{at}.attn.hook_rot_{role}", "positions do not turn queries and keys"
        if cfg.attn_only or cfg.parallel_attn_mlp:
            why = "there is no MLP" if cfg.attn_only else "attention and MLP read the same stream"
            yield f"{at}.hook_resid_mid", why
        if cfg.attn_only:
            for kind in ("hook_mlp_in", "hook_mlp_out", "mlp.hook_pre", "mlp.hook_post"):
                yield f"{at}.{kind}", "there is no MLP (attn_only=True)"
        elif not cfg.gated_mlp:
            yield f"{at}.mlp.hook_pre_linear", "this MLP has no gate"
        if cfg.normalization_type is None:
            for kind in ("ln1.hook_scale", "ln1.hook_normalized"):
                yield f"{at}.{kind}", "the model has no norms (normalization_type=None)"


def anatomy_of(module: Transformer) -> Anatomy:
    """What discovery would say of a model from scratch."""
    shape = (2, min(11, module.cfg.n_ctx))
    blocks = [_block(layer, part, shape) for layer, part in enumerate(module.blocks)]  # type: ignore[arg-type]
    final = _norm("ln_final", module.ln_final)
    tower = anatomy.Tower(prefix="", path="blocks", blocks=blocks, final_norm=final)
    ends = ("embed.W_E", "unembed.W_U", "unembed.b_U")
    weights: dict[str, Callable[[], Tensor]] = {name: partial(_get, module, name) for name in ends}
    if hasattr(module, "pos_embed"):
        weights["pos_embed.W_pos"] = partial(_get, module, "pos_embed.W_pos")
    weights |= _norm_weights(module, "ln_final", final)
    return Anatomy(
        tokens=shape,
        towers=[tower],
        embed=Endpoint(path="embed", module=module.embed, tail=OUTPUT),
        unembed=Endpoint(path="unembed", module=module.unembed, tail=OUTPUT),
        weights=weights,
    )


def _block(layer: int, block: Block, shape: tuple[int, int]) -> anatomy.Block:
    cfg, at = block.cfg, f"blocks.{layer}"
    found = {name: _norm(f"{at}.{name}", getattr(block, name, None)) for name in _NORMS}
    norms = {name: norm for name, norm in found.items() if norm is not None}
    weights: dict[str, Callable[[], Tensor]] = {}
    for part, names in _WEIGHTS.items():
        for name in names:
            if hasattr(getattr(block, part, None), name):
                weights[f"{part}.{name}"] = partial(_get, block, f"{part}.{name}")
    for name, norm in norms.items():
        weights |= _norm_weights(block, name, norm)
    return anatomy.Block(
        index=layer,
        path=at,
        module=block,
        shape=(*shape, cfg.d_model),
        sites={
            "resid_pre": Endpoint(path=at, module=block, tail=_INPUT),
            "resid_post": Endpoint(path=at, module=block, tail=OUTPUT),
        },
        attentions=[_attention(at, block.attn)],
        mlp=None if cfg.attn_only else anatomy.FeedForward(path=f"{at}.mlp"),
        norms=norms,
        sums=_sums(block),
        weights=weights,
    )


_NORMS = ("ln1", "ln1_post", "ln2", "ln2_post")


def _sums(block: Block) -> list[tuple[str, list[str], str]]:
    if block.cfg.attn_only:
        return [("hook_resid_pre", ["hook_attn_out"], "hook_resid_post")]
    if block.cfg.parallel_attn_mlp:
        return [("hook_resid_pre", ["hook_attn_out", "hook_mlp_out"], "hook_resid_post")]
    return [
        ("hook_resid_pre", ["hook_attn_out"], "hook_resid_mid"),
        ("hook_resid_mid", ["hook_mlp_out"], "hook_resid_post"),
    ]


def _attention(at: str, module: Attention) -> anatomy.Attention:
    cfg = module.cfg
    turned = cfg.positional_embedding_type == "rotary" or cfg.use_qk_norm
    return anatomy.Attention(
        name="attn",
        path=f"{at}.attn",
        core=module,
        by="softmax",
        n_heads=cfg.n_heads,
        n_key_value_heads=cfg.n_key_value_heads or cfg.n_heads,
        d_head=cfg.d_head,
        d_value=cfg.d_head,
        unturned={"v"} if turned else {"q", "k", "v"},
        direct={"v"} if cfg.positional_embedding_type == "shortformer" else {"q", "k", "v"},
    )


def _norm(path: str, module: nn.Module | None) -> anatomy.Norm | None:
    if not isinstance(module, Norm):
        return None
    endpoint = Endpoint(path=path, module=module, tail=OUTPUT)
    return anatomy.Norm(endpoint=endpoint, centred=module.centred, eps=module.eps)


def _norm_weights(
    owner: nn.Module, name: str, norm: anatomy.Norm | None
) -> dict[str, Callable[[], Tensor]]:
    own = dict(norm.endpoint.module.named_parameters()) if norm is not None else {}
    return {f"{name}.{key}": partial(_get, owner, f"{name}.{key}") for key in own}


def _get(owner: nn.Module, path: str) -> Any:
    found: Any = owner
    for name in path.split("."):
        found = getattr(found, name)
    return found
