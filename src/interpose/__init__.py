"""interpose: read, edit, ablate, patch and steer activations and gradients of any PyTorch model, by name."""

from interpose.edits.basic import Edit, add, fill, noise, scale, zero
from interpose.engine.cache import Cache
from interpose.engine.hooks import Controller, Detector, Hook, skip, torch_hook
from interpose.engine.model import Model, wrap
from interpose.engine.points import Handle, HookPoint
from interpose.errors import (
    AmbiguousSite,
    EditError,
    EditShapeError,
    GradientError,
    InterposeError,
    NeverFired,
    NonFinite,
    NothingMatched,
    SiteNotFound,
    StaleValue,
    Unsupported,
)
from interpose.sites.tree import Site
from interpose.taps.context import in_scope

__all__ = [
    "AmbiguousSite",
    "Cache",
    "Controller",
    "Detector",
    "Edit",
    "EditError",
    "EditShapeError",
    "GradientError",
    "Handle",
    "Hook",
    "HookPoint",
    "InterposeError",
    "Model",
    "NeverFired",
    "NonFinite",
    "NothingMatched",
    "Site",
    "SiteNotFound",
    "StaleValue",
    "Unsupported",
    "add",
    "fill",
    "in_scope",
    "noise",
    "scale",
    "skip",
    "torch_hook",
    "wrap",
    "zero",
]

__version__ = "0.1.0.dev0"
