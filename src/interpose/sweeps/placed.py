"""Variants whose sites are known: the first block each changes, and what it does where."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from interpose.engine.hook_calls import call_hook
from interpose.engine.hooks import Hook, TorchHook, as_hook, skip
from interpose.engine.points import HookPoint
from interpose.sites.tree import Site

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@dataclass(frozen=True, slots=True)
class SiteAct:
    """What is done at a site."""

    hook: Hook
    site: Site

    @property
    def layer(self) -> int:
        """The block that it is in; -1 for none."""
        return -1 if self.site.layer is None else self.site.layer

    def on_value(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """The new value; None for what was made of the given one in place."""
        hook.name, hook.part = self.site.name, self.site.part
        made: Tensor | None = call_hook(self.hook, self.hook.on_value, value, hook)
        return made


@dataclass(frozen=True, slots=True)
class Placed:
    """A variant whose sites are known: the first block it changes, and what it does by site."""

    layer: int
    acts: dict[str, list[SiteAct]]

    @staticmethod
    def of(
        layer: int, own: Sequence[SiteAct], shared: Sequence[SiteAct] = (), *, earlier: bool = True
    ) -> Placed:
        """A variant's own acts behind those of all.

        Args:
            layer: the first block it changes.
            own: what it does.
            shared: what all do.
            earlier: whether it runs through the blocks before, too; else what all do there is in the stream that its
                rows begin with.
        """
        acts: dict[str, list[SiteAct]] = {}
        for act in (*shared, *own):
            if earlier or act.layer < 0 or act.layer >= layer:
                acts.setdefault(act.site.canonical, []).append(act)
        return Placed(layer, acts)

    @property
    def sites(self) -> tuple[str, ...]:
        """The canonical names of the sites at which it does something."""
        return tuple(self.acts)


def acts_of(model: TransformerModel, item: Any) -> list[SiteAct]:
    """What an edit, or a pair of a site and a function, does at each of its sites.

    Args:
        model: whose sites are meant.
        item: as in ``hooks=``.
    """
    hook = as_hook(item)
    if isinstance(hook, (skip, TorchHook)) or "fwd" not in hook.directions():
        raise TypeError(
            f"a variant changes values: give edits, or pairs (site, function); got {hook!r}."
        )
    wanted: Any = vars(hook).get("site")
    return [SiteAct(hook, site) for site, _ in model.select(wanted)] if hook.enabled else []


def by_itself(several: Sequence[Sequence[SiteAct]]) -> tuple[str, str] | None:
    """The plan of variants of which one looks at another site of its own run, and why; else None.

    Args:
        several: what all variants do, and what each does.
    """
    for act in itertools.chain(*several):
        condition = getattr(act.hook, "when", None)
        if condition is not None and condition.where is not None:
            return "one per cell", f"{act.hook!r} looks at another site of its own run"
    return None
