"""Hook points: a site as hooks and users hold it, with what TransformerLens's HookPoint offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from interpose.engine.hooks import Hook
from interpose.errors import SiteNotFound, Unsupported
from interpose.sites.axes import TEXT, first_position, position_axis, sequence_of, told_by_size
from interpose.taps.context import Whereabouts

if TYPE_CHECKING:
    from interpose.engine.model import Model
    from interpose.engine.scope import Binding


class Window(NamedTuple):
    """The positions that an axis of a value holds: ``length`` of them, the first being ``first``.

    ``sequence``: what they count. ``offset``: the position of the forward pass's first token. ``prompt``:
    how many are the prompt's, of a text that is being generated; all of them in other sequences.
    """

    first: int
    length: int
    offset: int
    prompt: int | None
    sequence: str | None = "queries"

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.length

    @property
    def total(self) -> int:
        """What negative numbers count from: the end of the prompt, if text is being generated."""
        return self.end if self.prompt is None else self.prompt

    @property
    def is_all(self) -> bool:
        """Whether this is the whole sequence, so that what is not here is nowhere."""
        whole = self.prompt is None and self.offset == 0 and self.first == 0
        return whole or self.sequence not in TEXT


class HookPoint:
    """A view of a site: the name it was asked by, its layer, scratch space, and the model's hooks on it.

    Views of one site share ``ctx``, a dictionary for hooks to leave things in. ``call`` is the
    number of this call of the module within the forward pass (None outside a hook, or where it
    cannot be known). ``axes`` are the names of the value's axes, where they are known.
    ``offset`` is the position of the forward pass's first token in the whole text: more than 0 after
    a KV cache. ``prompt`` is how many positions belong to the prompt, while text is being generated.
    ``given`` has the tokens and masks of the forward pass, by their names (``input_ids``).
    """

    __slots__ = (
        "axes", "call", "canonical", "given", "idle", "model", "module", "name", "part", "picked",
        "where",
    )  # fmt: skip

    def __init__(
        self,
        model: Model,
        name: str,
        canonical: str,
        module: nn.Module,
        call: int | None = None,
        axes: tuple[str, ...] = (),
        where: Whereabouts = Whereabouts(),  # noqa: B008 - never changed
        given: dict[str, Any] | None = None,
        part: Any = None,
    ) -> None:
        self.model = model
        self.name = name
        self.canonical = canonical
        self.module = module
        self.call = call
        self.axes = axes
        self.where = where
        self.given = {} if given is None else given
        self.part = part
        self.idle = ""  # why a selector or an edit found nothing of its own here
        self.picked: Tensor | None = None  # the positions that a selector took, where it chose some

    @property
    def offset(self) -> int:
        """The position of the forward pass's first token in the whole text."""
        if self.where.offset is None:
            raise Unsupported(
                f"{self.name!r}: this forward pass goes on from a state that does not say how many positions "
                "it has seen, so where the pass begins is not known. Generate with model.generate(...), "
                "which counts them, or run the whole text in one pass."
            )
        return self.where.offset

    @property
    def prompt(self) -> int | None:
        """How many positions belong to the prompt, while text is being generated."""
        return self.where.prompt

    @property
    def pos_axis(self) -> int | None:
        """The axis of positions, where the value's axes have names and one counts positions."""
        return position_axis(self.axes)

    def sequence(self, axis: int) -> str | None:
        """What an axis of a value here counts: see `interpose.sites.axes`."""
        if not self.axes:
            return "queries"
        return sequence_of(self.axes[axis], self.canonical, encodes=self.where.encodes)

    def window(self, shape: Sequence[int], axis: int) -> Window:
        """The positions that an axis of a value here holds."""
        size = shape[axis]
        sequence = self.sequence(axis)
        if sequence not in TEXT:
            return Window(0, size, 0, size, sequence)
        offset, length = self.offset, self.where.length
        sequence = told_by_size(sequence, size, offset, length)
        if sequence == "keys" and "query" in self.axes:
            length = shape[self.axes.index("query")]
        cut = self.canonical.startswith("unembed.")  # often only the last logits are computed
        first = first_position(sequence, size, offset, length, last=cut)
        if sequence == "keys" and length is not None:
            size = min(size, offset + length - first)
        return Window(first, size, offset, self.prompt, sequence)

    def selected(self, value: Tensor) -> Tensor | None:
        """The part of a value that the hook's selector means; None if there is none in this pass."""
        return value if self.part is None else self.part.cut(value, self)

    @property
    def ctx(self) -> dict[Any, Any]:
        """Scratch space, kept until `clear_context`."""
        return self.model._contexts.setdefault(self.canonical, {})

    @ctx.setter
    def ctx(self, value: dict[Any, Any]) -> None:
        self.model._contexts[self.canonical] = value

    def clear_context(self) -> None:
        """Empty the scratch space."""
        self.ctx.clear()

    def layer(self) -> int:
        """The first number in the name: 5 for ``blocks.5.attn``."""
        for segment in self.canonical.split("."):
            if segment.isdigit():
                return int(segment)
        raise ValueError(f"{self.name!r} has no layer number in it.")

    @property
    def fwd_hooks(self) -> list[Handle]:
        """The model's own forward hooks here, in order."""
        return self._handles("fwd")

    @property
    def bwd_hooks(self) -> list[Handle]:
        """The model's own backward hooks here, in order."""
        return self._handles("bwd")

    def _handles(self, direction: str) -> list[Handle]:
        found = (h for h in self.model.handles_here() if self.canonical in h.canonicals)
        return [h for h in found if h.direction in (direction, "both")]

    def add_hook(
        self,
        hook: Callable[..., Any],
        dir: str = "fwd",  # noqa: A002 - TransformerLens's name
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Handle:
        """Add a function to this site, for all threads, until it is removed."""
        return self.model.add_hook(
            self.name, hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend
        )

    def add_perma_hook(self, hook: Callable[..., Any], dir: str = "fwd") -> Handle:  # noqa: A002
        """Add a function that `remove_hooks` leaves in place."""
        return self.add_hook(hook, dir=dir, is_permanent=True)

    def has_hooks(
        self,
        dir: str = "both",  # noqa: A002
        including_permanent: bool = True,
        level: int | None = None,
    ) -> bool:
        """Whether the model has hooks of its own here."""
        return any(
            h.matches(dir, including_permanent, level) for h in self.fwd_hooks + self.bwd_hooks
        )

    def remove_hooks(
        self,
        dir: str = "fwd",  # noqa: A002
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove the model's own hooks here."""
        for handle in self.fwd_hooks + self.bwd_hooks:
            if handle.matches(dir, including_permanent, level):
                handle.remove()

    def __repr__(self) -> str:
        return f"HookPoint({self.name!r}, {len(self.fwd_hooks)} fwd, {len(self.bwd_hooks)} bwd)"


class HookDict(Mapping[str, HookPoint]):
    """Hook points by site name; lists the canonical names, takes any."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getitem__(self, name: str) -> HookPoint:
        site = self._model.tree.site(name)
        return HookPoint(self._model, name, site.canonical, site.module, axes=site.axes)

    def __contains__(self, name: object) -> bool:
        try:
            self._model.tree.site(str(name))
        except SiteNotFound:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return (site.name for site, _ in self._model.tree.select(None))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Handle:
    """A hook that belongs to a model: switch it off, on, or take it away."""

    def __init__(
        self,
        hook: Hook,
        bindings: list[Binding],
        release: Callable[[Handle], None],
        *,
        is_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        self.hook = hook
        self.bindings = bindings
        self.direction = bindings[0].direction if len(bindings) == 1 else "both"
        self.is_permanent = is_permanent
        self.level = level
        self._release = release

    @property
    def canonicals(self) -> frozenset[str]:
        """The sites it is at, by canonical name."""
        return frozenset(listener.site.canonical for listener in self.bindings[0].listeners)

    @property
    def id(self) -> str:
        """The hook's id."""
        return self.hook.id

    @property
    def user_hook(self) -> Any:
        """What the user gave: the function, or the hook object."""
        return getattr(self.hook, "function", self.hook)

    @property
    def context_level(self) -> int | None:
        """The level it was added with, in TransformerLens's words."""
        return self.level

    @property
    def fired(self) -> int:
        """How often it has run."""
        return sum(binding.fired for binding in self.bindings)

    @property
    def enabled(self) -> bool:
        """Whether it runs."""
        return self.hook.enabled

    def enable(self) -> None:
        """Let it run again."""
        self.hook.enable()

    def disable(self) -> None:
        """Keep it, but do not run it."""
        self.hook.disable()

    def remove(self) -> None:
        """Take it off the model; doing so twice is no error."""
        self._release(self)

    def matches(self, direction: str, including_permanent: bool, level: int | None) -> bool:
        """Whether a removal with these arguments means this one."""
        return (
            (self.direction == "both" or direction in ("both", self.direction))
            and (including_permanent or not self.is_permanent)
            and (level is None or level == self.level)
        )

    def __repr__(self) -> str:
        state = "" if self.enabled else ", disabled"
        where = ", ".join(sorted(self.canonicals)[:3]) + (
            ", ..." if len(self.canonicals) > 3 else ""
        )
        return f"Handle({self.hook.label} at {where}, {self.direction}, fired {self.fired} times{state})"
