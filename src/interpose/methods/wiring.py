"""Who writes to a model's residual stream and who reads it: the nodes and edges that circuits are made of.

Writers are the input (the stream that enters block 0), every head and every MLP. Readers are the queries, keys and
values of every head, every MLP, and the final stream, which becomes logits. The stream is a sum, so a reader gets the
part of every writer before it; an edge is one such part. A head is ``a5.h3`` and reads as ``a5.h3.q``, an MLP is
``m4``; heads that share keys and values read them together, as ``a5.kv0.k``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.precision import wide

Edge = tuple[str, str]
"""A writer and a reader, by their names."""
Values = Mapping[str, Tensor]
"""What was at some sites in a run, each [batch, pos, ...]."""
INPUT = "blocks.0.hook_resid_pre"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """All edges that there can be in a model.

    Attributes:
        writers: by name, in the order in which they run.
        readers: by name, in the order in which they run.
        reach: for each reader, how many writers come before it: the first so many.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    reach: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.reach)

    @property
    def possible(self) -> Tensor:
        """Where an edge can be, [writer, reader]."""
        return torch.arange(len(self.writers))[:, None] < torch.tensor(self.reach)

    def places(self, edges: Iterable[Edge]) -> list[tuple[int, int]]:
        """Where edges are in a table [writer, reader]."""
        writers = {name: at for at, name in enumerate(self.writers)}
        readers = {name: at for at, name in enumerate(self.readers)}
        return [(writers[writer], readers[reader]) for writer, reader in edges]

    def nodes_of(self, reader: str) -> list[str]:
        """Whom a reader reads for: its head, all heads of its group, its MLP, or the logits."""
        node, _, role = reader.partition(".")
        if not role.startswith("kv"):
            return [reader.rpartition(".")[0] if role else node]
        heads = [name for name in self.writers if name.startswith(f"{node}.")]
        groups = [name for name in self.readers if re.fullmatch(rf"{node}\.kv\d+\.k", name)]
        size, number = len(heads) // len(groups), int(role[2:].partition(".")[0])
        return heads[number * size : (number + 1) * size]

    def connected(self, edges: Iterable[Edge]) -> list[Edge]:
        """Those edges that lie on a path from the input to the logits."""
        left = list(edges)
        feeds = {reader: self.nodes_of(reader) for reader in {reader for _, reader in left}}
        order = {name: at for at, name in enumerate(self.readers)}
        fed, used = {"input"}, {"logits"}
        for writer, reader in sorted(left, key=lambda edge: order[edge[1]]):
            if writer in fed:
                fed.update(feeds[reader])
        for writer, reader in sorted(left, key=lambda edge: -order[edge[1]]):
            if used.intersection(feeds[reader]):
                used.add(writer)
        return [(w, r) for w, r in left if w in fed and used.intersection(feeds[r])]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A block: how it reads and writes, and its places among readers and writers.

    Attributes:
        number: which block.
        first: the place of its first head among the writers.
        heads: how many heads it has.
        shared: how many keys and values they have.
        row: the place of its first query among the readers; keys, values and the MLP follow.
        mlp_site: where the MLP reads; empty if there is no MLP.
        mlp_reach: how many writers come before the MLP.
        norm: through which heads read, if there is one.
        branch: what attention adds.
    """

    number: int
    first: int
    heads: int
    shared: int
    row: int
    mlp_site: str
    mlp_reach: int
    norm: ip.Formula | None
    branch: ip.Branch

    def site(self, name: str) -> str:
        """The full name of a site of this block."""
        return f"blocks.{self.number}.{name}"

    @property
    def mlp_row(self) -> int:
        """The place of the MLP among the readers."""
        return self.row + self.heads + 2 * self.shared

    @property
    def rows(self) -> dict[str, slice]:
        """The places of queries, keys and values among the readers."""
        starts = {"q": self.row, "k": self.row + self.heads}
        starts["v"] = starts["k"] + self.shared
        counts = {"q": self.heads, "k": self.shared, "v": self.shared}
        return {role: slice(start, start + counts[role]) for role, start in starts.items()}

    @property
    def shares_norm(self) -> bool:
        """Whether the MLP reads what the norm of attention returns, and not the stream."""
        return bool(self.mlp_site) and not self.mlp_site.endswith("hook_mlp_in")

    @property
    def made(self) -> str:
        """Where attention is as it is added to the stream, but for a multiplier."""
        return self.site("ln1_post.hook_normalized" if self.branch.norm else "attn.hook_out")


@dataclass(slots=True, eq=False)
class Wiring:
    """A model's graph, with the sites and weights behind it.

    Attributes:
        model: whose.
        graph: its nodes and edges.
        layers: its blocks.
    """

    model: ip.TransformerModel
    graph: Graph
    layers: list[Layer]

    @property
    def final(self) -> str:
        """The site of the final stream."""
        return self.layers[-1].site("hook_resid_post")

    @property
    def sites(self) -> list[str]:
        """Where one sees what is written."""
        names = [INPUT]
        for layer in self.layers:
            names += layer.branch.sites
            names += [layer.site("hook_mlp_out")] if layer.mlp_site else []
        return names

    def reference(
        self, tokens: Tensor, return_type: str | None = None, **wanted: Any
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Run the model once; the writers must add up to what the readers read.

        Args:
            tokens: [batch, pos].
            return_type: ``logits``, or None to end the run after the last block.
            wanted: what asks for few logits alone: see `ip.Batch.last_logits`.
        """
        names = [*self.sites, self.final]
        for layer in self.layers:
            names += [layer.site("hook_attn_in"), layer.branch.site, layer.made]
            names += [layer.mlp_site] if layer.mlp_site and not layer.shares_norm else []
        with torch.no_grad():
            logits, cache = self.model.run_with_cache(
                tokens, names_filter=names, return_type=return_type, **wanted
            )
        found = {name: cache[name] for name in names}
        self._prove(found)
        return logits, found

    def _prove(self, found: Values) -> None:
        total = wide(found[INPUT])
        for layer in self.layers:
            before, added = total, found[layer.branch.site]
            same(before, found[layer.site("hook_attn_in")], layer.site("hook_attn_in"))
            same(found[layer.made] * layer.branch.multiplier, added, layer.branch.site)
            total = before + added
            if layer.mlp_site:
                read = total if layer.mlp_reach > layer.first else before
                if not layer.shares_norm:
                    same(read, found[layer.mlp_site], layer.mlp_site)
                total = total + found[layer.site("hook_mlp_out")]
        same(total, found[self.final], self.final)

    def difference(self, site: str, one: Values, other: Values, some: slice) -> Tensor:
        """How far a value in one run is above that in another, at some tokens of the batch, [token, ...]."""
        return _tokens(one[site], some) - _tokens(other[site], some)

    def heads(
        self, layer: Layer, one: Values, other: Values, some: slice, out: Tensor | None = None
    ) -> Tensor:
        """What each head adds to the stream in one run more than in another, [head, token, d_model].

        Behind a norm, a head adds its part at the scale that this run has, so that the parts add up.

        Args:
            layer: whose heads.
            one: the values of a run.
            other: those of the other.
            some: which tokens of the batch.
            out: where to put it.
        """
        z, writes = layer.branch.units, layer.branch.writes
        weight = writes.through(wide(layer.branch.weight))
        if not writes.scale_site:
            return torch.bmm(self.difference(z, one, other, some).transpose(0, 1), weight, out=out)
        per, less = (1 / _tokens(run[writes.scale_site], some) for run in (one, other))
        moved = _tokens(one[z], some) * per[..., None] - _tokens(other[z], some) * less[..., None]
        made = torch.bmm(moved.transpose(0, 1), weight, out=out)
        bias = writes.through(wide(layer.branch.bias))
        return made.add_((per - less) * bias / layer.heads)


def wiring(model: ip.TransformerModel) -> Wiring:
    """The wiring of a model; `ip.Unsupported` says why it cannot be followed."""
    stream, added = model.stream, dict[int, dict[str, ip.Branch]]()
    for branch in stream.branches:
        added.setdefault(branch.layer, {})[branch.kind] = branch
    layers: list[Layer] = []
    writers, readers, reach = ["input"], list[str](), list[int]()
    for number in range(len(stream)):
        at = f"blocks.{number}."
        norm = stream.norm(f"{at}ln1")
        _need(model, at, norm, added[number])
        branch, mlp = added[number]["attn"], added[number].get("mlp")
        heads, first = len(branch.weight), len(writers)
        shared = _shared(model, branch.named("W_K"))
        layers.append(
            Layer(
                number=number,
                first=first,
                heads=heads,
                shared=shared,
                row=len(readers),
                mlp_site=_mlp_site(model, number) if mlp else "",
                mlp_reach=first if mlp and mlp.step == branch.step else first + heads,
                norm=norm,
                branch=branch,
            )
        )
        unit = "h" if heads == shared else "kv"
        readers += [f"a{number}.h{head}.q" for head in range(heads)]
        readers += [f"a{number}.{unit}{head}.{role}" for role in "kv" for head in range(shared)]
        reach += [first] * (heads + 2 * shared)
        writers += [f"a{number}.h{head}" for head in range(heads)]
        if layers[-1].mlp_site:
            readers.append(f"m{number}")
            reach.append(layers[-1].mlp_reach)
            writers.append(f"m{number}")
    reach.append(len(writers))
    graph = Graph(writers=tuple(writers), readers=(*readers, "logits"), reach=tuple(reach))
    return Wiring(model, graph, layers)


def forward_of(part: Any) -> Callable[[Tensor], Tensor]:
    """The forward of the module behind a part, past all hooks; a part may be the module itself."""
    found: Callable[[Tensor], Tensor] = getattr(part, "module", part).forward
    return found


def same(one: Tensor, other: Tensor, what: str, dtype: torch.dtype | None = None) -> None:
    """Refuse a model in which two values differ that must be the same.

    Args:
        one: a value.
        other: the same, found in another way.
        what: its site.
        dtype: in which the model computed it, if not that of ``other``.
    """
    loose = torch.finfo(dtype or other.dtype).eps ** 0.5
    if not float((one - other).abs().max()) <= loose * float(other.abs().max()):
        raise ip.Unsupported(
            f"the parts of the stream do not add up at {what!r}: norms, gates or paths stand between writers and "
            "readers that edges do not know of. Patch whole sites of this model instead: ip.attribution_patching, "
            "ip.activation_patching."
        )


def _shared(model: ip.TransformerModel, weight: Tensor) -> int:
    """How many keys heads [head, ...] have: a model from scratch repeats those that are shared."""
    heads = len(weight)
    if (weight[1:] != weight[:-1]).flatten(1).any(1).all():
        return heads
    count = model.cfg.n_key_value_heads or heads
    times = heads // count
    repeated = weight[::times].repeat_interleave(times, 0)
    return count if torch.equal(weight, repeated) else heads


def _tokens(value: Tensor, some: slice) -> Tensor:
    return wide(value.flatten(0, 1)[some])


def _need(
    model: ip.TransformerModel, at: str, norm: ip.Formula | None, added: Mapping[str, ip.Branch]
) -> None:
    inside = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z", "hook_attn_in")
    inputs = ("hook_q_input", "hook_k_input", "hook_v_input", "attn.hook_result")
    needed = [f"{at}{name}" for name in (*inside, "hook_attn_out", *inputs)]
    needed += [norm.scale_site] if norm else []
    needed += added["attn"].sites if "attn" in added else []
    for name in needed:
        if name not in model.hook_dict:
            why = model.sites.absent.get(name, "it was not found")
            raise ip.Unsupported(
                f"edges lead from head to head, and this model has no {name!r}: {why}. Patch whole sites of it "
                "instead: ip.attribution_patching, ip.activation_patching."
            )


def _mlp_site(model: ip.TransformerModel, number: int) -> str:
    """Where the MLP of a block reads: the stream, or what the norm of attention returns."""
    if f"blocks.{number}.hook_mlp_in" in model.hook_dict:
        return f"blocks.{number}.hook_mlp_in"
    mlp = model.blocks[number].mlp.module
    path = next(name for name, part in model.module.named_modules() if part is mlp)
    return f"{path}.input"
