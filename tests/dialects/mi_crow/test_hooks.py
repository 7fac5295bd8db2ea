"""Hooks in mi-crow's words, against raw torch hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from interpose.dialects.mi_crow.hooks import (
    Controller,
    Detector,
    FunctionController,
    Hook,
    HookError,
    HookType,
    LayerActivationDetector,
    ModelInputDetector,
    ModelOutputDetector,
    extract_tensor_from_input,
    extract_tensor_from_output,
)
from interpose.dialects.mi_crow.hooks.hook import HookError as SameError
from interpose.dialects.mi_crow.language_model import LanguageModel
from tests.dialects.mi_crow.models import TEXTS, small

MLP, LAYER = "model.layers.1.mlp", "model.layers.0"


class Look(Detector):
    """Keeps copies of all it sees, and spoils what it was given."""

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
        self.tensor_metadata["in"] = input[0].clone()
        if output is not None:
            self.tensor_metadata["out"] = output.clone()
            output.data.fill_(7.0)
        input[0].data.fill_(7.0)


class Twice(Controller):
    def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * 2


def ran(lm: LanguageModel, texts: list[str] = TEXTS) -> torch.Tensor:
    return lm.inference.execute_inference(texts)[0].logits


def by_torch(lm: LanguageModel, path: str, hook: Any, *, pre: bool = False) -> torch.Tensor:
    """The logits with a raw torch hook, on a copy of the module."""
    module = copy.deepcopy(lm.model)
    part = module.get_submodule(path)
    (part.register_forward_pre_hook if pre else part.register_forward_hook)(hook)
    with torch.no_grad():
        return module(**lm.inference._arguments(lm.tokenize(TEXTS))).logits


def test_types_ids_and_switches() -> None:
    hook = Look(layer_signature="x")
    assert (hook.hook_type, hook.enabled, hook.is_enabled()) == (HookType.FORWARD, True, True)
    assert hook.id != Look().id
    assert Look(hook_id="mine").id == "mine"
    assert Look(hook_type="pre_forward").hook_type is HookType.PRE_FORWARD
    assert HookType.FORWARD == "forward"
    with pytest.raises(
        ValueError, match=r"Invalid hook_type 'back'. Valid values: 'forward', 'pre_forward'"
    ):
        Look(hook_type="back")
    hook.disable()
    assert not hook.is_enabled()
    hook.enable()
    assert hook.enabled
    with pytest.raises(TypeError, match="abstract"):
        Detector()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        Hook()  # type: ignore[abstract]
    assert SameError is HookError


@pytest.mark.parametrize("kind", ["forward", "pre_forward"])
def test_what_a_detector_does_to_the_tensors_cannot_reach_the_model(kind: str) -> None:
    lm = small()
    plain, look = ran(lm), Look(hook_type=kind)
    lm.layers.register_hook(MLP, look)
    assert torch.equal(ran(lm), plain)
    seen: list[Any] = []
    by_torch(lm, MLP, lambda _, args, out: seen.append((args[0].clone(), out.clone())))
    torch.testing.assert_close(look.tensor_metadata["in"], seen[0][0])
    if kind == "forward":
        torch.testing.assert_close(look.tensor_metadata["out"], seen[0][1])
    lm.layers.unregister_hook(look)


def test_controllers_change_outputs_and_inputs_as_raw_torch_hooks_do() -> None:
    lm = small()
    plain = ran(lm)
    cases: list[tuple[Controller, Any, bool]] = [
        (Twice(), lambda _, args, out: out * 2, False),
        (
            FunctionController(MLP, lambda x: x.clamp(max=0.1)),
            lambda _, a, out: out.clamp(max=0.1),
            False,
        ),
        (FunctionController(MLP, lambda x: x.mul_(3)), lambda _, a, out: out * 3, False),
        (
            FunctionController(MLP, lambda x: x + 1, "pre_forward"),
            lambda _, args: (args[0] + 1, *args[1:]),
            True,
        ),
    ]
    for controller, raw, pre in cases:
        lm.layers.register_hook(MLP, controller)
        expected = by_torch(lm, MLP, raw, pre=pre)
        assert not torch.equal(expected, plain)
        torch.testing.assert_close(ran(lm), expected)
        controller.disable()
        assert torch.equal(ran(lm), plain)
        assert lm.layers.unregister_hook(controller)
    assert torch.equal(ran(lm), plain)


def test_before_a_layer_a_controller_gets_and_returns_the_inputs() -> None:
    class Inputs(Controller):
        def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
            assert output is None
            assert "hidden_states" in inputs.by_name or "x" in inputs.by_name
            return (inputs[0] * 0.5, *inputs[1:])

    lm = small()
    expected = by_torch(lm, MLP, lambda _, args: (args[0] * 0.5,), pre=True)
    lm.layers.register_hook(MLP, Inputs("pre_forward", hook_id="half"))
    torch.testing.assert_close(ran(lm), expected)
    lm.layers.unregister_hook("half")


def test_what_is_given_by_keyword_is_seen_and_can_be_changed() -> None:
    """The attention of llama is called with nothing but keywords."""
    lm, path = small(), "model.layers.1.self_attn"
    seen: list[Any] = []

    class Attention(Controller):
        def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
            seen.append(inputs.by_name)
            return inputs[0] * 0

    def raw(_: Any, args: Any, kwargs: Any) -> Any:
        assert args == ()
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 0}

    module = copy.deepcopy(lm.model)
    module.get_submodule(path).register_forward_pre_hook(raw, with_kwargs=True)
    with torch.no_grad():
        expected = module(**lm.inference._arguments(lm.tokenize(TEXTS))).logits
    lm.layers.register_hook(path, Attention("pre_forward", hook_id="a"))
    torch.testing.assert_close(ran(lm), expected)
    assert {"hidden_states", "attention_mask", "position_embeddings"} <= seen[0].keys()
    lm.layers.unregister_hook("a")


def test_outputs_that_are_tuples_are_changed_by_a_tensor_or_as_a_whole() -> None:
    path = "model.layers.1.self_attn"

    class Tensor(Controller):
        def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
            assert isinstance(output, tuple)
            return output[0] * 2

    class Whole(Controller):
        def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
            return (output[0] * 2, *output[1:])

    class InPlace(Controller):
        def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
            output[0].mul_(2)

    lm = small()
    expected = by_torch(lm, path, lambda _, args, out: (out[0] * 2, *out[1:]))
    assert not torch.equal(expected, ran(lm))
    for kind in (Tensor, Whole, InPlace):
        lm.layers.register_hook(path, kind(hook_id="x"))
        torch.testing.assert_close(ran(lm), expected)
        lm.layers.unregister_hook("x")


def test_several_of_each_kind_on_one_layer_run_in_order() -> None:
    lm = small()
    looks = [Look() for _ in range(3)]
    lm.layers.register_hook(MLP, looks[0])
    lm.layers.register_hook(MLP, Twice(hook_id="twice"))
    lm.layers.register_hook(f"llamaforcausallm_{MLP.replace('.', '_')}", looks[1])
    lm.layers.register_hook(MLP, FunctionController(MLP, lambda x: x + 1, hook_id="more"))
    lm.layers.register_hook(lm.layers.list_layers().index(MLP), looks[2])
    ran(lm)
    first, second, third = (look.tensor_metadata["out"] for look in looks)
    assert torch.equal(second, first * 2)
    assert torch.equal(third, first * 2 + 1)
    assert lm.layers.get_hooks(MLP) == lm.layers.get_hooks()
    assert [type(hook).__name__ for hook in lm.layers.get_controllers()] == [
        "Twice",
        "FunctionController",
    ]
    assert lm.layers.get_detectors() == looks
    for hook in lm.layers.get_hooks():
        assert lm.layers.unregister_hook(hook)


class Both(Detector, Controller):
    """Detects first, then changes."""

    def __init__(self, fail: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.fail = fail
        self.seen: list[str] = []

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
        self.seen.append("looked")
        if self.fail == "look":
            raise ValueError("no")
        self.tensor_metadata["out"] = output.clone()

    def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self.seen.append("changed")
        if self.fail == "change":
            raise KeyError("never")
        return output * 2


def test_a_hook_that_is_both_looks_first() -> None:
    lm = small()
    expected = by_torch(lm, MLP, lambda _, args, out: out * 2)
    both = Both(hook_id="both", layer_signature=MLP)
    lm.layers.register_hook(MLP, both)
    torch.testing.assert_close(ran(lm), expected)
    assert both.seen == ["looked", "changed"]
    assert both.id == "both"
    assert lm.layers.get_detectors() == lm.layers.get_controllers() == [both]
    both.fail = "look"
    with pytest.warns(UserWarning, match="hook 'both' detected nothing: ValueError: no"):
        torch.testing.assert_close(ran(lm), expected)
    both.fail = "change"
    with pytest.raises(HookError) as caught:
        ran(lm)
    assert isinstance(caught.value.original_error, KeyError)
    lm.layers.unregister_hook(both)


def test_an_error_says_which_hook_it_was_and_the_next_run_is_fine() -> None:
    class Fails(Detector):
        def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
            raise ZeroDivisionError("by zero")

    lm = small()
    plain = ran(lm)
    lm.layers.register_hook(MLP, Fails(hook_id="bad"))
    with pytest.raises(
        HookError, match=r"Hook bad \(type=forward\) raised exception: by zero"
    ) as caught:
        ran(lm)
    assert (caught.value.hook_id, caught.value.hook_type) == ("bad", HookType.FORWARD)
    assert isinstance(caught.value.original_error, ZeroDivisionError)
    assert caught.value.__cause__ is caught.value.original_error
    assert lm.layers.unregister_hook("bad")
    assert torch.equal(ran(lm), plain)
    lm.layers.register_hook(MLP, FunctionController(MLP, lambda x: 3.0, hook_id="number"))
    with pytest.raises(HookError, match="the function must return a tensor; it returned a float"):
        ran(lm)
    lm.layers.unregister_hook("number")


@pytest.mark.parametrize("layer", [None, "x"])
def test_ready_hooks_refuse_what_they_cannot_work_with(layer: str | None) -> None:
    if layer is None:
        with pytest.raises(ValueError, match="layer_signature cannot be None"):
            LayerActivationDetector(layer)
        with pytest.raises(ValueError, match="layer_signature cannot be None"):
            FunctionController(layer, lambda x: x)
    else:
        with pytest.raises(ValueError, match="function must be callable; got int"):
            FunctionController(layer, 3)  # type: ignore[arg-type]


def test_the_last_batch_is_captured_and_cleared() -> None:
    lm = small()
    detector = LayerActivationDetector(LAYER, target_dtype=torch.float64)
    lm.layers.register_hook(LAYER, detector)
    assert detector.get_captured() is None
    seen: list[Any] = []
    by_torch(lm, LAYER, lambda _, args, out: seen.append(out))
    ran(lm, ["the"])
    ran(lm)
    torch.testing.assert_close(detector.get_captured(), seen[0].double())
    assert detector.get_captured() is detector.tensor_metadata["activations"]
    assert detector.metadata["activations_shape"] == tuple(seen[0].shape)
    detector.clear_captured()
    assert (detector.get_captured(), detector.metadata) == (None, {})
    lm.layers.unregister_hook(detector)


def test_inputs_and_outputs_of_the_model_are_captured() -> None:
    lm = small(adds_bos=True)
    inputs = ModelInputDetector(save_attention_mask=True)
    mine = ModelInputDetector(save_input_ids=False, save_attention_mask=True, special_token_ids=[])
    outputs = ModelOutputDetector(save_output_hidden_state=True)
    for place, hook in (("input", inputs), (None, mine), ("output", outputs)):
        lm.layers.register_hook(place, hook)
    output, encodings = lm.inference.execute_inference(TEXTS)
    real = encodings["attention_mask"] != 0
    assert torch.equal(inputs.get_captured_input_ids(), encodings["input_ids"])
    assert torch.equal(inputs.get_captured_attention_mask(), real & (encodings["input_ids"] != 1))
    assert torch.equal(mine.get_captured_attention_mask(), real)
    assert mine.get_captured_input_ids() is None
    assert torch.equal(outputs.get_captured_output_logits(), output.logits)
    assert outputs.get_captured_hidden_state() is None  # this model returns none
    with torch.no_grad():
        lm.model(torch.tensor([[5, 6]]))  # by place, and by other code
    assert inputs.get_captured_input_ids().tolist() == [[5, 6]]
    inputs.clear_captured()
    assert inputs.get_captured_input_ids() is None
    with pytest.raises(
        ValueError, match=r"there are no tokens .input_ids. among what the model was given"
    ):
        inputs.set_inputs_from_encodings({"pixels": torch.zeros(1)})
    for hook in lm.layers.get_hooks():
        lm.layers.unregister_hook(hook)


def test_the_tensor_of_a_value_is_found() -> None:
    x, y = torch.zeros(1), torch.ones(2)

    class Output:
        last_hidden_state = y

    for value, expected in (
        (x, x), ((x, y), x), ([x, y], x), ((None, y), y), (((x,), y), x), (None, None), ("a", None), ((), None),
        (Output(), y), ({"logits": x, "last_hidden_state": y}, y),
    ):  # fmt: skip
        assert extract_tensor_from_output(value) is expected
        assert extract_tensor_from_input(value) is expected


def test_a_hook_goes_to_torch_by_itself() -> None:
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain = linear(x)
    handle = linear.register_forward_hook(Twice().get_torch_hook())
    assert torch.equal(linear(x), plain * 2)
    handle.remove()
    before = FunctionController("0", lambda x: x * 0, "pre_forward").get_torch_hook()
    handle = linear.register_forward_pre_hook(before)
    assert torch.equal(linear(x), linear.bias.expand(2, 3))
    handle.remove()
    look = Look()
    handle = linear.register_forward_hook(look.get_torch_hook())
    assert torch.equal(linear(x), plain)
    assert torch.equal(look.tensor_metadata["out"], plain)
    handle.remove()
