"""Hooks as mi-crow has them: objects that are registered on a layer."""

from interpose.dialects.mi_crow.hooks.controller import Controller, FunctionController
from interpose.dialects.mi_crow.hooks.detector import Detector
from interpose.dialects.mi_crow.hooks.hook import Hook, HookError, HookType
from interpose.dialects.mi_crow.hooks.layer_activation_detector import LayerActivationDetector
from interpose.dialects.mi_crow.hooks.model_input_detector import ModelInputDetector
from interpose.dialects.mi_crow.hooks.model_output_detector import ModelOutputDetector
from interpose.dialects.mi_crow.hooks.tensors import (
    extract_tensor_from_input,
    extract_tensor_from_output,
)

__all__ = [
    "Controller",
    "Detector",
    "FunctionController",
    "Hook",
    "HookError",
    "HookType",
    "LayerActivationDetector",
    "ModelInputDetector",
    "ModelOutputDetector",
    "extract_tensor_from_input",
    "extract_tensor_from_output",
]
