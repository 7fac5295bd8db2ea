"""Defects found in mi-crow, each as a test that it is not here; 1, 10, 11 and 12 are those of autoencoders."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import interpose as ip
from interpose.dialects.mi_crow.hooks import (
    Controller,
    FunctionController,
    HookError,
    LayerActivationDetector,
)
from interpose.dialects.mi_crow.language_model import LanguageModel
from interpose.dialects.mi_crow.store import LocalStore, StoreDataloader
from interpose.store.filling import SegmentMaker
from tests.dialects.mi_crow.models import TEXTS, small
from tests.models import texts as spoken
from tests.models import tiny

MLP = "model.layers.1.mlp"


class Steer(Controller):
    def __init__(self, vector: nn.Parameter, **options: Any) -> None:
        super().__init__(**options)
        self.vector = vector

    def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return output + self.vector


def test_2_gradients_flow_through_edits() -> None:
    lm = small()
    vector = nn.Parameter(torch.randn(lm.model.config.hidden_size))
    tokens = torch.arange(10, 16)[None]
    lm.layers.register_hook(MLP, Steer(vector, hook_id="steer"))
    lm.model(tokens).logits[0, -1, 5].backward()
    found = vector.grad
    lm.layers.unregister_hook("steer")
    module, same = copy.deepcopy(lm.model), nn.Parameter(vector.detach().clone())
    module.get_submodule(MLP).register_forward_hook(lambda _, args, out: out + same)
    module(tokens).logits[0, -1, 5].backward()
    assert found is not None
    assert bool(found.abs().sum() > 0)
    torch.testing.assert_close(found, same.grad)


def test_3_edits_of_another_shape_are_refused() -> None:
    lm = small()
    lm.layers.register_hook(MLP, FunctionController(MLP, lambda x: x[:, :1], hook_id="short"))
    with pytest.raises(
        ip.EditShapeError,
        match=r"hook 'short'.* returned shape \(4, 1, .*Return a tensor of the same shape",
    ):
        lm.inference.execute_inference(TEXTS)
    lm.layers.unregister_hook("short")


def test_4_an_edit_leaves_tensors_that_share_memory_alone() -> None:
    """GPT-2's dropout returns its input in eval mode; its output is edited, its input must stay."""
    lm = small("gpt2")
    inputs: list[torch.Tensor] = []
    part = lm.model.get_submodule("transformer.drop")
    keep = part.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    lm.layers.register_hook(
        "transformer.drop", FunctionController("x", torch.zeros_like, hook_id="zero")
    )
    seen = LayerActivationDetector("transformer.drop")
    lm.layers.register_hook("transformer.drop", seen)
    lm.inference.execute_inference(TEXTS)
    assert not seen.get_captured().any()
    assert bool(inputs[0].abs().sum() > 0)
    keep.remove()
    for hook in lm.layers.get_hooks():
        lm.layers.unregister_hook(hook)


def test_5_a_model_stays_where_it_is_and_edits_are_made_there() -> None:
    """A model in two parts, each of which moves its input; here both are the CPU, and every move is noticed."""
    module = tiny.build("llama")
    moved: list[Any] = []
    module.to = lambda *args, **options: moved.append(args) or module  # type: ignore[method-assign]
    lm = LanguageModel(module, spoken.tokenizer())
    plain = lm.inference.execute_inference(TEXTS)[0].logits
    lm.layers.register_hook(MLP, FunctionController(MLP, lambda x: x * 0, hook_id="zero"))
    assert not torch.equal(lm.inference.execute_inference(TEXTS)[0].logits, plain)
    assert moved == []
    lm.layers.unregister_hook("zero")
    module.hf_device_map = {"model": "cpu", "lm_head": "cpu"}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="was loaded with a device_map"):
        LanguageModel(module, spoken.tokenizer(), device="cpu")


def test_6_what_is_captured_is_there_when_the_run_ends() -> None:
    """A copy to the CPU is never left under way: no tensor is copied without waiting for it."""
    waited: list[bool] = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._to_copy.default:
                waited.append(not (kwargs or {}).get("non_blocking", False))
            return func(*args, **(kwargs or {}))

    detector = LayerActivationDetector("x", target_dtype=torch.float64)
    with Watched():
        detector.process_activations(nn.Identity(), (), torch.randn(2, 3))
    assert waited == [True]


def test_7_layers_go_by_number(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    run = lm.activations.save_activations(TEXTS, layer_signature=3)
    by_path = lm.activations.save_activations(TEXTS, lm.layers.list_layers()[3])
    one, other = (
        torch.cat(list(StoreDataloader(lm.store, name, layer)))
        for name, layer in ((run, 3), (by_path, lm.layers.list_layers()[3]))
    )
    assert torch.equal(one, other)
    assert len(one)


def test_8_layers_come_in_any_order(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    layers = ["model.layers.1", "model.layers.0"]
    run = lm.activations.save_activations(TEXTS, layers, stop_after_last_layer=True)
    found = [torch.cat(list(StoreDataloader(lm.store, run, layer))) for layer in layers]
    assert found[0].shape == found[1].shape
    assert not torch.equal(*found)


def test_9_hooks_of_all_kinds_share_a_layer_and_none_overwrites_another(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    before, after = LayerActivationDetector(MLP, "before"), LayerActivationDetector(MLP, "after")
    for hook in (before, FunctionController(MLP, lambda x: x * 2, hook_id="twice"), after):
        lm.layers.register_hook(MLP, hook)
    lm.inference.infer_texts(TEXTS, "run")
    _, tensors = lm.store.get_detector_metadata("run", 0)
    assert torch.equal(tensors[f"{MLP}#after"]["activations"], tensors[MLP]["activations"] * 2)
    for hook in lm.layers.get_hooks():
        lm.layers.unregister_hook(hook)


def test_13_the_top_token_is_the_one_that_the_unit_fired_at() -> None:
    """With BOS in front and padding on either side; and looking changes nothing in the model."""
    model = spoken.speaking("llama", adds_bos=True)
    token = int(model.to_tokens("the cat saw it")[0, 3])

    def fires(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value[..., 0] = (hook.given["input_ids"] == token).float() + 1
        return value

    for side in ("left", "right"):
        top = ip.TopActivating(("post", 1), neuron=0, k=50, context=0)
        with torch.no_grad():
            plain = model.run_with_hooks(
                TEXTS, hooks=[ip.FunctionHook(("post", 1), fires)], padding_side=side
            )
            looked = model.run_with_hooks(
                TEXTS, hooks=[ip.FunctionHook(("post", 1), fires), top], padding_side=side
            )
        assert torch.equal(plain, looked)
        places = top.result().examples(0)
        fired = [place for place in places if place["value"] == 2.0]
        assert fired
        rows = [model.to_tokens(text)[0].tolist() for text in TEXTS]
        assert [(one["text"], one["pos"]) for one in fired] == [
            (number, pos)
            for number, row in enumerate(rows)
            for pos, t in enumerate(row)
            if t == token
        ]
        assert {one["token"] for one in fired} == {model.to_single_str_token(token)}
        assert not {"<pad>", "<s>"} & {one["token"] for one in places}
        assert len(places) == sum(map(len, rows)) - len(rows)


def test_14_no_vector_of_padding_is_given_to_training(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    run = lm.activations.save_activations(TEXTS, MLP)
    count = sum(len(lm.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert sum(map(len, StoreDataloader(lm.store, run, MLP))) == count
    opened = ip.open_store(tmp_path / "runs" / run / "activations")
    orders = [torch.cat([batch.tokens for batch in opened.batches(seed=seed)]) for seed in (1, 2)]
    assert not torch.equal(*orders)  # and they can be shuffled
    assert [len(order) for order in orders] == [count, count]


def test_15_no_garbage_is_collected_and_nothing_is_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, calls = small(store=tmp_path), []
    monkeypatch.setattr(gc, "collect", lambda *args: calls.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    lm.layers.register_hook(MLP, LayerActivationDetector(MLP))
    seen: dict[Path, int] = {}
    for _ in range(3):
        lm.inference.infer_texts(TEXTS, None)
        lm.save_detector_metadata("run", None, unified=True)
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*") if path.is_file()}
        assert all(files[path] == when for path, when in seen.items())
        assert len(files) == len(seen) + 2  # a tensor, and the record of it
        seen = files
    assert calls == []
    lm.layers.unregister_hook(lm.layers.get_detectors()[0])


def test_16_a_save_that_was_ended_goes_on_and_has_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, whole = small(store=tmp_path), small(store=tmp_path / "whole")
    options: dict[str, Any] = {"batch_size": 1, "shard_size": 1, "run_name": "run"}
    whole.activations.save(MLP, TEXTS, **options)
    make = SegmentMaker.make

    def ended(self: SegmentMaker, shard: Any, *args: Any, **others: Any) -> None:
        if shard.number == 2:
            raise KeyboardInterrupt
        make(self, shard, *args, **others)

    monkeypatch.setattr(SegmentMaker, "make", ended)
    with pytest.raises(KeyboardInterrupt):
        lm.activations.save(MLP, TEXTS, **options)
    found = lm.store.list_run_batches("run")
    assert found == list(range(len(found)))
    assert len(found) < len(TEXTS)
    monkeypatch.undo()
    lm.activations.save(MLP, TEXTS, **options)
    folders = [path / "runs" / "run" / "activations" for path in (tmp_path, tmp_path / "whole")]
    manifests = [ip.open_store(folder).manifest() for folder in folders]
    assert manifests[0] == manifests[1]
    for number, text in enumerate(TEXTS):
        tokens = lm.store.get_run_batch("run", number)["input_ids"][0].tolist()
        assert tokens == lm.tokenizer(text)["input_ids"]


def test_17_options_of_the_tokenizer_hold_for_every_batch() -> None:
    lm = small()
    options = {"padding": "max_length", "max_length": 20}
    _, encodings = lm.inference.infer_texts(TEXTS, batch_size=1, tok_kwargs=options)
    assert [tuple(one["input_ids"].shape) for one in encodings] == [(1, 20)] * 4
    assert options == {"padding": "max_length", "max_length": 20}


def test_18_a_hook_may_be_registered_before_a_layer_and_errors_are_wrapped_once() -> None:
    lm = small()
    module = copy.deepcopy(lm.model)
    module.get_submodule(MLP).register_forward_pre_hook(lambda _, args: (args[0] * 0,))
    with torch.no_grad():
        expected = module(**lm.inference._arguments(lm.tokenize(TEXTS))).logits
    hook = FunctionController(MLP, lambda x: x * 0)
    lm.layers.register_hook(MLP, hook, hook_type="pre_forward")
    torch.testing.assert_close(lm.inference.execute_inference(TEXTS)[0].logits, expected)
    lm.layers.unregister_hook(hook)

    def fails(_: torch.Tensor) -> torch.Tensor:
        raise LookupError("gone")

    lm.layers.register_hook(MLP, FunctionController(MLP, fails, hook_id="fails"))
    with pytest.raises(HookError) as caught:
        lm.inference.execute_inference(TEXTS)
    assert type(caught.value.original_error) is LookupError
    assert caught.value.original_error.__cause__ is None
    lm.layers.unregister_hook("fails")


def test_19_a_model_with_a_slash_in_its_name_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ip.load("pocket").module.save_pretrained("org/name")
    ip.load("pocket").tokenizer.save_pretrained("org/name")
    lm = LanguageModel.from_huggingface("org/name", store=LocalStore("store"))
    assert lm.model_id == "org/name"
    lm.layers.register_hook("transformer.h.1", LayerActivationDetector("transformer.h.1", "kept"))
    lm.layers.register_hook(0, FunctionController(0, lambda x: x, hook_id="code"))
    with pytest.warns(
        UserWarning, match=r"hook 'code' \('FunctionController'\) is code, which no file has"
    ):
        again = LanguageModel.from_local(lm.save_model())
    assert again.model_id == "org/name"
    assert [hook.id for hook in again.layers.get_hooks()] == ["kept"]
    for one in (lm, again):
        for hook in one.layers.get_hooks():
            one.layers.unregister_hook(hook)


def test_20_dtypes_stay_keywords_are_seen_and_names_are_one_registry() -> None:
    module = tiny.build("llama").to(torch.bfloat16)
    lm = LanguageModel(module, spoken.tokenizer())
    seen: list[Any] = []

    class Keywords(Controller):
        def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> None:
            seen.append((output[0].dtype, sorted(inputs.by_name)))

    path = "model.layers.1.self_attn"
    index, flat = lm.layers.list_layers().index(path), "llamaforcausallm_model_layers_1_self_attn"
    hook = Keywords(hook_id="seen")
    lm.layers.register_hook(flat, hook)
    output, _ = lm.inference.execute_inference(TEXTS)
    assert seen[0][0] is output.logits.dtype is torch.bfloat16
    assert {"hidden_states", "position_embeddings"} <= set(seen[0][1])
    assert all(lm.layers.get_hooks(name) == [hook] for name in (index, flat, path))
    lm.layers.unregister_hook(hook)
    lm = small()
    for options, dtype in (
        ({}, torch.float32),
        ({"autocast_dtype": torch.bfloat16}, torch.bfloat16),
        ({"autocast": False, "autocast_dtype": torch.bfloat16}, torch.float32),
    ):
        assert lm.inference.execute_inference(TEXTS, **options)[0].logits.dtype is dtype


def test_metadata_of_detectors_is_small(tmp_path: Path) -> None:
    """Facts are JSON of a few words; numbers are tensors."""
    lm = small(store=tmp_path)
    lm.layers.register_hook(MLP, LayerActivationDetector(MLP))
    lm.inference.infer_texts(TEXTS, "run")
    facts = json.loads((tmp_path / "runs/run/batch_0/metadata.json").read_text())
    assert len(json.dumps(facts)) < 500
    lm.layers.unregister_hook(lm.layers.get_detectors()[0])
