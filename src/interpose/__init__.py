"""interpose: read, edit, ablate, patch and steer activations and gradients of any PyTorch model, by name."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interpose.analysis.ablation import ablation
    from interpose.analysis.activation_patching import activation_patching
    from interpose.analysis.adversarial import adversarial
    from interpose.analysis.alignment_search import alignment_search
    from interpose.analysis.attention_knockout import attention_knockout
    from interpose.analysis.attention_patterns import attention_patterns
    from interpose.analysis.attribution_patching import attribution_patching
    from interpose.analysis.batches import Batch, batches
    from interpose.analysis.causal_tracing import causal_tracing
    from interpose.analysis.circuit import Circuit, faithfulness
    from interpose.analysis.compare_prompts import compare_prompts
    from interpose.analysis.direct_logit_attribution import direct_logit_attribution
    from interpose.analysis.edge_attribution import EdgeScores, edge_attribution
    from interpose.analysis.feature_maps import feature_maps
    from interpose.analysis.function_vectors import function_vector
    from interpose.analysis.gradient_attribution import gradient_times_activation, saliency
    from interpose.analysis.gradient_control import clip_grad, noise_grad, scale_grad
    from interpose.analysis.gradient_health import gradient_health
    from interpose.analysis.head_detectors import head_scores
    from interpose.analysis.integrated_gradients import integrated_gradients
    from interpose.analysis.logit_lens import logit_lens
    from interpose.analysis.max_activating import max_activating
    from interpose.analysis.nan_guard import NaNGuard
    from interpose.analysis.patchscopes import patchscope
    from interpose.analysis.path_patching import path_patching
    from interpose.analysis.probes import Probe, probe
    from interpose.analysis.relevance import relp
    from interpose.analysis.scores import Scores
    from interpose.analysis.shape_log import ShapeLog
    from interpose.analysis.statistics import Statistics, activation_statistics
    from interpose.analysis.tuned_lens import TunedLens
    from interpose.edits.attention import knockout
    from interpose.edits.basic import add, clamp, fill, noise, scale, zero
    from interpose.edits.edit import Edit
    from interpose.edits.reference import mean, patch, resample
    from interpose.edits.saving import load_edits, save_edits
    from interpose.edits.selector import at
    from interpose.edits.subspace import Rotation, project_cap, project_out, rotate
    from interpose.engine.cache import Cache
    from interpose.engine.hooks import Controller, Detector, Hook, skip, torch_hook
    from interpose.engine.model import Model
    from interpose.engine.points import Handle, HookPoint
    from interpose.errors import (
        AmbiguousSite,
        Cancelled,
        EditError,
        EditShapeError,
        GradientError,
        InterposeError,
        NeverFired,
        NonFinite,
        NothingMatched,
        NothingSelected,
        SiteNotFound,
        StaleValue,
        Unsupported,
    )
    from interpose.experiments.experiment import Experiment
    from interpose.experiments.measure import Measured, measure
    from interpose.models.loading import load, wrap
    from interpose.models.proofs.report import Report
    from interpose.models.running.batch_result import BatchResult, Rows
    from interpose.models.running.packed import packed_rows
    from interpose.models.transformer import TransformerModel
    from interpose.sites.tree import Site
    from interpose.sweeps import metrics
    from interpose.sweeps.result import SweepResult
    from interpose.sweeps.sweep import sweep
    from interpose.taps.context import in_scope

__version__ = "0.1.0.dev0"

# Names come with their module when they are first used, so that `interpose --help` needs no torch.
_HOMES = {
    "interpose.analysis.ablation": ("ablation",),
    "interpose.analysis.activation_patching": ("activation_patching",),
    "interpose.analysis.alignment_search": ("alignment_search",),
    "interpose.analysis.attention_knockout": ("attention_knockout",),
    "interpose.analysis.attention_patterns": ("attention_patterns",),
    "interpose.analysis.attribution_patching": ("attribution_patching",),
    "interpose.analysis.causal_tracing": ("causal_tracing",),
    "interpose.analysis.circuit": (
        "Circuit",
        "faithfulness",
    ),
    "interpose.analysis.compare_prompts": ("compare_prompts",),
    "interpose.analysis.direct_logit_attribution": ("direct_logit_attribution",),
    "interpose.analysis.edge_attribution": (
        "EdgeScores",
        "edge_attribution",
    ),
    "interpose.analysis.function_vectors": ("function_vector",),
    "interpose.analysis.gradient_attribution": (
        "gradient_times_activation",
        "saliency",
    ),
    "interpose.analysis.head_detectors": ("head_scores",),
    "interpose.analysis.integrated_gradients": ("integrated_gradients",),
    "interpose.analysis.logit_lens": ("logit_lens",),
    "interpose.analysis.max_activating": ("max_activating",),
    "interpose.analysis.patchscopes": ("patchscope",),
    "interpose.analysis.path_patching": ("path_patching",),
    "interpose.analysis.probes": (
        "Probe",
        "probe",
    ),
    "interpose.analysis.relevance": ("relp",),
    "interpose.analysis.tuned_lens": ("TunedLens",),
    "interpose.analysis.adversarial": ("adversarial",),
    "interpose.analysis.batches": ("Batch", "batches"),
    "interpose.analysis.feature_maps": ("feature_maps",),
    "interpose.analysis.gradient_control": (
        "clip_grad",
        "noise_grad",
        "scale_grad",
    ),
    "interpose.analysis.gradient_health": ("gradient_health",),
    "interpose.analysis.nan_guard": ("NaNGuard",),
    "interpose.analysis.scores": ("Scores",),
    "interpose.analysis.shape_log": ("ShapeLog",),
    "interpose.analysis.statistics": (
        "Statistics",
        "activation_statistics",
    ),
    "interpose.edits.attention": ("knockout",),
    "interpose.edits.basic": (
        "add",
        "clamp",
        "fill",
        "noise",
        "scale",
        "zero",
    ),
    "interpose.edits.edit": ("Edit",),
    "interpose.edits.reference": (
        "mean",
        "patch",
        "resample",
    ),
    "interpose.edits.saving": (
        "load_edits",
        "save_edits",
    ),
    "interpose.edits.selector": ("at",),
    "interpose.edits.subspace": (
        "Rotation",
        "project_cap",
        "project_out",
        "rotate",
    ),
    "interpose.engine.cache": ("Cache",),
    "interpose.engine.hooks": (
        "Controller",
        "Detector",
        "Hook",
        "skip",
        "torch_hook",
    ),
    "interpose.engine.model": ("Model",),
    "interpose.engine.points": (
        "Handle",
        "HookPoint",
    ),
    "interpose.errors": (
        "AmbiguousSite",
        "Cancelled",
        "EditError",
        "EditShapeError",
        "GradientError",
        "InterposeError",
        "NeverFired",
        "NonFinite",
        "NothingMatched",
        "NothingSelected",
        "SiteNotFound",
        "StaleValue",
        "Unsupported",
    ),
    "interpose.experiments.experiment": ("Experiment",),
    "interpose.experiments.measure": ("Measured", "measure"),
    "interpose.models.running.batch_result": ("BatchResult", "Rows"),
    "interpose.models.running.packed": ("packed_rows",),
    "interpose.models.loading": (
        "load",
        "wrap",
    ),
    "interpose.models.proofs.report": ("Report",),
    "interpose.models.transformer": ("TransformerModel",),
    "interpose.sites.tree": ("Site",),
    "interpose.sweeps": ("metrics",),
    "interpose.sweeps.result": ("SweepResult",),
    "interpose.sweeps.sweep": ("sweep",),
    "interpose.taps.context": ("in_scope",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"interpose has no {name!r}")
    found = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AmbiguousSite",
    "Batch",
    "BatchResult",
    "Cache",
    "Cancelled",
    "Circuit",
    "Controller",
    "Detector",
    "EdgeScores",
    "Edit",
    "EditError",
    "EditShapeError",
    "Experiment",
    "GradientError",
    "Handle",
    "Hook",
    "HookPoint",
    "InterposeError",
    "Measured",
    "Model",
    "NaNGuard",
    "NeverFired",
    "NonFinite",
    "NothingMatched",
    "NothingSelected",
    "Probe",
    "Report",
    "Rotation",
    "Rows",
    "Scores",
    "ShapeLog",
    "Site",
    "SiteNotFound",
    "StaleValue",
    "Statistics",
    "SweepResult",
    "TransformerModel",
    "TunedLens",
    "Unsupported",
    "ablation",
    "activation_patching",
    "activation_statistics",
    "add",
    "adversarial",
    "alignment_search",
    "at",
    "attention_knockout",
    "attention_patterns",
    "attribution_patching",
    "batches",
    "causal_tracing",
    "clamp",
    "clip_grad",
    "compare_prompts",
    "direct_logit_attribution",
    "edge_attribution",
    "faithfulness",
    "feature_maps",
    "fill",
    "function_vector",
    "gradient_health",
    "gradient_times_activation",
    "head_scores",
    "in_scope",
    "integrated_gradients",
    "knockout",
    "load",
    "load_edits",
    "logit_lens",
    "max_activating",
    "mean",
    "measure",
    "metrics",
    "noise",
    "noise_grad",
    "packed_rows",
    "patch",
    "patchscope",
    "path_patching",
    "probe",
    "project_cap",
    "project_out",
    "relp",
    "resample",
    "rotate",
    "saliency",
    "save_edits",
    "scale",
    "scale_grad",
    "skip",
    "sweep",
    "torch_hook",
    "wrap",
    "zero",
]
