"""The probe: one recorded forward of any model of transformers, and the model as it was before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interpose.engine.probe import untouched
from interpose.models.discovery.anatomy import Anatomy
from interpose.models.discovery.discover import discover
from interpose.models.discovery.inputs import BATCH, LENGTH, probe_inputs
from interpose.models.discovery.record import Recorder
from interpose.models.reach import interface
from interpose.sites.tree import ModuleTree
from interpose.taps import values
from interpose.taps.context import stand_down, stand_up


def look(tree: ModuleTree, inputs: Mapping[str, Any] | None = None) -> Anatomy:
    """Run a probe (or the inputs given) through a model and find out what its parts are."""
    interface.install()
    root: Any = tree.site("").module
    inputs = probe_inputs(root) if inputs is None else inputs
    tokens = next((t for _, t in values.leaves(inputs) if t.ndim >= 2), torch.zeros(BATCH, LENGTH))
    recorder = Recorder(tree.modules(), batch=tokens.shape[0], length=tokens.shape[1])
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
    floats = [p.dtype for p in root.parameters() if p.is_floating_point()]
    return discover(tree, recorder, floats[0] if floats else torch.float32)
