"""What discovery finds in a model, as plain data: towers of blocks, and where in each the parts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from interpose.models.reach.lenses import Times
from interpose.sites.grammar import Tail
from interpose.sites.lens import Lens
from interpose.taps import values

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one run of the probe had, so that an axis can be told by what its size follows."""

    batch: int
    lengths: tuple[int, ...] = ()
    """Of its texts, in tokens; none where it had no text."""
    shapes: dict[tuple[str, Tail], Shape] = field(default_factory=dict)
    """Of values by path and tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a value is reached in the live model: a module, which of its values, and the lens to see it through."""

    path: str
    module: nn.Module
    tail: Tail
    lens: Lens | None = None
    shape: tuple[int, ...] = ()
    """Of the module's value in the probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm, and whether its formula is the usual one (else ``why_not`` says what was found)."""

    endpoint: Endpoint
    centred: bool = False
    eps: float = 0.0
    eps_name: str = ""
    """The attribute of the module that it was read from."""
    why_not: str = ""
    reads_sum: bool = False
    """Whether it stands in the stream (post-norm blocks), rather than before a branch."""


@dataclass(slots=True, kw_only=True)
class Attention:
    """One attention computation of a block."""

    name: str
    """``attn``, or ``cross_attn`` where keys come from another tower."""
    path: str
    core: nn.Module
    scores_ndim: int = 4
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Of queries, keys and scores in the probe (``q``, ``k``, ``scores``)."""
    other_softmax: Shape | None = None
    """Of a softmax in the same module that is not of its scores, so that these cannot be seen apart."""
    by: str
    """``interface``, ``kernel`` (a fused kernel call) or ``softmax`` (by hand)."""
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_value: int
    projections: dict[str, Endpoint] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    """Projections that were told by their names: nothing the kernel gets has their numbers."""
    unturned: set[str] = field(default_factory=set)
    """Projections whose values reach the kernel as they are: nothing rotates or normalises them."""
    direct: set[str] = field(default_factory=set)
    """Projections that read the stream (or what its norm made of it) and nothing else."""
    given: Endpoint | None = None
    """What the attention module itself is given, after the norm if one stands before it."""
    out: Endpoint | None = None
    """The output projection's input, by head."""
    out_shape: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class FeedForward:
    """The MLP of a block, or its mixture of experts."""

    path: str
    given: Endpoint | None = None
    """What the MLP itself is given, after the norm if one stands before it."""
    pre: Endpoint | None = None
    pre_linear: Endpoint | None = None
    down: Endpoint | None = None
    router: Endpoint | None = None
    router_leaves: dict[str, tuple[values.Leaf, Shape]] = field(default_factory=dict)
    experts: Endpoint | None = None
    expert_arguments: tuple[str, str] | None = None
    """What its experts call the chosen ones and their weights, if they take them."""


@dataclass(slots=True, kw_only=True)
class Block:
    """One block of a tower."""

    index: int
    path: str
    module: nn.Module
    shape: tuple[int, ...]
    """Of the stream in the probe."""
    sites: dict[str, Endpoint] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    mlp: FeedForward | None = None
    mixer: str | None = None
    norms: dict[str, Norm] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    undecided: str = ""
    """Why nothing but its input and output could be told, if so."""
    flat_in_order: bool = False
    """Whether values with batch and positions in one axis have row after row in it."""
    sums: list[tuple[str, list[str], str]] = field(default_factory=list)
    """Additions that hold: the stream before, what is added, the stream after."""
    kept: dict[str, float] = field(default_factory=dict)
    """What the stream is multiplied with when something is added, by what is added, where that is not 1."""
    weights: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    """Weights by name (``attn.W_Q``), of a model that has them in this form; else they are seen through its modules."""


@dataclass(slots=True, kw_only=True)
class Tower:
    """A stack of blocks: the decoder, an encoder, a vision tower."""

    prefix: str
    path: str
    blocks: list[Block]
    final_norm: Norm | None = None


@dataclass(slots=True, kw_only=True)
class Anatomy:
    """All of a model."""

    tokens: tuple[int, int] = (0, 0)
    """How many texts of how many tokens the probe had."""
    sizes: Sizes | None = None
    """The same with every length; None for one that was not probed."""
    reads_text: bool = True
    """Whether its own input is text, not images or sound."""
    again: Callable[[], Sizes | None] | None = None
    """Runs another probe, of other sizes, for axes that the first leaves open."""
    towers: list[Tower] = field(default_factory=list)
    embed: Endpoint | None = None
    pos_embed: Endpoint | None = None
    embeddings: dict[str, Endpoint] = field(default_factory=dict)
    """Every embedding by its site's name, which begins with the prefix of the tower it feeds."""
    unembed: Endpoint | None = None
    absent: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    """Weights outside the blocks, as in `Block`."""

    def flags(self) -> list[tuple[nn.Module, str, Any]]:
        """Attributes of modules that were read, with what they said."""
        norms = [norm for t in self.towers for block in t.blocks for norm in block.norms.values()]
        norms += [tower.final_norm for tower in self.towers if tower.final_norm is not None]
        return [(n.endpoint.module, n.eps_name, n.eps) for n in norms if n.eps_name]

    @property
    def rests_on_numbers(self) -> bool:
        """Whether it says something that other weights could change: a multiplier, or a stream that was not found."""
        blocks = [block for tower in self.towers for block in tower.blocks]
        endpoints = [endpoint for block in blocks for endpoint in block.sites.values()]
        return any(isinstance(endpoint.lens, Times) for endpoint in endpoints) or not all(
            block.sums and not block.kept for block in blocks
        )
