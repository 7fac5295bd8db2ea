"""Parts of a model as attributes: ``model.blocks[3].attn.hook_z``, ``model.blocks[3].attn.W_Q``, ``model.ln_final.w``.

Nothing is listed here by model: what a part has follows from the canonical names of sites and weights
that begin with its path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor, nn

from interpose.engine.points import HookPoint
from interpose.models.discovery.anatomy import Tower
from interpose.models.weights.config import describe
from interpose.models.weights.views import Getter, block_weights, end_weights
from interpose.models.weights.weights import STACKED, main_tower, stacked

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

OURS = {"blocks", "embed", "hook_embed", "hook_pos_embed", "ln_final", "pos_embed", "unembed"}
"""Attributes of a model that are its parts."""
_ALWAYS = {"blocks", "ln_final", "unembed"}
# Asked before anything is known of the model: no other name may cost a probe.
_TOWER = re.compile(r"(vision|audio|encoder|decoder|stack)(_\d+)?")


def part_of(model: TransformerModel, name: str) -> Part | Parts | HookPoint | None:
    """The part of a model that an attribute means; None where the name is the module's to answer.

    ``blocks`` and ``ln_final`` are those of the language model, or of the decoder. Where the module
    has an attribute of its own called ``embed``, ``encoder`` and so on, that one is meant.
    """
    if name not in OURS and not _TOWER.fullmatch(name):
        return None
    if name not in _ALWAYS and hasattr(model.module, name):
        return None
    main = main_tower(model.anatomy)
    prefix = main.prefix if main is not None and name in ("blocks", "ln_final") else ""
    root = Part(model, "")
    path = f"{prefix}{name}"
    if name not in OURS and path not in root._children():
        return None
    found = root._get(path)
    assert not isinstance(found, Tensor)
    return found


class Part:
    """A part of a model: its hook points, its weights and its own parts are attributes of it."""

    __slots__ = ("_model", "_path")

    def __init__(self, model: TransformerModel, path: str) -> None:
        self._model = model
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copying, pickling and notebooks
            raise AttributeError(name)
        return self._get(name)

    def _get(self, name: str) -> Part | Parts | HookPoint | Tensor:
        full = f"{self._path}.{name}" if self._path else name
        self._model.refresh(thoroughly=True)
        if full in self._model.tree.table.sites:
            return self._model.hook_dict[full]
        getter = self._weights().get(name)
        if getter is not None:
            return getter()
        if any(child.startswith(f"{name}.") for child in self._names()):
            return Parts(self._model, full) if name.endswith("blocks") else Part(self._model, full)
        if "hook_" in name and self._model.tree.leads_somewhere(full):
            return self._model.hook_dict[full]  # another system's name for a site
        raise AttributeError(self._why_not(name, full))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module behind this part: ``model.unembed(model.ln_final(stream))``."""
        return self.module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The module behind this part, the user's own."""
        found = self._modules().get(self._path)
        if found is None:
            raise TypeError(f"no single module of {self._model.tree.label} is {self._path!r}.")
        return found

    def _modules(self) -> dict[str, nn.Module]:
        """The modules that are parts, by path."""
        anatomy = self._model.anatomy
        ends = {"embed": anatomy.embed, "unembed": anatomy.unembed}
        found = {name: place.module for name, place in ends.items() if place is not None}
        for tower in anatomy.towers:
            if tower.final_norm is not None:
                found[f"{tower.prefix}ln_final"] = tower.final_norm.place.module
            for block in tower.blocks:
                at = f"{tower.prefix}blocks.{block.index}"
                found[at] = block.module
                found |= {f"{at}.{name}": norm.place.module for name, norm in block.norms.items()}
                paths = {attention.name: attention.path for attention in block.attentions}
                if block.mlp is not None:
                    paths["mlp"] = block.mlp.path
                for name, path in paths.items():
                    found[f"{at}.{name}"] = self._model.module.get_submodule(path)
        return found

    def _names(self) -> Iterator[str]:
        """Everything below, by its name from here on."""
        start = f"{self._path}." if self._path else ""
        for site in self._model.tree.table.sites:
            if site.startswith(start):
                yield site[len(start) :]
        yield from self._weights()

    def _children(self) -> list[str]:
        return list(dict.fromkeys(name.partition(".")[0] for name in self._names()))

    def _weights(self) -> dict[str, Getter]:
        """Weights below, by their names from here on; a tower also has the stacks of its blocks'."""
        anatomy = self._model.anatomy
        found = end_weights(anatomy, lambda: describe(self._model).n_ctx)
        for tower in anatomy.towers:
            at = f"{tower.prefix}blocks"
            if self._path == tower.prefix[:-1]:
                found |= _stacks(tower)
            for block in tower.blocks:
                if f"{self._path}.".startswith(f"{at}.{block.index}."):
                    inside = block_weights(block).items()
                    found |= {f"{at}.{block.index}.{name}": getter for name, getter in inside}
        start = f"{self._path}." if self._path else ""
        return {name[len(start) :]: found[name] for name in found if name.startswith(start)}

    def _why_not(self, name: str, full: str) -> str:
        label = self._model.tree.label
        absent = self._model.tree.table.absent
        below = (absent[key] for key in absent if key.startswith(f"{full}."))
        reason = absent.get(full) or absent.get(f"hook_{full}") or next(below, None)
        if reason is not None:
            return f"{label} has no {full!r}: {reason}."
        where = repr(self._path) if self._path else label
        shown = self._children()
        more = f", ... ({len(shown)})" if len(shown) > 24 else ""
        return f"{where} has no {name!r}. It has: {', '.join(shown[:24])}{more}."

    def __dir__(self) -> list[str]:
        return sorted(self._children())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self._model is other._model and self._path == other._path

    def __hash__(self) -> int:
        return hash((id(self._model), self._path))

    def __repr__(self) -> str:
        return f"Part({self._path!r}: {', '.join(self._children())})"


def _stacks(tower: Tower) -> dict[str, Getter]:
    at = f"model.{tower.prefix}blocks"

    def stack(name: str) -> Getter:
        return lambda: stacked(tower, name, at=at)

    return {f"{tower.prefix}{name}": stack(inside) for name, inside in STACKED.items()}


class Parts(Sequence[Part]):
    """The blocks of a tower, as a list."""

    __slots__ = ("_indices", "_model", "_path")

    def __init__(
        self, model: TransformerModel, path: str, indices: Sequence[int] | None = None
    ) -> None:
        self._model = model
        self._path = path
        self._indices = (
            range(model.tree.blocks(path.removesuffix("blocks"))) if indices is None else indices
        )

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> Parts: ...
    def __getitem__(self, index: int | slice) -> Part | Parts:
        if isinstance(index, slice):
            return Parts(self._model, self._path, self._indices[index])
        try:
            layer = self._indices[index]
        except IndexError:
            raise IndexError(f"{self._path}[{index}]: there are {len(self)} blocks.") from None
        return Part(self._model, f"{self._path}.{layer}")

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        each = ", ".join(self[0]._children()) if len(self) else "nothing"
        return f"Parts({self._path!r}: {len(self)} blocks, the first with {each})"
