"""From an `Anatomy` to sites: every canonical name with its module, lens, axes and a sentence about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from interpose.models.discovery.anatomy import (
    Anatomy,
    Attention,
    Block,
    Endpoint,
    FeedForward,
    Norm,
    Tower,
)
from interpose.models.discovery.parts import why_not_plain
from interpose.models.naming.axes import Axes, Layout, Rows
from interpose.models.reach.derived import ExpertOutputs, HeadInputs, HeadResults, NormScale
from interpose.models.reach.inner import Core, FunctionPoint, InnerPoint, Reach
from interpose.models.reach.interface import Interface
from interpose.models.reach.lenses import Batched, Folded, Heads, Stash, Swapped, Switches
from interpose.models.spread import withhold
from interpose.sites.grammar import OUTPUT, Tail
from interpose.sites.lens import Lens, Switch
from interpose.sites.tree import Site

STREAM = ("batch", "pos", "d_model")
HEADS = ("batch", "pos", "head", "d_head")
PAIRS = ("batch", "head", "query", "key")
KEYS = ("batch", "key", "head", "d_head")  # all that can be looked at: those of a cache too
_OF_ENCODER = {"key": "encoder_pos", "pos": "encoder_pos"}  # in cross attention
INSIDE = ("batch", "pos", "d_mlp")
RESULTS = ("batch", "pos", "head", "d_model")

ABOUT = {
    "resid_pre": "the residual stream as the block gets it",
    "resid_mid": "the residual stream between attention and MLP; an edit reaches the skip path too",
    "resid_mid_cross": "the residual stream after cross attention",
    "resid_post": "the residual stream as the block leaves it",
    "attn_out": "what attention adds to the stream, after norms and multipliers",
    "cross_attn_out": "what cross attention adds to the stream",
    "mlp_out": "what the MLP adds to the stream, after norms and multipliers",
    "mixer_out": "what the mixer (state space, linear attention) adds to the stream",
    "mixer_in": "what the mixer reads",
    "attn_in": "what attention reads of the stream: an edit reaches attention alone",
    "cross_attn_in": "what cross attention reads of the stream: an edit reaches it alone",
    "attn_given": "what the attention module is given, after its norm",
    "mlp_given": "what the MLP itself is given, after its norm",
    "mlp_in": "what the MLP reads of the stream: an edit reaches the MLP alone",
    "q": "queries by head, as projected, before rotary",
    "k": "keys by head, as projected, before rotary",
    "v": "values by head, as projected",
    "rot_q": "queries as the attention kernel gets them",
    "rot_k": "keys as the attention kernel gets them",
    "attn_scores": "attention scores with mask, before softmax",
    "pattern": "attention probabilities",
    "z": "what each head hands to the output projection",
    "out": "what the output projection returns",
    "result": "what each head adds, through its part of the output projection",
    "q_input": "the stream as each head reads it for its query",
    "k_input": "the stream as each head reads it for its key",
    "v_input": "the stream as each head reads it for its value",
    "pre": "neurons before the activation",
    "pre_linear": "what the activated gate is multiplied with",
    "post": "neurons: what the last projection takes",
    "router_logits": "router logits, before experts are chosen",
    "expert_weights": "the weights of the chosen experts",
    "expert_indices": "the chosen experts",
    "experts_out": "the chosen experts' outputs, weighted and added",
    "expert_out": "what each chosen expert adds, weighted",
    "normalized": "what the norm returns",
    "scale": "what the norm divides by",
    "embed": "token embeddings",
    "pos_embed": "position embeddings",
    "unembed_in": "what is unembedded",
    "unembed_out": "logits as the unembedding gives them",
}

_NO_OWN = "no projection of this layer's own makes its {}"
_INDIRECT = "the projection that makes its {} does not read the stream itself"
_BY_NAME = "; told by its name alone, so model.check() before you rely on it"
_MIXTURE = "this layer is a mixture of experts, each with neurons of its own"
_INSIDE_ATTENTION = (
    *("q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "result", "out"),
)
_OF_A_NORM = ("scale", "normalized")
_WORDS = {"q": "queries", "k": "keys", "v": "values"}


class Table:
    """All sites of a model by canonical name, and for names that are no site, why."""

    def __init__(self, anatomy: Anatomy) -> None:
        runs = [] if anatomy.sizes is None else [anatomy.sizes]
        self._make(anatomy, Axes(anatomy, runs))
        if self._axes.is_open and anatomy.again is not None:
            more = anatomy.again()
            if more is not None:
                self._make(anatomy, Axes(anatomy, [*runs, more]))

    def _make(self, anatomy: Anatomy, axes: Axes) -> None:
        self.sites: dict[str, Site] = {}
        self.absent: dict[str, str] = dict(anatomy.absent)
        self._axes = axes
        self._block: Block | None = None
        self._around: Stash | None = None
        self._rows: list[Rows] = []
        """What the values under way may count: what their tower does comes first."""
        towers = (
            {} if anatomy.sizes is None else {t.prefix: axes.of_tower(t) for t in anatomy.towers}
        )
        self._ends(anatomy, towers)
        for tower in anatomy.towers:
            self._rows = [towers[tower.prefix]] if towers else []
            self._others = list(towers.values())
            self._tower(tower)
        if anatomy.unembed is not None:
            self._rows = [*axes.texts, *towers.values()]
            logits = ("batch", "pos", "d_vocab")
            self._add("unembed.hook_in", _input(anatomy.unembed), STREAM, "unembed_in", named=True)
            self._add("unembed.hook_out", anatomy.unembed, logits, "unembed_out", named=True)

    def _add(
        self,
        name: str,
        endpoint: Endpoint,
        axes: tuple[str, ...],
        kind: str | None = None,
        *,
        lens: Lens | None = None,
        switch: Switch | None = None,
        named: bool = False,
        layout: Layout | str | tuple[str, ...] | None = None,
        more: str = "",
    ) -> None:
        """Add a site; one that must be ``named`` is not among those kept by default.

        A value whose axes cannot be shown to be what they are called is absent.
        """
        kind = kind or name.rsplit("hook_", 1)[1]
        inner = isinstance(endpoint.module, InnerPoint)  # no module of the model: it has no path
        shown = lens or endpoint.lens
        if layout is None and endpoint.shape and self._rows:
            in_order = self._block is not None and self._block.flat_in_order
            layout = self._axes.of_value(endpoint, self._rows, in_order=in_order)
        if isinstance(layout, str):
            self.absent[name] = layout
            return
        if isinstance(layout, tuple):
            axes = layout
        elif layout is not None:
            axes = (*layout.names, *axes[2:])
            if layout.flat and self._around is not None:
                shown = Batched(self._around, shown)
                switch = self._around if switch is None else Switches((self._around, switch))
            if layout.swapped:
                shown = Swapped(0, 1, shown)
        self.sites[name] = Site(
            name=name,
            canonical=name,
            stem=name,
            path=name,
            tail=endpoint.tail,
            module=endpoint.module,
            kind=kind,
            layer=None if self._block is None else self._block.index,
            axes=axes,
            about=ABOUT.get(kind, kind.replace("_", " ")) + more,
            lens=shown,
            switch=switch,
            primary=not named,
            aliases=() if inner or shown is not None else (f"{endpoint.path}{endpoint.tail}",),
        )

    def _ends(self, found: Anatomy, towers: dict[str, Rows]) -> None:
        for name, endpoint in found.embeddings.items():
            prefix, _, _ = name.rpartition("hook_")
            layout = (
                self._axes.of_embedding(endpoint, towers.get(prefix)) if endpoint.shape else None
            )
            self._add(name, endpoint, STREAM, layout=layout)
        if found.pos_embed is None:
            self.absent["hook_pos_embed"] = "positions are not embedded by a module of their own"

    def _tower(self, tower: Tower) -> None:
        for block in tower.blocks:
            self._block, self._around = block, Stash(block.module)
            prefix = f"{tower.prefix}blocks.{block.index}."
            if block.undecided:
                self._undecided(prefix, block)
                continue
            for kind, endpoint in _in_order(block):
                self._add(f"{prefix}hook_{kind}", endpoint, STREAM, named=kind.endswith("_in"))
            for attention in block.attentions:
                self._attention(prefix, block, attention)
                at = f"{prefix}{attention.name}."
                withhold(self.sites, self.absent, at, attention.core)
            if block.mlp is not None:
                self._mlp(f"{prefix}mlp.", block.mlp)
                if (down := block.mlp.down) is not None:
                    withhold(self.sites, self.absent, f"{prefix}mlp.", down.module)
            for name, norm in block.norms.items():
                self._norm(f"{prefix}{name}.", norm)
            if not block.attentions:
                self._no_attention(prefix)
            for kind, reason in block.absent.items():
                self.absent[f"{prefix}hook_{kind}"] = reason
        self._block = self._around = None
        if tower.final_norm is not None:
            self._norm(f"{tower.prefix}ln_final.", tower.final_norm)
        for kind in _OF_A_NORM:
            if f"{tower.prefix}ln_final.hook_{kind}" not in self.sites:
                reason = "no norm reads the last block's output"
                self.absent.setdefault(f"{tower.prefix}ln_final.hook_{kind}", reason)

    def _undecided(self, prefix: str, block: Block) -> None:
        """Offer a block's input and output, and say of the rest why it is not there."""
        for kind, endpoint in block.sites.items():
            self._add(f"{prefix}hook_{kind}", endpoint, STREAM)
        kinds = ("resid_mid", "attn_in", "attn_out", "mlp_in", "mlp_out")
        names = [f"{prefix}hook_{kind}" for kind in kinds]
        names += [f"{prefix}attn.hook_{kind}" for kind in _INSIDE_ATTENTION]
        names += [f"{prefix}mlp.hook_{kind}" for kind in ("pre", "pre_linear", "post")]
        names += [f"{prefix}{norm}.hook_{kind}" for norm in ("ln1", "ln2") for kind in _OF_A_NORM]
        self.absent |= dict.fromkeys(names, block.undecided)

    def _no_attention(self, prefix: str) -> None:
        names = [f"{prefix}attn.hook_{kind}" for kind in _INSIDE_ATTENTION]
        for name in (*names, f"{prefix}hook_attn_out", f"{prefix}hook_attn_in"):
            if name not in self.sites:
                self.absent[name] = "this block has no attention"

    def _norm(self, prefix: str, norm: Norm) -> None:
        self._add(f"{prefix}hook_normalized", norm.endpoint, STREAM)
        if norm.why_not:
            self.absent[f"{prefix}hook_scale"] = norm.why_not
            return
        lens = NormScale(norm.centred, norm.eps)
        self._add(f"{prefix}hook_scale", norm.endpoint, ("batch", "pos", "1"), lens=lens)

    # Attention.

    def _attention(self, prefix: str, block: Block, found: Attention) -> None:
        at = f"{prefix}{found.name}."
        for role in ("q", "k", "v"):
            self._projection(prefix, at, role, block, found)
        reach = Interface() if found.by == "interface" else Reach()
        core = Core(found.core, reach=reach)
        for role in ("q", "k"):
            name = f"{at}hook_rot_{role}"
            if found.by == "softmax":
                self.absent[name] = "its scores are multiplied out without an attention kernel"
                continue
            endpoint = Endpoint(path=name, module=getattr(core, role), tail=OUTPUT)
            same = role in found.unturned  # nothing turns them: they are hook_q, hook_k
            axes = self._kernel_axes(found, role, HEADS if role == "q" else KEYS)
            self._add(
                name, endpoint, HEADS, lens=Swapped(1, 2), switch=core, named=same, layout=axes
            )
        for kind, point in (("attn_scores", core.scores), ("pattern", core.pattern)):
            if found.scores_ndim not in (3, 4):
                self.absent[f"{at}hook_{kind}"] = f"its scores have {found.scores_ndim} axes"
                continue
            endpoint = Endpoint(path=f"{at}{kind}", module=point, tail=OUTPUT)
            folded = Folded(found.n_heads) if found.scores_ndim == 3 else None
            axes = self._kernel_axes(found, "scores", PAIRS)
            self._add(f"{at}hook_{kind}", endpoint, PAIRS, lens=folded, switch=core, layout=axes)
        if found.given is not None:
            self._add(f"{at}hook_in", found.given, STREAM, "attn_given", named=True)
        if found.out is None:
            for kind in ("z", "result", "out"):
                self.absent[f"{at}hook_{kind}"] = "no output projection follows attention"
            return
        heads = found.out.lens
        self._add(f"{at}hook_z", found.out, HEADS if heads is not None else INSIDE)
        out = Endpoint(
            path=found.out.path, module=found.out.module, tail=OUTPUT, shape=found.out_shape
        )
        self._add(f"{at}hook_out", out, STREAM, named=True)
        why = why_not_plain(out.module) if isinstance(heads, Heads) else "its heads are not apart"
        if why is None and isinstance(heads, Heads):
            lens = HeadResults(heads)
            self._add(f"{at}hook_result", out, RESULTS, lens=lens, named=True)
        else:
            self.absent[f"{at}hook_result"] = str(why)

    def _kernel_axes(
        self, found: Attention, what: str, usual: tuple[str, ...]
    ) -> tuple[str, ...] | str:
        """The axes of a value inside attention, or why they are not the usual ones."""
        axes = self._axes.of_attention(found, self._rows[0], what, usual) if self._rows else usual
        return axes if isinstance(axes, str) or what == "q" else _keys(axes, found)

    def _projection(self, prefix: str, at: str, role: str, block: Block, found: Attention) -> None:
        endpoint, name = found.projections.get(role), f"{prefix}hook_{role}_input"
        if endpoint is None:
            self.absent[f"{at}hook_{role}"] = self.absent[name] = _NO_OWN.format(_WORDS[role])
            return
        crosses = found.name != "attn" and role != "q"
        layout: Layout | str | None = None
        if crosses and self._rows:  # keys and values of another tower
            layout = self._axes.of_value(endpoint, [*self._rows, *self._others], loose=True)
            if isinstance(layout, Layout):
                layout = replace(layout, names=_keys(layout.names, found))
        more = _BY_NAME if role in found.named else ""
        axes = _keys(HEADS, found) if crosses else HEADS
        self._add(f"{at}hook_{role}", endpoint, axes, layout=layout, more=more)
        if found.name != "attn":
            return
        if role not in found.direct or not isinstance(endpoint.lens, Heads):
            self.absent[name] = _INDIRECT.format(_WORDS[role])
            return
        why = why_not_plain(endpoint.module)
        if why is not None:
            self.absent[name] = why
            return
        norm = block.norms.get("ln1")
        stash = None if norm is None or norm.reads_sum else Stash(norm.endpoint.module)
        lens = HeadInputs(endpoint.lens, stash)
        self._add(name, endpoint, RESULTS, lens=lens, switch=stash, named=True)

    # MLP.

    def _mlp(self, at: str, found: FeedForward) -> None:
        mixture = found.experts is not None or found.router is not None
        for kind, endpoint, why in (
            ("pre", found.pre, "its projections do not multiply out to what the last one takes"),
            ("pre_linear", found.pre_linear, "this MLP has no gate"),
            ("post", found.down, "it has no last projection"),
        ):
            if endpoint is not None:
                self._add(f"{at}hook_{kind}", endpoint, INSIDE)
            else:
                self.absent[f"{at}hook_{kind}"] = _MIXTURE if mixture else why
        if found.given is not None:
            self._add(f"{at}hook_in", found.given, STREAM, "mlp_given", named=True)
        if found.experts is not None:
            self._add(f"{at}hook_experts_out", found.experts, STREAM, named=True)
            self._expert_outputs(f"{at}hook_expert_out", found)
        if found.router is not None:
            self._router(at, found, found.router)

    def _expert_outputs(self, name: str, found: FeedForward) -> None:
        if found.experts is None or found.expert_arguments is None:
            self.absent[name] = "its experts are not told which of them are chosen"
            return
        lens = ExpertOutputs(*found.expert_arguments)
        self._add(name, found.experts, ("batch", "pos", "chosen", "d_model"), lens=lens, named=True)

    def _router(self, at: str, found: FeedForward, router: Endpoint) -> None:
        for kind in ("weights", "indices"):
            leaf, shape = found.router_leaves.get(kind, (None, ()))
            if leaf is not None:
                tail = Tail(leaf=leaf)
                endpoint = Endpoint(path=router.path, module=router.module, tail=tail, shape=shape)
                self._add(f"{at}hook_expert_{kind}", endpoint, ("batch", "pos", "chosen"))
        if any(p.ndim == 2 for p in router.module.parameters(recurse=False)):
            point = FunctionPoint(router.module, nn.functional.linear)
            endpoint = Endpoint(path=f"{at}logits", module=point, tail=OUTPUT, shape=router.shape)
            self._add(f"{at}hook_router_logits", endpoint, ("batch", "pos", "expert"), switch=point)
        else:
            self.absent[f"{at}hook_router_logits"] = "its router is not a single linear map"


def _keys(axes: tuple[str, ...], found: Attention) -> tuple[str, ...]:
    """The axes of something about keys: those of cross attention are an encoder's positions."""
    cross = found.name == "cross_attn"
    return tuple(_OF_ENCODER.get(name, name) for name in axes) if cross else axes


def _in_order(block: Block) -> Iterator[tuple[str, Endpoint]]:
    """The values of the stream and of its branches, as they come."""
    yield "resid_pre", block.sites["resid_pre"]
    for kind, branch in (("attn_in", "ln1"), ("cross_attn_in", "ln_cross"), ("mlp_in", "ln2")):
        norm = block.norms.get(branch)
        if kind == "attn_in" and not block.attentions:
            continue
        if norm is not None and kind not in block.sites and not norm.reads_sum:
            yield kind, _input(norm.endpoint)
    for kind, endpoint in block.sites.items():
        if kind not in ("resid_pre", "resid_post"):
            yield kind, endpoint
    yield "resid_post", block.sites["resid_post"]


def _input(endpoint: Endpoint) -> Endpoint:
    """The first tensor a module takes."""
    tail = Tail(call=endpoint.tail.call, port="input", leaf=(0,))
    return Endpoint(path=endpoint.path, module=endpoint.module, tail=tail, shape=endpoint.shape)
