"""Parts of a model as attributes: ``model.blocks[3].attn.hook_z``, ``model.blocks[3].attn.W_Q``, ``model.ln_final.w``.

Nothing is listed here by model: what a part has follows from the canonical names of sites and weights
that begin with its path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from interpose.engine.points import HookPoint
from interpose.models.stream.branch import Branch, branches_of
from interpose.models.stream.formula import Formula, formula_at, norm_at
from interpose.models.stream.whole import multipliers
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
            return _part(self._model, full)
        if "hook_" in name and self._model.tree.leads_somewhere(full):
            return self._model.hook_dict[full]  # another system's name for a site
        if any(self._model.tree.leads_somewhere(f"{full}.hook_{end}") for end in ("in", "out")):
            return _part(self._model, full)  # another system's name for a part
        raise AttributeError(self._why_not(name, full))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module behind this part: ``model.unembed(model.ln_final(stream))``."""
        return self.module(*args, **kwargs)

    @property
    def name(self) -> str:
        """Where it is in the model: ``blocks.3.attn``."""
        return self._path

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
        found = {name: endpoint.module for name, endpoint in ends.items() if endpoint is not None}
        for tower in anatomy.towers:
            if tower.final_norm is not None:
                found[f"{tower.prefix}ln_final"] = tower.final_norm.endpoint.module
            for block in tower.blocks:
                at = f"{tower.prefix}blocks.{block.index}"
                found[at] = block.module
                found |= {
                    f"{at}.{name}": norm.endpoint.module for name, norm in block.norms.items()
                }
                paths = {attention.name: attention.path for attention in block.attentions}
                if block.mlp is not None:
                    paths["mlp"] = block.mlp.path
                for name, path in paths.items():
                    found[f"{at}.{name}"] = self._model.module.get_submodule(path)
        return found

    def _names(self) -> list[str]:
        """Everything below, by its name from here on."""
        start = f"{self._path}." if self._path else ""
        sites = self._model.tree.table.sites
        return [s[len(start) :] for s in sites if s.startswith(start)] + list(self._weights())

    def _children(self) -> list[str]:
        return list(dict.fromkeys(name.partition(".")[0] for name in self._names()))

    def _weights(self) -> dict[str, Getter]:
        """Weights below, by their names from here on; a tower also has the stacks of its blocks'."""
        anatomy, path = self._model.anatomy, f"{self._path}." if self._path else ""
        found: dict[str, Getter] = {}
        for tower in anatomy.towers:
            at = f"{tower.prefix}blocks."
            index, _, inside = path.removeprefix(at).partition(".")
            if path.startswith(at):
                block = next(block for block in tower.blocks if str(block.index) == index)
                return _below(block_weights(block), inside)
            if path == tower.prefix:
                found |= {
                    name: partial(stacked, tower, of, at=f"model.{at}"[:-1])
                    for name, of in STACKED.items()
                }
        return found | _below(end_weights(anatomy, lambda: describe(self._model).n_ctx), path)

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
        own = (name for name in vars(type(self)) if not name.startswith("_"))
        return sorted({*self._children(), *own})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self._model is other._model and self._path == other._path

    def __hash__(self) -> int:
        return hash((id(self._model), self._path))

    def __repr__(self) -> str:
        return f"Part({self._path!r}: {', '.join(self._children())})"


def _below(found: dict[str, Getter], start: str) -> dict[str, Getter]:
    """What begins with a path, by its name from there on."""
    return {name[len(start) :]: found[name] for name in found if name.startswith(start)}


class NormPart(Part):
    """A norm: also what it multiplies with and adds, as it is now, found by running it."""

    __slots__ = ()

    @property
    def formula(self) -> Formula:
        """All of it, with which parts of a stream are followed through the norm."""
        found = formula_at(self._model, self._path)
        assert found is not None
        return found

    @property
    def factor(self) -> Tensor:
        """What it multiplies with, [d_model]: its weight, or that and one (gemma), or ones without any."""
        return torch.as_tensor(self.formula.factor)

    @property
    def summand(self) -> Tensor:
        """What it adds, [d_model]; zeros where it has no bias."""
        return torch.as_tensor(self.formula.summand)

    @property
    def centred(self) -> bool:
        """Whether it takes off the mean over the features first (LayerNorm)."""
        return self.formula.centred


class BlockPart(Part):
    """A block: also what it adds to the stream."""

    __slots__ = ()

    @property
    def branches(self) -> dict[str, Branch]:
        """What its attention, MLP or mixer adds to the stream, by kind, in the order in which it is added."""
        prefix, _, index = self._path.rpartition("blocks.")
        found = multipliers(self._model).branches
        tower = next(tower for tower in self._model.anatomy.towers if tower.prefix == prefix)
        block = next(block for block in tower.blocks if str(block.index) == index)
        return branches_of(self._model, prefix, block, found)


def _part(model: TransformerModel, path: str) -> Part | Parts:
    if path.endswith("blocks"):
        return Parts(model, path)
    return Part(model, path) if norm_at(model, path) is None else NormPart(model, path)


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

    def __getattr__(self, name: str) -> Part:
        if name.isdigit():  # as in a path: getattr(model.blocks, "0")
            return self[int(name)]
        raise AttributeError(f"{self._path!r} is a list of blocks and has no {name!r}.")

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
        return BlockPart(self._model, f"{self._path}.{layer}")

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        each = ", ".join(self[0]._children()) if len(self) else "nothing"
        return f"Parts({self._path!r}: {len(self)} blocks, the first with {each})"
