"""Names of a transformer: semantic sites first, the module's own paths below them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from interpose import names
from interpose.errors import AmbiguousSite, NothingMatched, SiteNotFound
from interpose.explain.missing import LONG, explain_missing
from interpose.explain.words import nearest
from interpose.files.schema import shown
from interpose.models.naming.table import Table
from interpose.names import Speller
from interpose.sites.grammar import Tail, compile_glob, is_glob
from interpose.sites.tree import ModuleTree, Site, is_class, join


class SemanticTree(ModuleTree):
    """A module tree whose sites also have the names of what they mean. Discovery waits until one is asked for."""

    def __init__(self, root: nn.Module, discover: Callable[[], Table]) -> None:
        self._speller: Speller | None = None
        self._asked: dict[str, Site] = {}
        self._selected: dict[str, list[tuple[Site, bool]]] = {}
        super().__init__(root)
        self._discover = discover
        self._table: Table | None = None
        self._meanings: dict[str, str] = {}

    @property
    def table(self) -> Table:
        """The sites that discovery found; found once."""
        if self._table is None:
            self._table = self._discover()
        return self._table

    def site(self, name: str) -> Site:
        """The site a name means, by any system's word for it."""
        asked = self.offered.get(name) or self._asked.get(name)
        if asked is not None:
            return asked
        if not names.looks_semantic(name) and self.leads_somewhere(name):
            return super().site(name)
        found = self._semantic(name)
        if found is None:
            if name.removeprefix("hook_") in names.kinds():
                raise AmbiguousSite(
                    f"{name!r} is in every block; say which: ({name!r}, 5), or for all of them "
                    f"{names.of_kind(name, '*')!r}."
                )
            raise SiteNotFound(self._why_not(name))
        self._asked[name] = found
        return found

    def _semantic(self, name: str) -> Site | None:
        stem, mark, call = name.partition("#")
        if mark and not call.isdigit():
            return None
        key = self._key(stem)
        found = self.table.sites.get(key) or self.offered.get(key)
        if found is None:
            return None
        tail = Tail(int(call), found.tail.port, found.tail.leaf) if mark else found.tail
        canonical = f"{key}#{call}" if mark else key
        return replace(found, name=name, canonical=canonical, stem=stem, tail=tail)

    def spelling(self, asked: Any) -> str:
        """The canonical spelling of a name or short form."""
        return self._spell(asked)

    def speller(self) -> Speller:
        """The names that are known so far, as data."""
        return Speller() if self._table is None else self._spell

    @property
    def _spell(self) -> Speller:
        if self._speller is None:
            primary = {name: site.primary for name, site in self.table.sites.items()}
            self._speller = Speller(primary, dict(self.table.absent), tuple(self.offered))
        return self._speller

    def _key(self, name: str) -> str:
        """The canonical spelling, layers counted from the end included."""
        return self._spell.key(name)

    def meaning(self, name: str) -> str | None:
        """The semantic name of a module path, if discovery knows one."""
        if self._table is None:
            return None
        if not self._meanings:
            sites = self._table.sites.values()
            self._meanings = {path: s.canonical for s in sites for path in s.aliases}
        return self._meanings.get(name)

    def forget(self) -> None:
        """Discover again when next asked."""
        super().forget()
        self._table = self._speller = None
        self._meanings.clear()
        self._asked.clear()
        self._selected.clear()

    @property
    def offered(self) -> Mapping[str, Site]:
        """Sites that others make, by canonical name."""
        return self._offered

    @offered.setter
    def offered(self, sites: Mapping[str, Site]) -> None:
        self._offered = (
            sites  # what was found by name so far may be more or less than what there is now
        )
        self._speller = None
        self._asked = {}
        self._selected = {}

    def everything(self) -> Iterator[tuple[str, Site]]:
        """All sites by canonical name: those that discovery found, and those that others offer."""
        return chain(self.table.sites.items(), self.offered.items())

    def withdraw(self, name: str, reason: str) -> None:
        """Offer a site no more."""
        self.table.sites.pop(name, None)
        self.table.absent[name] = reason
        self._speller = None
        self._asked.clear()
        self._selected.clear()

    def blocks(self, prefix: str = "") -> int:
        """How many blocks a tower has."""
        return self._spell.blocks(prefix)

    def leads_somewhere(self, name: str) -> bool:
        """Whether a name is one of a site."""
        if names.looks_semantic(name):
            return self._semantic(name) is not None
        return name in self.offered or super().leads_somewhere(name)

    def select(self, wanted: object) -> list[tuple[Site, bool]]:
        """Sites that a filter means; patterns and callables range over canonical names."""
        if isinstance(wanted, str) and (known := self._selected.get(wanted)) is not None:
            return known
        if wanted is None:
            if not self.table.sites:
                return super().select(None)
            return [(site, False) for site in self.table.sites.values() if site.primary]
        if names.is_short_form(wanted):
            return [(self.site(self.spelling(wanted)), True)]
        if isinstance(wanted, str):
            return self._select_name(wanted)
        if isinstance(wanted, re.Pattern):
            return self._accepted(lambda name: bool(wanted.search(name)), wanted)
        if callable(wanted) and not isinstance(wanted, (nn.Module, Site)) and not is_class(wanted):
            return self._accepted(wanted, wanted)
        if isinstance(wanted, Iterable) and not isinstance(wanted, (nn.Module, Site)):
            found: dict[str, tuple[Site, bool]] = {}
            for part in wanted:
                for site, outright in self.select(part):
                    join(found, site, outright)
            if not found:
                return super().select([])
            return list(found.values())
        return super().select(wanted)

    def _select_name(self, asked: str) -> list[tuple[Site, bool]]:
        name = asked
        if not is_glob(name):
            if len(mine := self._spell.ending(name) if self.offered else []) > 1:
                return [(self.offered[one], False) for one in mine]
            kind = name.removeprefix("hook_")
            if kind in names.kinds() and not super().leads_somewhere(name):
                main = "" if self.blocks() else "decoder."
                if not self.blocks(main):
                    self._must_be_in_one_tower(kind)
                name = main + names.of_kind(kind, "*")
            else:
                found = [(self.site(name), True)]
                if name in self._asked:
                    self._selected[name] = found
                return found
        regex = compile_glob(names.canonical(name))
        hits = [(s, False) for key, s in self.everything() if regex.fullmatch(key)]
        if hits:
            self._selected[asked] = hits
            return hits
        if names.looks_semantic(name):
            raise NothingMatched(self._nothing(f"the glob {shown(name, LONG)}"))
        return super().select(name)

    def _must_be_in_one_tower(self, kind: str) -> None:
        """Say in which of several towers a kind of site is, where none of them is the main one."""
        ending = names.of_kind(kind, 0)
        there = [
            repr(f"{n.removesuffix(ending)}{names.of_kind(kind, '*')}")
            for n in self.table.sites
            if n.endswith(f".{ending}")
        ]
        if there:
            raise NothingMatched(
                f"{self.label} has several towers, each with its own {kind!r}: {' and '.join(there)}. Say which."
            )

    def _accepted(self, accepts: Callable[[str], bool], asked: object) -> list[tuple[Site, bool]]:
        if not self.table.sites:
            return super().select(asked)
        hits = [site for name, site in self.everything() if accepts(name)]
        if not hits:
            raise NothingMatched(self._nothing(f"the filter {getattr(asked, '__name__', asked)!r}"))
        return [(site, False) for site in hits]

    def _nothing(self, what: str) -> str:
        some = [name for name in self.table.sites if not name.startswith("blocks.")][:3]
        some += [name for name in self.table.sites if name.startswith("blocks.0.")][:5]
        return (
            f"{what} matches no site in {self.label}.\n  sites are: {', '.join(some)}, ... "
            f"({len(self.table.sites)} in all)\n  `*` stays within one dotted segment and `**` spans "
            "many.   (list them: model.sites)"
        )

    def _why_not(self, name: str) -> str:
        """Walk the name segment by segment; say what is there, or why the site is not."""
        key = self._key(name.partition("#")[0])
        reason = self.table.absent.get(key)
        if reason is not None:
            return f"{self.label} has no {name!r}: {reason}."
        if not names.looks_semantic(name) and self.walk(name)[1]:
            return explain_missing(self, name)
        segments, here = key.split("."), ""
        for at, segment in enumerate(segments):
            children = self._children(here)
            if segment not in children:
                break
            here = ".".join(segments[: at + 1])
        else:
            children = self._children(here)
        some = ", ".join(children[:12]) + (f", ... ({len(children)})" if len(children) > 12 else "")
        if children and all(child.isdigit() for child in children):
            some = f"{len(children)} entries (0..{len(children) - 1})"
        where = repr(here) if here else self.label
        near = nearest(key, [name for name, _ in self.everything()], 0.5)
        hint = f"did you mean {near!r}?" if near else "no name is close to it."
        return (
            f"no site {shown(name, LONG)} in {self.label}.\n  {where} has: {some}\n  {hint}   "
            "(list them: model.sites)"
        )

    def _children(self, path: str) -> list[str]:
        start = f"{path}." if path else ""
        found = {
            n[len(start) :].split(".")[0]: None for n, _ in self.everything() if n.startswith(start)
        }
        return list(found)
