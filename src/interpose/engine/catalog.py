"""`model.sites`: what can be hooked, with shapes once they are known, printed as a folded tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from interpose.render.html import html_table
from interpose.render.text import MOST_ROWS, table
from interpose.sites.grammar import Tail
from interpose.sites.tree import Filter, ModuleTree, Site, children_of

Seen = Mapping[Any, tuple[torch.Size, torch.dtype]]


class Sites(Mapping[str, Site]):
    """Sites by name. Lists the output of every module; takes any name, inputs and elements too.

    ``model.sites.select("layer*.0.conv?")`` narrows it down by a glob, a regex or a callable.
    """

    _header: tuple[str, str, str] = ("site", "module", "value")

    def __init__(
        self,
        tree: ModuleTree,
        seen: Seen,
        calls: Mapping[nn.Module, int],
        chosen: list[Site] | None = None,
    ) -> None:
        self._tree = tree
        self._seen = seen
        self._calls = calls
        self._chosen = chosen
        self._indexed = -1

    def select(self, wanted: Filter) -> Sites:
        """The sites that a filter means."""
        chosen = [site for site, _ in self._tree.select(wanted)]
        return Sites(self._tree, self._seen, self._calls, chosen)

    def __getitem__(self, name: str) -> Site:
        return self._informed(self._tree.site(name))

    def __iter__(self) -> Iterator[str]:
        return (site.name for site in self._all())

    def __len__(self) -> int:
        return sum(1 for _ in self._all())

    def _all(self) -> Iterator[Site]:
        chosen = self._chosen
        if chosen is None:
            chosen = [site for site, _ in self._tree.select(None)]
        for site in chosen:
            leaves = self._leaves(site)
            if len(leaves) <= 1:
                yield self._informed(site)
            for leaf in leaves if len(leaves) > 1 else ():
                yield self._informed(self._tree.site(site.element(leaf)))

    def _leaves(self, site: Site) -> list[tuple[int | str, ...]]:
        """The tensors seen at a site."""
        if self._indexed != len(self._seen):
            self._by_place: dict[tuple[str, str], list[tuple[int | str, ...]]] = {}
            for path, port, leaf in self._seen:
                self._by_place.setdefault((path, port), []).append(leaf)
            self._indexed = len(self._seen)
        at, there = len(site.tail.leaf), self._by_place.get((site.path, site.tail.port), [])
        return [leaf for leaf in there if leaf[:at] == site.tail.leaf]

    def _informed(self, site: Site) -> Site:
        leaves = self._leaves(site)
        shape, dtype = None, None
        if len(leaves) == 1:
            shape, dtype = self._seen[(site.path, site.tail.port, leaves[0])]
        names = [
            self._tree.spell(path, site.tail)
            for path in (site.path, *self._tree.other_names(site.path))
        ]
        return replace(
            site,
            aliases=tuple(name for name in names if name != site.name),
            shape=None if shape is None else tuple(shape),
            dtype=dtype,
            calls=self._calls.get(site.module),
        )

    def _rows(self) -> list[tuple[str, str, str]]:
        if self._chosen is not None:
            return [
                (site.name, type(site.module).__name__, self._about(site)) for site in self._all()
            ]
        root, known = self._tree.site("").module, dict[Any, int]()
        for depth in (99, 6, 5, 4, 3, 2, 1):
            rows = [("output", type(root).__name__, self._about(self._tree.site("")))]
            rows += self._below(root, "", depth, 1, known)
            if len(rows) <= MOST_ROWS:
                break
        return rows

    def _below(
        self, module: nn.Module, path: str, depth: int, level: int, known: dict[Any, int]
    ) -> Iterator[tuple[str, str, str]]:
        children = [
            (name, child) for name, child in children_of(module).items() if child is not None
        ]
        at = 0
        while at < len(children):
            name, child = children[at]
            end = at + 1
            while (
                name.isdigit()
                and end < len(children)
                and _number(children[end][1], known) == _number(child, known)
            ):
                end += 1
            inner = f"{path}.{name}" if path else name
            label = f"{'  ' * level}{name}" + (
                f" .. {children[end - 1][0]}" if end - at > 1 else ""
            )
            kind = f"{end - at} x {type(child).__name__}" if end - at > 1 else type(child).__name__
            yield label, kind, self._about(self._tree.site(inner))
            if depth > 1:
                yield from self._below(child, inner, depth - 1, level + 1, known)
            elif children_of(child):
                yield f"{'  ' * (level + 1)}...", "", f"model.sites.select('{inner}.**')"
            at = end

    def _about(self, site: Site) -> str:
        leaves = self._leaves(site)
        parts = []
        for leaf in leaves:
            shape, dtype = self._seen[(site.path, site.tail.port, leaf)]
            where = f"{Tail(None, site.tail.port, leaf)} " if len(leaves) > 1 else ""
            parts.append(f"{where}{tuple(shape)} {str(dtype).removeprefix('torch.')}")
        calls = self._calls.get(site.module, 1)
        if calls > 1:
            parts.append(f"called {calls} times")
        if calls == 0:
            parts.append("never called")
        return ", ".join(parts)

    def _title(self) -> str:
        hint = "" if self._seen else "   (shapes after a run or model.scan(inputs))"
        return f"Sites of {self._tree.label}: {len(self)}{hint}"

    def __repr__(self) -> str:
        return table(self._header, self._rows(), title=self._title())

    def _repr_html_(self) -> str:
        rows = [(label.replace("  ", "\u2003"), kind, about) for label, kind, about in self._rows()]
        return html_table(self._header, rows, title=self._title())


def _number(module: nn.Module, known: dict[Any, int]) -> int:
    """The same for modules that print as the same tree; each is looked at once."""
    if id(module) not in known:
        parts = children_of(module).items()
        inner = tuple((name, _number(part, known)) for name, part in parts if part is not None)
        printed = (type(module).__name__, module.extra_repr(), inner)
        known[id(module)] = known.setdefault(printed, len(known))
    return known[id(module)]
