"""Models whose weights are spread over processes (tensor parallel), each of which has a part of some values.

Which values are whole is measured: in a forward pass of the same small inputs in every process, a value that all of
them have is whole. The others are refused, since a part by itself means nothing, and an edit of it would be another one
in each process. All processes run the same program: what is found out here, they find out together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial as given
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.engine.shape_scan import untouched
from interpose.errors import Unsupported
from interpose.models.discovery.inputs import probe_inputs
from interpose.sites.tree import Site
from interpose.taps import values
from interpose.taps.context import stand_down, stand_up
from interpose.taps.values import is_shard

if TYPE_CHECKING:
    from interpose.models.naming.table import Table

Partial = frozenset[tuple[str, str]]
"""Paths of modules, each with ``input`` or ``output``, where a process has a part of the value."""

_NEAR = 1e-3
_WHOLE = ("hook_in", "hook_out")
_INSIDE = "its weights are spread over processes (tensor parallel), each with some of its heads or neurons"
_PART = "its weights are spread over processes (tensor parallel), and each has a part of this value"


def is_spread(module: nn.Module) -> bool:
    """Whether a module's weights are spread over processes, as tensor parallel or FSDP do it."""
    return _mesh_of(module) is not None


def _mesh_of(module: nn.Module) -> Any:
    """The processes that share a module's weights; None if they are not spread."""
    weight: Any
    for weight in module.parameters():
        if is_shard(weight):
            return weight.device_mesh
    # In transformers 5.9 weights of tensor-parallel modules are plain tensors, and the module says so.
    there = (getattr(part, "_hf_device_mesh", None) for part in module.modules())
    return next((mesh for mesh in there if mesh is not None), None)


def withhold(sites: dict[str, Site], absent: dict[str, str], at: str, part: nn.Module) -> None:
    """Take away the sites inside a part of a block, if each process has some of its weights.

    Args:
        sites: those that were found, by name.
        absent: why others were not.
        at: what the names inside begin with.
        part: its module.
    """
    if is_spread(part):
        inside = [n for n in (*sites, *absent) if n.startswith(at) and not n.endswith(_WHOLE)]
        for name in inside:
            sites.pop(name, None)
        absent |= dict.fromkeys(inside, _INSIDE)


def partial_values(root: nn.Module, inputs: Mapping[str, Any] | None = None) -> Partial:
    """Where a process has a part of a value. Every process has to ask.

    Args:
        root: of the model.
        inputs: what its forward takes; by default small ones, the same in every process.
    """
    if not is_spread(root) or any(hasattr(part, "reshard") for part in root.modules()):
        return Partial()  # FSDP brings all weights of a part while it runs
    seen: dict[tuple[str, str], list[Any]] = {}

    def look(path: str, port: str, value: Any) -> None:
        seen[path, port] = [_print_of(tensor) for _, tensor in values.leaves(value)]

    def enters(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        look(path, "input", (args, kwargs))

    def leaves(path: str, _: nn.Module, __: Any, output: Any) -> None:
        look(path, "output", output)

    token = stand_down()
    handles = []
    try:
        for path, part in root.named_modules():
            handles.append(part.register_forward_pre_hook(given(enters, path), with_kwargs=True))
            handles.append(part.register_forward_hook(given(leaves, path)))
        with untouched(root), torch.no_grad():
            root.eval()
            root(**(probe_inputs(root) if inputs is None else inputs))
    finally:
        for handle in handles:
            handle.remove()
        stand_up(token)
    everywhere = _of_all(seen, root)
    return frozenset(place for place in seen if not _alike([one.get(place) for one in everywhere]))


def _print_of(tensor: Tensor) -> tuple[Any, ...]:
    """A shape, and numbers that tell values apart: rounding may move them, another part would change them."""
    if is_shard(tensor):
        return ("a part",)
    flat = tensor.detach().reshape(-1).to("cpu", torch.float64).nan_to_num(0.0, 1e30, -1e30)
    drawn = torch.randn(len(flat), generator=torch.Generator().manual_seed(0), dtype=flat.dtype)
    return tuple(tensor.shape), float(flat.clamp(-1e30, 1e30) @ drawn), float(flat.norm())


def _of_all(seen: Any, root: nn.Module) -> list[Any]:
    """What every process saw, those that share the weights."""
    mesh = _mesh_of(root)
    group = mesh.get_group() if mesh.ndim == 1 else None
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, seen, group=group)
    return found


def _alike(prints: list[Any]) -> bool:
    """Whether all processes have the same value."""
    first = prints[0]
    for other in prints[1:]:
        if other is None or len(other) != len(first):
            return False
        for one, same in zip(first, other):
            if len(one) != 3 or len(same) != 3 or one[0] != same[0]:
                return False
            if max(abs(one[1] - same[1]), abs(one[2] - same[2])) > _NEAR * max(one[2], same[2]):
                return False
    return all(len(one) == 3 for one in first)


def whole_only(table: Table, partial: Partial) -> Table:
    """A table of sites without those of which a process has a part, and why they are not there."""
    if partial:
        for name, site in list(table.sites.items()):
            if (site.path, site.tail.port) in partial:
                del table.sites[name]
                table.absent[name] = _PART
    return table


def must_be_whole(sites: Iterable[Site], partial: Partial) -> None:
    """Refuse sites by the paths of modules of which a process has a part."""
    for site in sites:
        if (site.path, site.tail.port) in partial:
            raise Unsupported(
                f"{site.name!r} cannot be hooked: {_PART}. The residual stream is whole; or load the model in one "
                "process, with device_map='auto'."
            )


def must_not_be_spread(module: nn.Module, what: str, why: str) -> None:
    """Refuse a spread model for something.

    Args:
        module: the model.
        what: what was asked for.
        why: why not.
    """
    if is_spread(module):
        raise Unsupported(
            f"{what} does not run on a model that is spread over processes: {why}. Load the model in one process; "
            "device_map='auto' puts it on several GPUs."
        )
