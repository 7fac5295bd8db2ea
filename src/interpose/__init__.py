"""interpose: read, edit, ablate, patch and steer activations and gradients of any PyTorch model, by name."""

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

__version__ = "0.1.0.dev0"
