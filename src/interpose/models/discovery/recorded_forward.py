"""The probe: one recorded forward of any model of transformers, and the model as it was before.

Two more follow only where they are needed: one of other sizes, for axes that the first leaves open,
and one with finite numbers in the place of a NaN, for a model that has one in a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.model import device_of
from interpose.engine.shape_scan import untouched
from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Anatomy, Shape, Sizes
from interpose.models.discovery.discover import discover
from interpose.models.discovery.inputs import BATCH, LENGTH, foreign_sizes, probe_inputs
from interpose.models.discovery.record import Event, Recorder
from interpose.models.reach import interface
from interpose.sites.grammar import OUTPUT, Tail
from interpose.sites.tree import ModuleTree
from interpose.taps import values
from interpose.taps.context import stand_down, stand_up

META = torch.device("meta")


def look(tree: ModuleTree, inputs: Mapping[str, Any] | None = None) -> Anatomy:
    """Run a probe (or the inputs given) through a model and find out what its parts are."""
    interface.install()
    root: Any = tree.site("").module
    if any(parameter.is_meta for parameter in root.parameters()) and not device_of(root) == META:
        raise Unsupported(
            f"weights of {type(root).__name__} are offloaded: between calls they are on the meta device, and what its "
            "parts are is told by looking at weights. So it has no semantic sites; module paths work "
            "(names_filter='model.layers.3'). For all sites load it whole: without cpu_offload, disk_offload or a "
            "device_map that leaves parts on the CPU or on disk, in a smaller dtype or over several devices."
        )
    if any(hasattr(part, "reshard") for part in root.modules()):
        raise Unsupported(
            f"weights of {type(root).__name__} are sharded (FSDP): between calls each process has a piece of each, and "
            "what its parts are is told by looking at weights. So it has no semantic sites; module paths work "
            "(names_filter='model.layers.3'). For all sites load it whole, with a device_map over several devices, or "
            "with transformers' tp_plan='auto', which keeps the residual stream whole."
        )
    if inputs is None:
        first, second = foreign_sizes(root)
        inputs = probe_inputs(root, batch=first[0], length=first[1])
        other = partial(probe_inputs, root, batch=second[0], length=second[1])
    else:
        other = partial(_twice, inputs)
    instead: dict[int, Tensor] = {}
    try:
        recorder = _recorded(tree, root, inputs, instead)
    except Exception:
        instead = _finite_weights(root)
        if not instead:
            raise
        recorder = _recorded(tree, root, inputs, instead)
    if not recorder.is_finite and not instead:
        instead = _finite_weights(root)
        recorder = _recorded(tree, root, inputs, instead) if instead else recorder
    floats = [p.dtype for p in root.parameters() if p.is_floating_point()]
    found = discover(tree, recorder, floats[0] if floats else torch.float32)
    found.sizes = Sizes(batch=recorder.batch, lengths=_lengths(inputs))
    found.reads_text = getattr(root, "main_input_name", "input_ids") == "input_ids"
    found.again = cache(partial(_other_sizes, tree, root, other, instead))
    return found


def _recorded(
    tree: ModuleTree, root: nn.Module, inputs: Mapping[str, Any], instead: Mapping[int, Tensor]
) -> Recorder:
    """One forward, written down, that leaves no trace in the model."""
    tokens = next((t for _, t in values.leaves(inputs) if t.ndim >= 2), torch.zeros(BATCH, LENGTH))
    batch, length = tokens.shape[:2]
    recorder = Recorder(tree.modules(), batch=batch, length=length, instead=instead)
    token = stand_down()  # hooks in scope, and those of the model, are not meant
    with untouched(root):
        root.eval()
        try:
            recorder.run(lambda: root(**inputs))
        except Exception as error:
            error.add_note(
                f"raised by a probe forward of {type(root).__name__} with "
                f"{', '.join(inputs)}: its semantic sites are unknown; its module paths work."
            )
            raise
        finally:
            stand_up(token)
    return recorder


def _finite_weights(root: nn.Module) -> dict[int, Tensor]:
    """For each tensor of a model that is not finite, one that is, by the tensor's id.

    What the parts of a model are does not hang on single numbers: where one is NaN or infinite a
    random one of the others' size tells the same.
    """
    found = {}
    for tensor in (*root.parameters(), *root.buffers()):
        if not tensor.is_floating_point() or not values.is_plain(tensor):
            continue
        if tensor.element_size() == 1:  # of eight bits, for which torch has no isfinite
            continue
        finite = tensor.detach().isfinite()
        if bool(finite.all()):
            continue
        known = tensor.detach()[finite].float()
        around, wide = (known.mean(), known.std(correction=0)) if len(known) else (0.0, 0.1)
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        drawn = (around + (wide + 1e-3) * noise.to(tensor.device)).to(tensor.dtype)
        found[id(tensor)] = torch.where(finite, tensor.detach(), drawn)
    return found


def _lengths(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """The lengths of the texts among some inputs, each once."""
    tokens = [
        tensor.shape[1]
        for leaf, tensor in values.leaves(inputs)
        if str(leaf[-1]).endswith(("input_ids", "inputs_embeds")) and tensor.ndim >= 2
    ]
    return tuple(dict.fromkeys(tokens))


def _twice(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs with every row a second time."""
    doubled: dict[str, Any] = values.mapped(
        dict(inputs), lambda tensor: torch.cat([tensor, tensor]) if tensor.ndim else tensor
    )
    return doubled


def _other_sizes(
    tree: ModuleTree, root: nn.Module, inputs: Any, instead: Mapping[int, Tensor]
) -> Sizes | None:
    """The shapes of all values in a run of other sizes; None for a model that takes no such inputs."""
    given = inputs()
    try:
        recorder = _recorded(tree, root, given, instead)
    except Exception:  # whatever a model says to inputs that nobody promised to be right
        return None
    shapes: dict[tuple[str, Tail], Shape] = {}
    for event in recorder.events:
        for tail, shape in _tails(event):
            shapes.setdefault((event.path, tail), shape)
    return Sizes(batch=recorder.batch, lengths=_lengths(given), shapes=shapes)


def _tails(event: Event) -> list[tuple[Tail, Shape]]:
    """Every way a value of a call may be named."""
    call = event.call if event.call_counts else None
    found = [(Tail(call=call, leaf=value.leaf), value.shape) for value in event.made]
    found += [(OUTPUT, value.shape) for value in event.made[:1] if call is None]
    for at, value in enumerate(event.given):
        for leaf in (value.leaf, (at,)):
            found.append((Tail(call=call, port="input", leaf=leaf), value.shape))
    return found
