"""interpose: read, edit, ablate, patch and steer activations and gradients of any PyTorch model, by name."""

from interpose.analysis.adversarial import adversarial
from interpose.analysis.feature_maps import feature_maps
from interpose.analysis.gradient_control import clip_grad, noise_grad, scale_grad
from interpose.analysis.gradient_health import gradient_health
from interpose.analysis.nan_guard import NaNGuard
from interpose.analysis.shape_log import ShapeLog
from interpose.analysis.statistics import Statistics, activation_statistics
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
    "NaNGuard",
    "NeverFired",
    "NonFinite",
    "NothingMatched",
    "ShapeLog",
    "Site",
    "SiteNotFound",
    "StaleValue",
    "Statistics",
    "Unsupported",
    "activation_statistics",
    "add",
    "adversarial",
    "clip_grad",
    "feature_maps",
    "fill",
    "gradient_health",
    "in_scope",
    "noise",
    "noise_grad",
    "scale",
    "scale_grad",
    "skip",
    "torch_hook",
    "wrap",
    "zero",
]

__version__ = "0.1.0.dev0"
