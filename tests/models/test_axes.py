"""Axes are what they are called: texts, positions, and nothing that only has their size.

The oracle is plain arithmetic on sizes (two batch sizes, two lengths), what other texts do to the
first one's values, and raw torch hooks on the modules themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.errors import SiteNotFound, Unsupported
from interpose.models.naming.axes import Axes
from tests.models import tiny

# type, kind, and what its sites are called besides the usual.
TYPES: list[tuple[str, str]] = [
    ("gpt2", "causal"),
    ("opt", "causal"),  # its MLP works on [batch * pos, d]
    ("mixtral", "causal"),
    ("xlnet", "causal"),  # [pos, batch, d] all through
    ("llama4_text", "causal"),
    ("jetmoe", "causal"),
    ("gemma3n_text", "causal"),  # several streams, before the batch
    ("deepseek_v4", "causal"),  # several streams, after the positions
    ("cpmant", "causal"),  # 32 places of its own before the tokens
    ("prophetnet", "causal"),
    ("longformer", "masked"),  # pads its texts
    ("convbert", "masked"),
    ("fsmt", "encoder_decoder"),
]
COUNTED = {"batch": 0, "pos": 1, "query": 1, "key": 1, "encoder_pos": 1}


def wrapped(model_type: str, kind: str = "causal", **options: Any) -> Any:
    return ip.wrap(tiny.build(model_type, kind, **options))


def all_sites(model: Any, inputs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model.run_with_cache(names_filter=list(model.sites), **inputs)[1]


@pytest.mark.parametrize(("model_type", "kind"), TYPES, ids=[each[0] for each in TYPES])
def test_axes_follow_what_they_count(model_type: str, kind: str) -> None:
    model = wrapped(model_type, kind)
    sizes = [(2, 7), (3, 10)]
    caches = [all_sites(model, tiny.inputs(model.module, batch=b, length=n)) for b, n in sizes]
    checked = set()
    for name, site in model.sites.items():
        first, second = (cache.calls(name)[0].shape for cache in caches)
        assert len(first) == len(second) == len(site.axes), name
        for axis, *found in zip(site.axes, first, second):
            if axis == "batch" and name.endswith("hook_pos_embed") and found == [1, 1]:
                continue  # all texts share it
            if axis in COUNTED:
                assert found == [size[COUNTED[axis]] for size in sizes], (name, site.axes)
                checked.add(axis)
            elif "slot" in axis:
                assert min(found[0] - 7, found[1] - 10) > 0, (name, site.axes)
            else:
                assert found[0] == found[1], (name, site.axes)
    assert checked >= {"batch", "pos"}


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "mixtral", "xlnet"])
def test_the_first_row_of_every_value_hangs_on_the_first_text_alone(model_type: str) -> None:
    model = wrapped(model_type)
    inputs = tiny.inputs(model.module)
    other = {name: value.clone() for name, value in inputs.items()}
    other["input_ids"][1] = tiny.inputs(model.module, seed=1)["input_ids"][1]
    before, after = all_sites(model, inputs), all_sites(model, other)
    moved = 0
    for name, site in model.sites.items():
        if "batch" not in site.axes or name == "hook_pos_embed":
            continue
        axis = site.axes.index("batch")
        a, b = before[name].double(), after[name].double()
        torch.testing.assert_close(a.select(axis, 0), b.select(axis, 0), rtol=1e-4, atol=1e-4)
        moved += not torch.equal(a.select(axis, 1), b.select(axis, 1))
    assert moved > 0.9 * len(model.sites) - 2


def raw_output(module: nn.Module, inputs: dict[str, Any], path: str, change: Any = None) -> Any:
    """What a module returns, and the model's output with that changed by a plain hook."""
    seen: list[Tensor] = []

    def hook(_: Any, __: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        seen.append(value.clone())
        if change is None:
            return None
        new = change(value.clone())
        return (new, *output[1:]) if isinstance(output, tuple) else new

    handle = module.get_submodule(path).register_forward_hook(hook)
    try:
        with torch.no_grad():
            output = module(**inputs)
    finally:
        handle.remove()
    return seen[0], tiny.outputs(output)


def test_a_value_whose_positions_come_first_is_shown_and_edited_by_text_and_position() -> None:
    model = wrapped("xlnet")
    inputs = tiny.inputs(model.module)

    def silence(value: Tensor) -> Tensor:
        value[3, 1] = 0  # position 3 of text 1
        return value

    raw, logits = raw_output(model.module, inputs, "transformer.layer.0.ff", silence)
    assert raw.shape[:2] == (7, 2)
    with torch.no_grad():
        plain, cache = model.run_with_cache(names_filter=("resid_post", 0), **inputs)
        edit = ip.zero("resid_post", layer=0, pos=3, rows=1)
        edited = model.run_with_hooks(hooks=[edit], **inputs)
    assert torch.equal(cache["resid_post", 0], raw.transpose(0, 1))
    moved = (tiny.outputs(edited) - tiny.outputs(plain)).abs().amax(dim=(1, 2))
    assert moved[0] == 0
    assert moved[1] > 0.01
    torch.testing.assert_close(tiny.outputs(edited), logits, rtol=0, atol=1e-6)


def test_heads_of_a_model_with_positions_first_are_edited_where_they_lie() -> None:
    model = wrapped("fsmt", "encoder_decoder")
    inputs = tiny.inputs(model.module)

    def silence(value: Tensor) -> Tensor:
        value.unflatten(-1, (4, 8))[2, 1, 3] = 0  # position 2 of text 1, head 3
        return value

    raw, logits = raw_output(
        model.module, inputs, "model.encoder.layers.0.self_attn.v_proj", silence
    )
    name = "encoder.blocks.0.attn.hook_v"
    with torch.no_grad():
        plain, cache = model.run_with_cache(names_filter=name, **inputs)
        edited = model.run_with_hooks(hooks=[ip.zero(name, pos=2, rows=1, head=3)], **inputs)
    assert torch.equal(cache[name], raw.unflatten(-1, (4, 8)).transpose(0, 1))
    moved = (tiny.outputs(edited) - tiny.outputs(plain)).abs().amax(dim=(1, 2))
    assert moved[0] == 0
    assert moved[1] > 1e-4
    torch.testing.assert_close(tiny.outputs(edited), logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama4_text", "jetmoe"])
def test_rows_of_experts_are_not_offered_as_positions(model_type: str) -> None:
    model = wrapped(model_type)
    name = "blocks.0.mlp.hook_experts_out"
    assert name not in model.sites
    assert "which axis counts what cannot be told" in model.sites.absent[name]
    with pytest.raises(SiteNotFound, match="which axis counts what cannot be told"):
        model.run_with_cache(names_filter=name, **tiny.inputs(model.module))


def test_a_softmax_over_something_else_is_no_pattern() -> None:
    model = wrapped("convbert", "masked")
    assert "takes another softmax too" in model.sites.absent["blocks.0.attn.hook_pattern"]


def test_pixels_are_no_positions() -> None:
    model = wrapped("clip_vision_model", "vision")
    assert model.sites["hook_embed"].axes == ("batch", "d_model", "row", "column")
    assert model.sites["blocks.0.hook_resid_pre"].axes == ("batch", "pos", "d_model")
    with pytest.raises(
        ValueError, match=r"'hook_embed' has no axis of positions: it is \('batch', "
    ):
        model.run_with_hooks(hooks=[ip.zero("hook_embed", pos=1)], **tiny.inputs(model.module))


def test_places_that_are_no_tokens_have_no_positions() -> None:
    model = wrapped("longformer", "masked")
    assert model.sites["blocks.0.hook_resid_post"].axes == ("batch", "slot", "d_model")
    with pytest.raises(ValueError, match="has no axis of positions"):
        model.run_with_hooks(
            hooks=[ip.zero("resid_post", layer=0, pos=-1)], **tiny.inputs(model.module)
        )


# What it costs: a second forward only where the first leaves it open.


def forwards(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    model.module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "xlnet", "gemma3n_text"])
def test_one_probe_tells_the_axes(model_type: str) -> None:
    model = wrapped(model_type)
    seen = forwards(model)
    assert list(model.sites)
    (tokens,) = seen
    taken = {size for p in model.module.parameters() for size in p.shape}
    assert not taken & set(tokens.shape)


def test_a_second_probe_tells_streams_from_texts() -> None:
    model = wrapped("gemma3n_text")
    streams = model.module.config.altup_num_inputs
    inputs = tiny.inputs(model.module, batch=streams)
    seen = forwards(model)
    sites = model.probe(inputs)
    assert sites["blocks.0.hook_resid_pre"].axes == ("stream", "batch", "pos", "d_model")
    assert [len(tokens) for tokens in seen] == [streams, 2 * streams]
    cache = all_sites(model, inputs)
    value = cache["blocks.0.hook_resid_pre"]
    inputs["input_ids"][1:] = inputs["input_ids"][:1]
    after = all_sites(model, inputs)["blocks.0.hook_resid_pre"]
    torch.testing.assert_close(value[:, 0], after[:, 0])
    assert (value[:, 1] - after[:, 1]).abs().max() > 0.01


def test_a_batch_of_one_tells_as_much() -> None:
    model = wrapped("opt")
    sites = model.probe(tiny.inputs(model.module, batch=1))
    assert sites["blocks.1.mlp.hook_pre"].axes == ("batch", "pos", "d_mlp")
    cache = all_sites(model, tiny.inputs(model.module, batch=3))
    assert cache["blocks.1.mlp.hook_pre"].shape[:2] == (3, 7)


# Names that say whose value it is.


def attention_input(module: nn.Module, path: str, inputs: dict[str, Any], change: Any) -> Any:
    """What an attention module is given, and the output with that changed, by plain torch."""
    seen: list[Tensor] = []

    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        value = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen.append(value.clone())
        new = change(value)
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": new}
        return (new, *args[1:]), kwargs

    handle = module.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            output = tiny.outputs(module(**inputs))
    finally:
        handle.remove()
    return seen[0], output


@pytest.mark.parametrize(
    ("model_type", "kind", "path"),
    [
        ("llama", "causal", "model.layers.0.self_attn"),
        ("falcon", "causal", "transformer.h.0.self_attention"),  # one norm for attention and MLP
        ("bert", "masked", "bert.encoder.layer.0.attention"),  # no norm before it
        ("olmo2", "causal", "model.layers.0.self_attn"),
    ],
)
@pytest.mark.parametrize("name", [("lm.attn.pre", 0), "blocks.0.attn.hook_in"])
def test_what_comes_before_attention_is_what_the_module_is_given(
    model_type: str, kind: str, path: str, name: Any
) -> None:
    model = wrapped(model_type, kind)
    inputs = tiny.inputs(model.module)
    raw, output = attention_input(model.module, path, inputs, lambda value: value.flip(-1))
    with torch.no_grad():
        plain, cache = model.run_with_cache(names_filter=name, **inputs)
        edited = model.run_with_hooks(
            fwd_hooks=[(name, lambda value, hook: value.flip(-1))], **inputs
        )
    assert torch.equal(cache[name], raw)
    assert (tiny.outputs(edited) - tiny.outputs(plain)).abs().max() > 0.01
    torch.testing.assert_close(tiny.outputs(edited), output, rtol=0, atol=1e-5)


def llava() -> Any:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=40, image_size=16, patch_size=4, **sizes
    )
    text = LlamaConfig(hidden_size=32, intermediate_size=48, vocab_size=99, **sizes)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=98)
    torch.manual_seed(0)
    module = LlavaForConditionalGeneration(config).eval()
    tiny.randomise(module)
    return module


def test_the_embeddings_of_a_tower_have_its_prefix() -> None:
    module = llava()
    model: Any = ip.wrap(module)
    tokens = torch.tensor([[1, *[98] * 16, 5, 6, 7], [2, *[98] * 16, 8, 9, 10]])
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16)}
    model.probe(inputs)
    assert "hook_pos_embed" not in model.sites
    path = next(p for p, m in module.named_modules() if p.endswith("position_embedding"))
    raw, _ = raw_output(module, inputs, path)
    with torch.no_grad():
        _, cache = model.run_with_cache(names_filter="vision.hook_pos_embed", **inputs)
    assert torch.equal(cache["vision.hook_pos_embed"], raw)
    assert model.sites["hook_embed"].axes == ("batch", "pos", "d_model")
    assert model.sites["vision.blocks.0.hook_resid_pre"].axes == ("batch", "pos", "d_model")
    with pytest.raises(SiteNotFound, match="positions are not embedded"):
        model.run_with_cache(names_filter="hook_pos_embed", **inputs)
    with pytest.raises(Unsupported, match="no W_pos"):
        _ = model.W_pos


@pytest.mark.parametrize(
    ("model_type", "positions"), [("bart", "model.{}.embed_positions"), ("t5", None)]
)
def test_an_encoder_and_a_decoder_have_embeddings_of_their_own(
    model_type: str, positions: str | None
) -> None:
    model = wrapped(model_type, "encoder_decoder")
    inputs = tiny.inputs(model.module)
    assert not torch.equal(inputs["input_ids"], inputs["decoder_input_ids"])
    cache = all_sites(model, inputs)
    table = model.module.get_input_embeddings().weight.detach()
    for tower, ids in (("encoder", "input_ids"), ("decoder", "decoder_input_ids")):
        assert torch.equal(cache[f"{tower}.hook_embed"], table[inputs[ids]])
        if positions is not None:
            raw, _ = raw_output(model.module, inputs, positions.format(tower))
            assert torch.equal(cache[f"{tower}.hook_pos_embed"], raw)
    with torch.no_grad():
        _, short = model.run_with_cache(names_filter="hook_embed", **inputs)
    assert torch.equal(short["hook_embed"], cache["decoder.hook_embed"])


# The proof.


def test_positions_taken_for_texts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Axes.of_value
    told: list[str] = []

    def careless(self: Axes, place: Any, *args: Any, **options: Any) -> Any:
        layout = read(self, place, *args, **options)
        if getattr(layout, "swapped", False):
            told.append(place.path)
            return type(layout)(layout.names)
        return layout

    monkeypatch.setattr(Axes, "of_value", careless)
    model = wrapped("xlnet")
    report = model.check(tiny.inputs(model.module), layer=[0])
    assert told
    failing = {f.site for f in report.findings if f.promise == "rows are texts" and not f.passed}
    assert "blocks.0.hook_resid_post" in failing
    assert "blocks.0.hook_resid_post" not in model.sites
    assert "blocks.1.hook_resid_post" not in model.sites


@pytest.mark.parametrize("model_type", ["xlnet", "cpmant"])
def test_a_sweep_over_positions_needs_a_stream_of_texts_and_positions(model_type: str) -> None:
    model = wrapped(model_type)
    tokens = tiny.inputs(model.module, batch=1)["input_ids"]
    with pytest.raises(Unsupported, match="no sweep can run on"):
        ip.sweep(
            model,
            clean=tokens,
            corrupt=tokens.flip(1),
            site="resid_pre",
            over=("layer", "pos"),
            metric=ip.metrics.logit(7),
        )
