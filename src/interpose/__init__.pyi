"""What `interpose` exports: each name once, in groups.

`__init__.py` reads this file, and imports a name when it is first used.
"""

# Models and their sites
from interpose.engine.cache import Cache as Cache
from interpose.engine.model import Model as Model
from interpose.models.batching.labelled_rows import BatchResult as BatchResult, Rows as Rows
from interpose.models.batching.packed import packed_rows as packed_rows
from interpose.models.loading import load as load, wrap as wrap
from interpose.models.proofs.report import Report as Report
from interpose.models.stream.branch import Branch as Branch
from interpose.models.stream.formula import Formula as Formula
from interpose.models.stream.whole import Stream as Stream
from interpose.models.transformer import TransformerModel as TransformerModel
from interpose.sites.tree import Site as Site

# Hooks
from interpose.engine.hooks import (
    Controller as Controller,
    Detector as Detector,
    FunctionHook as FunctionHook,
    Hook as Hook,
    skip as skip,
    torch_hook as torch_hook,
)
from interpose.engine.points import Handle as Handle, HookPoint as HookPoint
from interpose.taps.context import in_scope as in_scope

# Edits
from interpose.edits.attention import knockout as knockout
from interpose.edits.basic import (
    add as add,
    clamp as clamp,
    fill as fill,
    noise as noise,
    scale as scale,
    zero as zero,
)
from interpose.edits.conditions import when as when
from interpose.edits.edit import Edit as Edit
from interpose.edits.other_values import mean as mean, patch as patch, resample as resample
from interpose.edits.saving import load_edits as load_edits, save_edits as save_edits
from interpose.edits.selector import at as at
from interpose.edits.subspace import (
    Rotation as Rotation,
    add_keeping_norm as add_keeping_norm,
    project_cap as project_cap,
    project_out as project_out,
    rotate as rotate,
)

# Sweeps and experiments
from interpose.experiments.experiment import Experiment as Experiment
from interpose.experiments.measure import Measured as Measured, measure as measure
from interpose.methods.batches import Batch as Batch, batches as batches
from interpose.sweeps import metrics as metrics
from interpose.sweeps.result import SweepResult as SweepResult
from interpose.sweeps.sweep import sweep as sweep
from interpose.sweeps.variants import (
    Variant as Variant,
    VariantRun as VariantRun,
    VariantRuns as VariantRuns,
    run_variants as run_variants,
)

# Methods
from interpose.methods.ablation import ablation as ablation
from interpose.methods.activation_patching import activation_patching as activation_patching
from interpose.methods.alignment_search import (
    Alignment as Alignment,
    alignment_search as alignment_search,
)
from interpose.methods.attention_knockout import attention_knockout as attention_knockout
from interpose.methods.attention_patterns import (
    AttentionPatterns as AttentionPatterns,
    attention_patterns as attention_patterns,
)
from interpose.methods.attribution_patching import (
    AttributionPatching as AttributionPatching,
    attribution_patching as attribution_patching,
)
from interpose.methods.causal_tracing import causal_tracing as causal_tracing
from interpose.methods.circuit import (
    Circuit as Circuit,
    Faithfulness as Faithfulness,
    faithfulness as faithfulness,
)
from interpose.methods.compare_prompts import (
    PromptComparison as PromptComparison,
    compare_prompts as compare_prompts,
)
from interpose.methods.direct_logit_attribution import (
    DirectLogitAttribution as DirectLogitAttribution,
    direct_logit_attribution as direct_logit_attribution,
)
from interpose.methods.edge_attribution import (
    EdgeScores as EdgeScores,
    edge_attribution as edge_attribution,
)
from interpose.methods.function_vectors import (
    FunctionVector as FunctionVector,
    function_vector as function_vector,
)
from interpose.methods.gradient_attribution import (
    Attribution as Attribution,
    gradient_times_activation as gradient_times_activation,
    saliency as saliency,
)
from interpose.methods.head_detectors import head_scores as head_scores
from interpose.methods.integrated_gradients import (
    IntegratedGradients as IntegratedGradients,
    integrated_gradients as integrated_gradients,
)
from interpose.methods.logit_lens import LogitLens as LogitLens, logit_lens as logit_lens
from interpose.methods.max_activating import (
    MaxActivating as MaxActivating,
    max_activating as max_activating,
)
from interpose.methods.patchscopes import Patchscope as Patchscope, patchscope as patchscope
from interpose.methods.path_patching import path_patching as path_patching
from interpose.methods.probes import (
    Probe as Probe,
    ProbeScores as ProbeScores,
    probe as probe,
)
from interpose.methods.relevance import relp as relp
from interpose.methods.tuned_lens import TunedLens as TunedLens

# Monitors of any network
from interpose.monitors.adversarial import adversarial as adversarial
from interpose.monitors.feature_maps import (
    FeatureMaps as FeatureMaps,
    feature_maps as feature_maps,
)
from interpose.monitors.gradient_control import (
    clip_grad as clip_grad,
    noise_grad as noise_grad,
    scale_grad as scale_grad,
)
from interpose.monitors.gradient_health import (
    GradientHealth as GradientHealth,
    gradient_health as gradient_health,
)
from interpose.monitors.nan_guard import NaNGuard as NaNGuard
from interpose.monitors.shape_log import ShapeLog as ShapeLog
from interpose.monitors.statistics import (
    ActivationStatistics as ActivationStatistics,
    Statistics as Statistics,
    activation_statistics as activation_statistics,
)

# Stores of activations
from interpose.activations import ActivationBatch as ActivationBatch
from interpose.activations import ActivationRows as ActivationRows
from interpose.store.harvest import harvest as harvest
from interpose.store.sizes import harvest_sizes as harvest_sizes
from interpose.store.store import Store as Store, open_store as open_store
from interpose.store.stream import stream as stream
from interpose.store.foreign.importing import import_activations as import_activations
from interpose.store.listing import StoreList as StoreList, list_stores as list_stores
from interpose.store.info import StoreInfo as StoreInfo

# Detectors that keep what they find
from interpose.detectors.activation_log import ActivationLog as ActivationLog
from interpose.detectors.collector import (
    Collected as Collected,
    Collector as Collector,
    load_collected as load_collected,
    save_collected as save_collected,
)
from interpose.detectors.store_log import StoreLog as StoreLog
from interpose.detectors.top_activating import TopActivating as TopActivating

# Sparse autoencoders
from interpose.sae.attaching import Attached as Attached
from interpose.sae.codes import Codes as Codes
from interpose.sae.crosscoder import CrossCoder as CrossCoder
from interpose.sae.evaluation import SAEEvaluation as SAEEvaluation, evaluate_sae as evaluate_sae
from interpose.sae.matching_pursuit import MatchingPursuitSAE as MatchingPursuitSAE
from interpose.sae.relu import (
    GatedSAE as GatedSAE,
    JumpReLUSAE as JumpReLUSAE,
    StandardSAE as StandardSAE,
)
from interpose.sae.sae import SAE as SAE
from interpose.sae.topk import (
    AbsTopKSAE as AbsTopKSAE,
    BatchTopKSAE as BatchTopKSAE,
    MatryoshkaSAE as MatryoshkaSAE,
    TopKSAE as TopKSAE,
)
from interpose.sae.training.recipe import SAERecipe as SAERecipe
from interpose.sae.training.result import SAETraining as SAETraining
from interpose.sae.training.train import train_sae as train_sae

# What units respond to
from interpose.concepts.features import features as features
from interpose.concepts.labelling import (
    label_features as label_features,
    score_labels as score_labels,
)
from interpose.concepts.naming import Concepts as Concepts
from interpose.concepts.report import Features as Features

# Steering
from interpose.steering.finding import steering_vector as steering_vector
from interpose.steering.side_by_side import SideBySide as SideBySide, side_by_side as side_by_side
from interpose.steering.steer import SteeringCurve as SteeringCurve, steer as steer
from interpose.steering.vector import SteeringVector as SteeringVector
from interpose.steering.written import written as written

# Results
from interpose.results.bootstrap import Interval as Interval
from interpose.results.loading import load_result as load_result
from interpose.results.result import Result as Result
from interpose.results.scores import Scores as Scores

# Errors
from interpose.errors import (
    AmbiguousSite as AmbiguousSite,
    Cancelled as Cancelled,
    EditError as EditError,
    EditShapeError as EditShapeError,
    FileError as FileError,
    GradientError as GradientError,
    InterposeError as InterposeError,
    NeverFired as NeverFired,
    NonFinite as NonFinite,
    NothingMatched as NothingMatched,
    NothingSelected as NothingSelected,
    SiteNotFound as SiteNotFound,
    StaleValue as StaleValue,
    Unsupported as Unsupported,
    WorkerDied as WorkerDied,
)

__version__: str
__all__: list[str]
