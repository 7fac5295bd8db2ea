"""Layers, inference, saving models: mi-crow's words on the pocket model and on tiny ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import interpose as ip
from interpose.dialects.mi_crow.hooks import (
    FunctionController,
    LayerActivationDetector,
    ModelInputDetector,
)
from interpose.dialects.mi_crow.language_model import LanguageModel
from interpose.dialects.mi_crow.language_model.device_manager import normalize_device
from interpose.dialects.mi_crow.store import LocalStore
from tests.dialects.mi_crow.models import TEXTS, small
from tests.models import texts as spoken
from tests.models import tiny

MLP = "model.layers.1.mlp"


def test_names_paths_and_indices_are_one_list(capsys: pytest.CaptureFixture[str]) -> None:
    lm = small()
    names, paths = lm.layers.get_layer_names(), lm.layers.list_layers()
    assert paths == [path for path, _ in lm.model.named_modules() if path]
    assert names[paths.index("model.layers.1")] == "llamaforcausallm_model_layers_1"
    for number, (name, path) in enumerate(zip(names, paths)):
        part = lm.model.get_submodule(path)
        assert all(lm.layers.module_of(one) is part for one in (number, name, path))
    for root in (None, "input", "output", "llamaforcausallm"):
        assert lm.layers.module_of(root) is lm.model
    lm.layers.print_layer_names()
    assert f"{len(names) - 1}: {names[-1]}" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"Layer name 'model.layer.1' not found in model.*did you mean 'model"
    ):
        lm.layers.path_of("model.layer.1")
    with pytest.raises(
        ValueError, match=r"Layer index '99' not found in model. It has layers 0 to"
    ):
        lm.layers.path_of(99)


def test_hooks_are_registered_found_and_switched_by_id() -> None:
    lm = small()
    one, other = (
        LayerActivationDetector(MLP, "one"),
        FunctionController(MLP, lambda x: x * 2, hook_id="two"),
    )
    assert lm.layers.register_hook(MLP, one) == "one"
    assert one.context is lm.context
    with pytest.raises(ValueError, match="Hook with ID 'one' is already registered"):
        lm.layers.register_hook(0, LayerActivationDetector(0, "one"))
    lm.layers.register_hook(MLP, other, "pre_forward")
    assert lm.layers.get_hooks(MLP, "forward") == [one]
    assert lm.layers.get_hooks(hook_type="pre_forward") == [other]
    assert lm.layers.get_hooks(0) == []
    assert (lm.layers.disable_hook("one"), lm.layers.disable_hook("no")) == (True, False)
    assert not one.enabled
    assert (lm.layers.enable_hook("one"), lm.layers.enable_hook("no")) == (True, False)
    lm.layers.disable_all_hooks()
    assert not one.enabled
    assert not other.enabled
    lm.layers.enable_all_hooks()
    assert one.enabled
    assert other.enabled
    assert not lm.layers.unregister_hook("no")
    assert not lm.layers.unregister_hook(LayerActivationDetector(MLP, "one"))
    assert lm.layers.unregister_hook("one")
    assert lm.layers.unregister_hook(other)
    assert lm.layers.get_hooks() == []
    with pytest.raises(TypeError, match="takes a Detector, a Controller or a Hook"):
        lm.layers.register_hook(MLP, lambda x: x)  # type: ignore[arg-type]


def test_functions_are_registered_as_torch_hooks() -> None:
    lm, seen = small(), []
    plain = lm.inference.execute_inference(TEXTS)[0].logits
    handle = lm.layers.register_forward_hook_for_layer(MLP, lambda module, args, out: out * 0)
    before = lm.layers.register_pre_forward_hook_for_layer(
        MLP, lambda module, args, kwargs: seen.append(kwargs), {"with_kwargs": True}
    )
    assert not torch.equal(lm.inference.execute_inference(TEXTS)[0].logits, plain)
    handle.remove()
    before.remove()
    assert seen == [{}]
    assert torch.equal(lm.inference.execute_inference(TEXTS)[0].logits, plain)
    with pytest.raises(TypeError, match="hook_args may have with_kwargs; got 'prepend'"):
        lm.layers.register_forward_hook_for_layer(MLP, print, {"prepend": True})


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_texts_have_the_logits_that_they_have_alone(side: str) -> None:
    lm = small(padding_side=side)
    output, encodings = lm.inference.execute_inference(TEXTS)
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            alone = lm.model(torch.tensor([lm.tokenizer(text)["input_ids"]])).logits[0]
        real = encodings["attention_mask"][row] != 0
        assert int(real.sum()) == len(alone)
        torch.testing.assert_close(output.logits[row][real], alone, rtol=1e-4, atol=1e-5)
    assert torch.equal(lm.inference.extract_logits(output), output.logits)
    assert lm.inference.extract_logits((output.logits, None)) is output.logits
    with pytest.raises(ValueError, match="there are no logits in a NoneType"):
        lm.inference.extract_logits(None)


def test_a_run_ends_after_a_layer_with_what_it_returned() -> None:
    lm = small()
    reached: list[int] = []
    last = lm.layers.register_forward_hook_for_layer("lm_head", lambda *given: reached.append(1))
    detector = LayerActivationDetector("model.layers.0")
    lm.layers.register_hook("model.layers.0", detector)
    output, _ = lm.inference.execute_inference(TEXTS, stop_after_layer="model.layers.0")
    assert torch.equal(output, detector.get_captured())
    assert output.shape[-1] == lm.model.config.hidden_size
    assert reached == []
    whole, _ = lm.inference.execute_inference(TEXTS)
    assert whole.logits.shape[-1] == lm.model.config.vocab_size
    assert reached == [1]
    last.remove()
    lm.layers.unregister_hook(detector)


def test_controllers_are_left_out_for_a_run_also_if_it_fails() -> None:
    lm = small()
    plain = lm.inference.execute_inference(TEXTS)[0].logits
    controller = FunctionController(MLP, lambda x: x * 2)
    lm.layers.register_hook(MLP, controller)
    edited = lm.inference.execute_inference(TEXTS)[0].logits
    assert torch.equal(
        lm.inference.execute_inference(TEXTS, with_controllers=False)[0].logits, plain
    )
    with pytest.raises(ValueError, match="not found in model"):
        lm.inference.execute_inference(TEXTS, with_controllers=False, stop_after_layer="nowhere")
    assert controller.enabled
    assert torch.equal(lm.inference.execute_inference(TEXTS)[0].logits, edited)
    assert not torch.equal(edited, plain)
    lm.layers.unregister_hook(controller)


def test_texts_run_in_batches_and_what_detectors_find_is_kept(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    lm.layers.register_hook(MLP, LayerActivationDetector(MLP))
    outputs, encodings = lm.inference.infer_texts(TEXTS, "run", batch_size=3)
    assert [len(one.logits) for one in outputs] == [3, 1]
    assert [len(one["input_ids"]) for one in encodings] == [3, 1]
    assert lm.layers.get_detectors()[0].tensor_metadata == {}  # kept, so cleared
    lm.inference.infer_texts(TEXTS, "together", batch_size=3, save_in_batches=False)
    assert lm.store.list_run_batches("run") == lm.store.list_run_batches("together") == [0, 1]
    for number, texts in enumerate((TEXTS[:3], TEXTS[3:])):
        with torch.no_grad():
            _, cache = lm.context.view.run_with_cache(texts, names_filter=[MLP])
        for run in ("run", "together"):
            facts, tensors = lm.store.get_detector_metadata(run, number)
            torch.testing.assert_close(tensors[MLP]["activations"], cache[MLP])
            assert facts[MLP]["activations_shape"] == list(cache[MLP].shape)
    assert lm.store.get_run_metadata("run")["layer_signatures"] == [MLP]
    single, _ = lm.inference.infer_texts(TEXTS)
    assert len(single.logits) == 4
    assert lm.layers.get_detectors()[0].tensor_metadata
    lm.inference.infer_texts(TEXTS[:1], clear_detectors_before=True)
    with pytest.raises(ValueError, match="Texts list cannot be empty"):
        lm.inference.infer_texts([])
    with pytest.raises(ValueError, match="Texts list cannot be empty"):
        lm.inference.execute_inference([])
    lm.layers.unregister_hook(lm.layers.get_detectors()[0])
    with pytest.raises(ValueError, match="run_name needs a store"):
        small().inference.infer_texts(TEXTS, "run")
    with pytest.raises(ValueError, match="Tokenizer must be initialized"):
        LanguageModel(tiny.build("llama")).inference.execute_inference(TEXTS)
    with pytest.raises(ValueError, match="Store must be provided"):
        small().save_detector_metadata("run", 0)


def test_texts_become_tokens_with_the_options_of_the_tokenizer() -> None:
    lm = small(adds_bos=True)
    made = lm.tokenize(TEXTS, padding="max_length", max_length=30)
    assert made["input_ids"].shape == (4, 30)
    assert lm.tokenize(TEXTS, max_length=3)["input_ids"].shape == (4, 3)
    text = "the cat saw it"
    assert "".join(lm.lm_tokenizer.split_to_tokens(text)) == text
    assert lm.lm_tokenizer.split_to_tokens(text, add_special_tokens=True)[0] == "<s>"
    assert lm.lm_tokenizer.split_to_tokens([text, "a"])[1] == ["a"]
    plain = spoken.tokenizer(pad=False)
    module = tiny.build("llama")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    padded = LanguageModel(module, plain)
    assert padded.tokenize(TEXTS)["input_ids"].shape[0] == 4
    assert plain.pad_token is None  # the user's tokenizer stays as it is
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_any_module_can_be_hooked_without_being_a_transformer() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(99, 4)
            self.out = nn.Linear(4, 99)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(input_ids)) * attention_mask[..., None]

    lm = LanguageModel(Words(), spoken.tokenizer())
    detector = LayerActivationDetector("embed")
    lm.layers.register_hook("words_embed", detector)
    output, encodings = lm.inference.execute_inference(TEXTS)
    assert torch.equal(detector.get_captured(), lm.model.embed(encodings["input_ids"]))
    assert torch.equal(lm.inference.extract_logits(output), output)
    with pytest.raises(
        TypeError, match="activations are saved of models of transformers, and this is Words"
    ):
        LanguageModel(Words(), spoken.tokenizer(), LocalStore("x")).activations.save_activations(
            ["a"], 0
        )
    lm.layers.unregister_hook(detector)


def test_models_are_saved_with_their_hooks_and_come_back(tmp_path: Path) -> None:
    lm = LanguageModel.from_huggingface(
        "pocket", store=LocalStore(tmp_path), model_params={"dtype": "float32"}
    )
    lm.layers.register_hook("transformer.h.2", LayerActivationDetector("transformer.h.2", "mine"))
    lm.layers.register_hook("input", ModelInputDetector(hook_id="in", save_attention_mask=True))
    with torch.no_grad():
        lm.model.transformer.h[0].mlp.c_fc.bias.add_(1.0)
    path = lm.save_model()
    assert path == tmp_path / "models" / "pocket" / "model.pt"
    again: Any = LanguageModel.from_local(path)
    assert [hook.id for hook in again.layers.get_hooks()] == ["mine", "in"]
    for name, value in lm.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    texts = ["The capital of France is"]
    same = [one.inference.execute_inference(texts)[0].logits for one in (lm, again)]
    assert torch.equal(*same)
    assert torch.equal(*(one.layers.get_detectors()[0].get_captured() for one in (lm, again)))
    assert again.layers.get_detectors()[1].save_attention_mask
    for one in (lm, again):
        for hook in one.layers.get_hooks():
            one.layers.unregister_hook(hook)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        LanguageModel.from_local(tmp_path / "none.pt")
    torch.save({"x": 1}, tmp_path / "other.pt")
    with pytest.raises(ip.FileError, match="is not what save_model writes"):
        LanguageModel.from_local(tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"say where: save_model\(path\)"):
        small().save_model()


def test_folders_are_loaded_as_they_are(tmp_path: Path) -> None:
    pocket = ip.load("pocket")
    pocket.module.save_pretrained(tmp_path / "model")
    pocket.tokenizer.save_pretrained(tmp_path / "tokenizer")
    lm = LanguageModel.from_local_torch(tmp_path / "model", tmp_path / "tokenizer")
    texts = ["The capital of France is"]
    found = lm.inference.execute_inference(texts)[0].logits
    with torch.no_grad():
        assert torch.equal(found, pocket(texts).to(found.device))
    with pytest.raises(FileNotFoundError, match="no tokenizer in"):
        LanguageModel.from_local_torch(tmp_path / "model", tmp_path)


def test_devices_have_full_names() -> None:
    assert normalize_device(None) == "cpu"
    assert normalize_device(torch.device("cpu")) == "cpu"
    with pytest.raises(ValueError, match="'nonsense' is no device"):
        normalize_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(
            ValueError, match="device 'cuda' is not available: there are 0 CUDA devices"
        ):
            normalize_device("cuda")


def test_tok_kwargs_are_for_the_tokenizer() -> None:
    lm = small()
    options: dict[str, Any] = {"max_length": 2}
    output, encodings = lm.inference.execute_inference(TEXTS, options)
    assert output.logits.shape[1] == encodings["input_ids"].shape[1] == 2
    assert options == {"max_length": 2}
