"""Models that see: CLIP, a model of text and images, and what methods of language say to those that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import interpose as ip
from interpose.models.transformer import TransformerModel
from tests.models import tiny

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
TEXT = SIZES | {"vocab_size": 99, "max_position_embeddings": 40}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIGHT = SIZES | {"image_size": 16, "patch_size": 8}
IMAGE = 98
TOKENS = torch.tensor([[3, 4, 5], [6, 7, 8]])
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def clip() -> Any:
    torch.manual_seed(0)
    config = CLIPConfig(text_config=TEXT, vision_config=SIGHT, projection_dim=16)
    return TransformerModel(CLIPModel(config).eval())


def llava() -> Any:
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIGHT),
        text_config=LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return TransformerModel(LlavaForConditionalGeneration(config).eval())


def test_clip_has_its_sites_without_a_probe_of_ones_own() -> None:
    model = clip()
    assert "vision.blocks.0.attn.hook_pattern" in model.sites
    kept = "vision.blocks.*.hook_resid_post"
    output, cache = model.run_with_cache(input_ids=TOKENS, pixel_values=PIXELS, names_filter=kept)
    assert cache["vision.blocks.0.hook_resid_post"].shape == (2, 5, 32)
    bare = model.module(input_ids=TOKENS, pixel_values=PIXELS)
    assert torch.equal(output.logits_per_image, bare.logits_per_image)
    edited = model.run_with_hooks(
        input_ids=TOKENS,
        pixel_values=PIXELS,
        hooks=[ip.zero("vision.blocks.0.attn.hook_z", head=1)],
    )
    assert not torch.equal(edited.logits_per_image, bare.logits_per_image)


@pytest.mark.parametrize(
    ("kind", "ending"), [("resid_post", "hook_resid_post"), ("z", "attn.hook_z")]
)
@pytest.mark.parametrize("layer", [0, None, "kept"])
def test_a_kind_that_several_towers_have_is_asked_for_by_tower(
    kind: str, ending: str, layer: Any
) -> None:
    model = clip()
    given: dict[str, Any] = {"input_ids": TOKENS, "pixel_values": PIXELS}
    with pytest.raises(ip.NothingMatched) as caught:  # noqa: PT012
        if layer == "kept":
            model.run_with_cache(**given, names_filter=kind)
        model.run_with_hooks(**given, hooks=[ip.zero(kind, layer=layer)])
    for tower in ("vision", "encoder_0"):
        assert repr(f"{tower}.blocks.*.{ending}") in str(caught.value)


def test_a_failed_probe_of_a_missing_attribute_says_what_failed() -> None:
    model = clip()

    def forward(input_ids: torch.Tensor) -> Any:
        return input_ids.no_such_attribute  # type: ignore[attr-defined]

    model.module.forward = forward
    with pytest.raises(ip.Unsupported, match=r"no_such_attribute.*model.probe\(inputs\)"):
        len(model.sites)


def test_a_check_after_a_probe_uses_its_inputs() -> None:
    model = llava()
    images = torch.full((2, 4), IMAGE)
    inputs = {"input_ids": torch.cat([TOKENS, images, TOKENS], 1), "pixel_values": PIXELS}
    model.probe(inputs)
    report = model.check(layer=0)
    assert any(name.startswith("vision.blocks.0") for name in report.sites)
    assert report.passed, report.failures


def test_a_check_after_a_probe_holds_where_images_are_patches_in_a_row() -> None:
    torch.manual_seed(0)
    image, patches = 90, 16
    config = Qwen2VLConfig(
        text_config=TEXT
        | {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        vision_config={
            "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
        },
        image_token_id=image,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )  # fmt: skip
    model = TransformerModel(Qwen2VLForConditionalGeneration(config).eval())
    tokens = torch.tensor([[5, 92, *[image] * (patches // 4), 93, 7, 8]])
    inputs = {
        "input_ids": tokens,
        "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (tokens == image).long(),
    }
    model.probe(inputs)
    report = model.check(layer=0)
    assert any(name.startswith("vision.blocks.0") for name in report.sites)
    assert report.passed, report.failures


def test_tokens_of_images_need_images() -> None:
    model = llava()
    ids = torch.cat([TOKENS, torch.full((2, 4), IMAGE)], 1)
    for run in (
        lambda: model(ids),
        lambda: ip.logit_lens(model, ids, progress=False),
        lambda: ip.max_activating(model, ids, layer=0, progress=False),
    ):
        with pytest.raises(ip.Unsupported, match=r"stand for images .98, image_token_id"):
            run()
    assert model(ids, pixel_values=PIXELS).shape[:2] == (2, 7)
    assert model(TOKENS).shape[:2] == (2, 3)


METRIC = ip.metrics.logit(1)
QUIET: dict[str, Any] = {"progress": False}
METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "logit_lens": lambda m, x: ip.logit_lens(m, x, **QUIET),
    "sweep": lambda m, x: ip.sweep(m, x, x.flip(0), metric=METRIC, **QUIET),
    "ablation": lambda m, x: ip.ablation(m, x, metric=METRIC, **QUIET),
    "activation_patching": lambda m, x: ip.activation_patching(
        m, x, x.flip(0), metric=METRIC, **QUIET
    ),
    "attribution_patching": lambda m, x: ip.attribution_patching(
        m, x, x.flip(0), metric=METRIC, **QUIET
    ),
    "edge_attribution": lambda m, x: ip.edge_attribution(m, x, x.flip(0), metric=METRIC, **QUIET),
    "head_scores": lambda m, x: ip.head_scores(m, **QUIET),
    "max_activating": lambda m, x: ip.max_activating(m, x, layer=0, **QUIET),
    "probe": lambda m, x: ip.probe(m, x, [0, 1], **QUIET),
    "saliency": lambda m, x: ip.saliency(m, x, metric=METRIC),
    "attention_knockout": lambda m, x: ip.attention_knockout(
        m, x, metric=METRIC, query=-1, key=1, **QUIET
    ),
    "attention_patterns": lambda m, x: ip.attention_patterns(m, x[:1]),
    "alignment_search": lambda m, x: ip.alignment_search(m, x, x, answer=[1, 2], layer=0, **QUIET),
    "causal_tracing": lambda m, x: ip.causal_tracing(m, x[:1], subject=[1], answer=1, **QUIET),
    "compare_prompts": lambda m, x: ip.compare_prompts(m, x, x, answer=1),
    "direct_logit_attribution": lambda m, x: ip.direct_logit_attribution(m, x, answer=1),
    "function_vector": lambda m, x: ip.function_vector(m, x, head=[(0, 1)]),
    "gradient_times_activation": lambda m, x: ip.gradient_times_activation(m, x, metric=METRIC),
    "integrated_gradients": lambda m, x: ip.integrated_gradients(m, x, metric=METRIC),
    "measure": lambda m, x: ip.measure(m, x, METRIC),
    "patchscope": lambda m, x: ip.patchscope(m, x[:1], x[:1]),
    "path_patching": lambda m, x: ip.path_patching(m, x, x.flip(0), metric=METRIC, **QUIET),
    "run_variants": lambda m, x: ip.run_variants(
        m, x, [ip.Variant([ip.zero("z", layer=0)])], metric=METRIC, **QUIET
    ),
    "stream": lambda m, x: ip.stream(m, x, ("resid_post", 0)),
    "TunedLens": lambda m, x: ip.TunedLens.fit(m, x, **QUIET),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_language_say_that_a_model_of_images_is_none(name: str) -> None:
    model = TransformerModel(tiny.build("vit", "vision", layers=1))
    with pytest.raises(ip.Unsupported, match="reads pixel_values: it is not a language model"):
        METHODS[name](model, TOKENS)


PREDICTING = ["logit_lens", "sweep", "ablation", "activation_patching", "attribution_patching"]


@pytest.mark.parametrize("name", [*PREDICTING, "saliency"])
def test_methods_of_predictions_say_that_a_classifier_predicts_no_tokens(name: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    module = BertForSequenceClassification(BertConfig(**SIZES, vocab_size=99, num_labels=3)).eval()
    with pytest.raises(ip.Unsupported, match="predicts no tokens"):
        METHODS[name](TransformerModel(module), TOKENS)


def test_a_function_of_its_labels_is_a_metric_of_a_classifier() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    module = BertForSequenceClassification(BertConfig(**SIZES, vocab_size=99, num_labels=3)).eval()
    model = TransformerModel(module)
    found = ip.ablation(model, TOKENS, metric=lambda logits: logits[:, 1], **QUIET)
    assert float(found.values.abs().max()) > 0
