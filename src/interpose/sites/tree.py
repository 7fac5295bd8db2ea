"""A module tree as names: walk it, list it, find the module a name means, say where a wrong one went wrong.

Wrappers that only forward calls (`torch.compile`, DDP, FSDP, checkpoint wrappers) add a segment to
every name; names are given without it, and accepted with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from interpose.errors import AmbiguousSite, NothingMatched, SiteNotFound
from interpose.explain.missing import explain_missing, explain_nothing
from interpose.explain.words import some
from interpose.names import Speller
from interpose.sites.grammar import OUTPUT, Key, Tail, compile_glob, is_glob, parse_tail, spell
from interpose.sites.lens import Lens, Switch

_TRANSPARENT = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_FORWARDING = {"DistributedDataParallel", "FullyShardedDataParallel"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Site:
    """A named place where a tensor flows: a module, its input or output, and an element of that.

    ``name`` is the name it was asked by, ``canonical`` the one that all its ``aliases`` share.
    Sites of transformers also have a ``kind`` (``z``), a ``layer``, named ``axes`` and a sentence
    ``about`` them; those not ``primary`` are kept only when named.
    ``part`` is the selector that means a part of the value, if one does.
    ``shape``, ``dtype`` and ``calls`` (how often its module was called in a forward pass) are known
    after a run or `Model.scan`.
    """

    name: str
    canonical: str
    stem: str
    path: str
    tail: Tail
    module: nn.Module
    aliases: tuple[str, ...] = ()
    kind: str | None = None
    layer: int | None = None
    axes: tuple[str, ...] = ()
    lens: Lens | None = None
    switch: Switch | None = None
    primary: bool = True
    part: Any = None
    about: str = ""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    calls: int | None = None

    def element(self, leaf: tuple[Key, ...], call: int | None = None) -> str:
        """The name of one tensor found here, in the user's words for this site."""
        call = self.tail.call if call is None else call
        if leaf == self.tail.leaf and call == self.tail.call:
            return self.name
        if self.kind is not None:
            return f"{self.stem}#{call}"
        return _spelled(self.stem, Tail(call, self.tail.port, leaf), self.module)

    def __repr__(self) -> str:
        known = (
            "" if self.shape is None else f", {self.shape} {str(self.dtype).removeprefix('torch.')}"
        )
        return f"Site({self.name!r}{known})"

    def __str__(self) -> str:
        return self.name


class Selector(Protocol):
    """What finds its own sites, each with whether it was named outright: `ip.at`."""

    def select_in(self, tree: Any) -> list[tuple[Site, bool]]:
        """Its sites in a model."""


Filter = str | re.Pattern[str] | Callable[[str], bool] | Site | Iterable[object] | Selector | None
"""What selects sites: None for all outputs, a name, a glob, a regex, a callable, a class of modules, a list."""


class ModuleTree:
    """The names of one module and everything below it, read from the live module each time."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.offered: Mapping[str, Site] = {}  # by others, such as the latents of an autoencoder
        self._known: dict[str, Site] = {}
        self._first: dict[int, str] = {}
        self._others: dict[str, list[str]] = {}

    @property
    def label(self) -> str:
        """What errors call the model."""
        return type(_unwrapped(self.root)).__name__

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module that can be hooked with its first name, each once; the root is ``""``."""
        seen: set[int] = set()
        for path, module in self.all_names():
            if id(module) not in seen and not isinstance(module, torch.jit.ScriptModule):
                seen.add(id(module))
                yield path, module

    def all_names(self) -> Iterator[tuple[str, nn.Module]]:
        """Every name of every module: a module in two places comes twice."""

        def below(
            path: str, module: nn.Module, above: tuple[int, ...]
        ) -> Iterator[tuple[str, nn.Module]]:
            module = _unwrapped(module)
            yield path, module
            if id(module) in above:
                return
            for name, child in children_of(module).items():
                if child is not None:
                    yield from below(
                        f"{path}.{name}" if path else name, child, (*above, id(module))
                    )

        yield from below("", self.root, ())

    def walk(self, path: str) -> tuple[nn.Module, str, str]:
        """Follow child names as far as they go; returns the module, the names used and the rest."""
        module = _unwrapped(self.root)
        if not path:
            return module, "", ""
        used: list[str] = []
        segments = path.split(".")
        for at, segment in enumerate(segments):
            child = children_of(module).get(segment)
            if child is not None:
                module = _unwrapped(child)
                used.append(segment)
            elif segment not in _TRANSPARENT and (
                segment != "module" or used or module is self.root
            ):
                return module, ".".join(used), ".".join(segments[at:])
        return module, ".".join(used), ""

    def site(self, name: str) -> Site:
        """The site a name means. Child modules win over ``input`` and ``output``."""
        known = self.offered.get(name) or self._known.get(name)
        if known is not None:
            return known
        module, stem, rest = self.walk(name)
        tail: Tail | None = OUTPUT
        if rest:
            module, stem, tail = self._with_tail(module, stem, rest)
        if tail is None:
            raise SiteNotFound(explain_missing(self, name))
        path = self._first_name(stem, module)
        canonical = self.spell(path, tail)
        site = Site(name=name, canonical=canonical, stem=stem, path=path, tail=tail, module=module)
        self._known[name] = site
        return site

    def forget(self) -> None:
        """Read everything anew: the module has changed."""
        self._known, self._first, self._others = {}, {}, {}

    def _first_name(self, path: str, module: nn.Module) -> str:
        if id(module) not in self._first:
            self._first, self._others = {}, {}
            for name, found in self.all_names():
                known = self._first.setdefault(id(found), name)
                if known != name:
                    self._others.setdefault(known, []).append(name)
        return self._first.get(id(module), path)

    @property
    def shares_modules(self) -> bool:
        """Whether some module is in the tree several times."""
        return bool(self._others)

    def other_names(self, path: str) -> list[str]:
        """More names of the module at a path, where it is in the tree several times."""
        return self._others.get(path, [])

    spelling: Callable[[Any], str] | None = None
    """Turns other spellings of a name into the canonical one, where there are such."""

    def speller(self) -> Speller | None:
        """The same as data, as far as names are known, for values that outlive the model."""
        return None

    def meaning(self, name: str) -> str | None:  # noqa: ARG002
        """Another name, by what a place means, where that is known."""
        return None

    def spell(self, path: str, tail: Tail) -> str:
        """The canonical name of a place."""
        if path and tail.port == "output" and not tail.leaf:
            return f"{path}{tail}"
        return _spelled(path, tail, self.walk(path)[0])

    def _with_tail(
        self, module: nn.Module, path: str, rest: str
    ) -> tuple[nn.Module, str, Tail | None]:
        # `rest` starts with `input` or `output`, or with a last module segment and `#2` or `[0]`.
        segment, mark, _ = re.match(r"([^.#\[]*)([#\[]?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
        child = children_of(module).get(segment) if mark else None
        if child is not None:
            module, path = _unwrapped(child), f"{path}.{segment}" if path else segment
            return module, path, parse_tail(rest[len(segment) :])
        if not path and mark == "#" and segment in ("input", "output"):
            # The root has no name for the number to follow: `output#1` is `#1.output`.
            rest = re.sub(r"^(\w+)(#\d+)", r"\2.\1", rest)
        return module, path, parse_tail(rest if rest.startswith((".", "#", "[")) else f".{rest}")

    def select(self, wanted: object) -> list[tuple[Site, bool]]:
        """Sites that a filter means, each with whether it was named outright (rather than by a pattern)."""
        if wanted is None:
            return [(self.place(path, module), False) for path, module in self.modules()]
        if isinstance(wanted, Site):
            return [(wanted, True)]
        if hasattr(wanted, "select_in"):  # a selector
            return wanted.select_in(self)  # type: ignore[no-any-return]
        if is_class(wanted):
            kinds = [pair for pair in self.modules() if isinstance(pair[1], wanted)]
            if not kinds:
                there = dict.fromkeys(type(module).__name__ for _, module in self.modules())
                raise NothingMatched(
                    f"no module of {self.label} is a {wanted.__name__}. There are: {some(there)}."
                )
            return [(self.place(*pair), False) for pair in kinds]
        if isinstance(wanted, nn.Module):
            inner = _unwrapped(wanted)
            for path, module in self.modules():
                if module is inner:
                    return [(self.place(path, module), True)]
            raise SiteNotFound(f"this {type(wanted).__name__} is not a part of {self.label}.")
        if isinstance(wanted, str):
            if not is_glob(wanted) or self.walk(wanted)[2] == "":
                return [(self.site(wanted), True)]
            return [(site, False) for site in self._glob(wanted)]
        if isinstance(wanted, re.Pattern):
            found_by = self._matching(lambda n: bool(wanted.search(n)), wanted)
            return [(site, False) for site in found_by]
        if callable(wanted):
            return [(site, False) for site in self._matching(wanted, wanted)]
        if isinstance(wanted, Iterable):
            found: dict[str, tuple[Site, bool]] = {}
            for part in wanted:
                if isinstance(part, str) and not is_glob(part):
                    found[part] = self.site(part), True
                    continue
                for site, outright in self.select(part):
                    join(found, site, outright)
            if not found:
                raise NothingMatched(
                    f"an empty list selects no site in {self.label}. Use None for all sites."
                )
            return list(found.values())
        raise TypeError(
            "a site filter is None, a name, a glob, a re.Pattern, a callable on names, a class of modules, or a list "
            f"of these; got {type(wanted).__name__}: {wanted!r}"
        )

    def place(self, path: str, module: nn.Module, tail: Tail = OUTPUT) -> Site:
        """The site of a module that is known already, by its canonical name."""
        name = self.spell(path, tail)
        return Site(name=name, canonical=name, stem=path, path=path, tail=tail, module=module)

    def _glob(self, pattern: str) -> list[Site]:
        fits = compile_glob(pattern).fullmatch
        found = [self.place(path, m) for path, m in self.modules() if path and fits(path)]
        found += [site for name, site in self.offered.items() if fits(name)]
        if found:
            return found
        if pattern in ("input.*", "output.*"):  # all that the model itself takes, or returns
            return [self.site(pattern[:-2])]
        # No module is called so: the end may be `.input`, `#1`, `.output[0]`.
        cut = re.search(r"#[0-9]|\[|\.(?:input|output)(?=[.\[]|\Z)", pattern)
        tail = None if cut is None else parse_tail(pattern[cut.start() :])
        if tail is not None and cut is not None:
            fits = compile_glob(pattern[: cut.start()]).fullmatch
            hits = [(p, m) for p, m in self.modules() if p and fits(p)]
        if tail is None or not hits:
            raise NothingMatched(explain_nothing(self, pattern))
        return [self.place(path, module, tail) for path, module in hits]

    def _matching(self, accepts: Callable[[str], bool], asked: object) -> list[Site]:
        outputs = [self.place(path, module) for path, module in self.modules()]
        hits = [site for site in (*outputs, *self.offered.values()) if accepts(site.name)]
        if hits:
            return hits
        # Inputs repeat what came before them, so a filter reaches them only if it accepts no
        # output.
        inputs = [self.place(path, module, Tail(port="input")) for path, module in self.modules()]
        hits = [site for site in inputs if accepts(site.name)]
        if not hits:
            raise NothingMatched(explain_nothing(self, asked))
        return hits

    def leads_somewhere(self, name: str) -> bool:
        """Whether a name is one of a site."""
        module, path, rest = self.walk(name)
        return not rest or self._with_tail(module, path, rest)[2] is not None

    @staticmethod
    def children(module: nn.Module) -> dict[str, nn.Module | None]:
        """A module's parts by name."""
        return children_of(module)


def _spelled(path: str, tail: Tail, module: nn.Module) -> str:
    """Write down a place of a module. Children called `input` or `output` come first.

    Where there are such, the module's own are `a..input` and `a[0]`, and the root's `.input` and
    `.output`.
    """
    taken = tail.port in children_of(module)
    if not path:
        call = "" if tail.call is None else f"#{tail.call}"
        text = f".{tail.port}{call}{spell(tail.leaf)}"
        return (
            f"{call}.{tail.port}{spell(tail.leaf)}"
            if taken and call
            else text
            if taken
            else text[1:]
        )
    if not taken or tail.call is not None or tail == OUTPUT:
        return f"{path}{tail}"
    return f"{path}.{tail}" if tail.port == "input" else f"{path}{spell(tail.leaf)}"


def is_class(wanted: object) -> TypeGuard[type[nn.Module]]:
    """Whether a filter is a class of modules, such as nn.Linear, which stands for all of that class."""
    return isinstance(wanted, type) and issubclass(wanted, nn.Module)


def join(found: dict[str, tuple[Site, bool]], site: Site, outright: bool) -> None:
    """Add a site to those found so far, each once; two parts of one value have no names apart."""
    if found.setdefault(site.name, (site, outright))[0].part is not site.part:
        raise AmbiguousSite(f"two selections of {site.name!r} in one list; select both with one.")


def several_tensors(site: Site, leaves: list[tuple[Key, ...]]) -> AmbiguousSite:
    """The error for a name that leaves open which tensor of a container it means."""
    choices = ", ".join(repr(site.element(leaf)) for leaf in leaves[:8])
    return AmbiguousSite(
        f"{site.name!r} holds {len(leaves)} tensors; say which one: {choices}"
        + (", ..." if len(leaves) > 8 else ".")
    )


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's parts by name. TorchScript runs outside Python, so nothing below it can be hooked."""
    return {} if isinstance(module, torch.jit.ScriptModule) else module._modules


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers that only forward calls."""
    while True:
        children = children_of(module)
        inner = None
        if not children.keys().isdisjoint(_TRANSPARENT):  # and not through all the children
            inner = next(children[name] for name in children if name in _TRANSPARENT)
        elif "module" in children and type(module).__name__ in _FORWARDING:
            inner = children["module"]
        if inner is None:
            return module
        module = inner
