"""Parts of a model as attributes: the same hook points as by name, weights, and errors that say what is there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.engine.points import HookPoint
from interpose.models.transformer import TransformerModel
from interpose.models.weights.attributes import Part, Parts, part_of
from tests.models import tiny
from tests.models.wired import wired


def follow(model: Any, name: str) -> Any:
    """A canonical name, segment by segment, as a user would write it."""
    here = model
    for segment in name.split("."):
        here = here[int(segment)] if segment.isdigit() else getattr(here, segment)
    return here


def same(found: Any, expected: HookPoint) -> None:
    assert isinstance(found, HookPoint)
    assert (found.name, found.canonical) == (expected.name, expected.canonical)
    assert found.module is expected.module
    assert found.ctx is expected.ctx


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mixtral", "jamba", "gpt_neox", "gemma2"])
def test_every_site_can_be_reached_by_attributes(model_type: str) -> None:
    model = wired(model_type)
    sites = model.tree.table.sites
    assert len(sites) > 30
    for name in sites:
        same(follow(model, name), model.hook_dict[name])


def test_sites_of_other_towers_begin_with_their_name() -> None:
    model = wired("whisper", "encoder_decoder")
    names = [name for name in model.tree.table.sites if name.startswith("encoder.")]
    assert len(names) > 30
    for name in names:
        same(follow(model, name), model.hook_dict[name])
    assert len(model.encoder.blocks) == len(model.decoder.blocks) == 2
    assert model.encoder.W_Q.shape == (2, 4, 32, 8)
    assert model.encoder.ln_final.w.shape == (32,)
    assert torch.equal(model.encoder.blocks[1].attn.W_Q, model.encoder.W_Q[1])
    assert not torch.equal(model.encoder.W_Q, model.W_Q)


def test_blocks_without_a_tower_are_the_decoders() -> None:
    model = wired("whisper", "encoder_decoder")
    same(model.blocks[1].attn.hook_z, model.hook_dict["decoder.blocks.1.attn.hook_z"])
    assert model.blocks[0] == model.decoder.blocks[0]
    assert torch.equal(model.blocks[1].attn.W_Q, model.W_Q[1])
    same(model.ln_final.hook_scale, model.hook_dict["decoder.ln_final.hook_scale"])


def test_blocks_are_a_list() -> None:
    model = wired("llama", layers=4)
    blocks = model.blocks
    assert isinstance(blocks, Parts)
    assert len(blocks) == 4
    assert blocks[-1] == blocks[3] != blocks[0]
    assert [part.hook_resid_pre.layer() for part in blocks] == [0, 1, 2, 3]
    assert [part.hook_resid_pre.layer() for part in blocks[1:-1]] == [1, 2]
    assert [part.hook_resid_pre.layer() for part in blocks[::-2]] == [3, 1]
    assert blocks[1:][0] == blocks[1]
    assert blocks[2] in blocks
    assert blocks.index(blocks[2]) == 2
    assert len({*blocks, *blocks}) == 4
    with pytest.raises(IndexError, match=r"^blocks\[4\]: there are 4 blocks\.$"):
        blocks[4]
    with pytest.raises(IndexError):
        blocks[-5]


def test_weights_are_attributes_of_their_part() -> None:
    model = wired("gpt2")
    block, module = model.blocks[1], model.module.transformer
    assert torch.equal(block.attn.W_Q, model.W_Q[1])
    assert torch.equal(block.mlp.b_in, module.h[1].mlp.c_fc.bias)
    assert torch.equal(block.ln1.w, module.h[1].ln_1.weight)
    assert torch.equal(block.ln2.b, module.h[1].ln_2.bias)
    assert torch.equal(model.ln_final.w, module.ln_f.weight)
    assert torch.equal(model.unembed.W_U, module.wte.weight.T)
    assert torch.equal(model.unembed.b_U, torch.zeros(99))
    assert torch.equal(model.embed.W_E, module.wte.weight)
    assert torch.equal(model.pos_embed.W_pos, module.wpe.weight)
    assert block.ln1.w.data_ptr() == module.h[1].ln_1.weight.data_ptr()
    assert torch.equal(wired("llama").blocks[0].ln1.b, torch.zeros(32))


def test_a_hook_put_on_an_attribute_runs() -> None:
    model = wired("llama")
    given = tiny.inputs(model.module)
    clean = model.module(**given).logits
    handle = model.blocks[-1].attn.hook_z.add_hook(lambda value, hook: torch.zeros_like(value))
    edited = model.module(**given).logits
    handle.remove()
    assert handle.fired == 1
    assert (clean - edited).abs().max() > 0.01
    expected = model.run_with_hooks(
        **given, fwd_hooks=[("blocks.1.attn.hook_z", lambda value, hook: torch.zeros_like(value))]
    ).logits
    assert torch.equal(edited, expected)


def test_other_systems_words_for_a_site_work() -> None:
    model = wired("llama")
    assert model.blocks[0].hook_out.canonical == "blocks.0.hook_resid_post"
    assert model.embed.hook_out.canonical == "hook_embed"
    assert model.ln_final.hook_out.canonical == "ln_final.hook_normalized"


# Names that are not there.


def missing(part: Any, name: str) -> str:
    assert not hasattr(part, name)
    with pytest.raises(AttributeError) as caught:
        getattr(part, name)
    return str(caught.value)


def test_a_wrong_name_says_what_is_there() -> None:
    model = wired("gpt2")
    assert missing(model.blocks[1].mlp, "hook_pots") == (
        "'blocks.1.mlp' has no 'hook_pots'. It has: hook_pre, hook_post, hook_in, W_in, b_in, W_out, b_out."
    )
    assert missing(model.ln_final, "W_Q") == (
        "'ln_final' has no 'W_Q'. It has: hook_normalized, hook_scale, w, b."
    )
    assert "'blocks.1' has no 'atn'. It has: hook_resid_pre, " in missing(model.blocks[1], "atn")


def test_a_site_the_model_has_not_says_why() -> None:
    assert missing(wired("llama"), "hook_pos_embed") == (
        "LlamaForCausalLM has no 'hook_pos_embed': positions are not embedded by a module of their "
        "own."
    )
    assert missing(wired("llama"), "pos_embed") == (
        "LlamaForCausalLM has no 'pos_embed': positions are not embedded by a module of their own."
    )
    assert "at once (a parallel block)" in missing(wired("gpt_neox").blocks[0], "hook_resid_mid")
    assert "no norm reads the last block's output" in missing(wired("bert", "masked"), "ln_final")
    assert "this block has no attention" in missing(wired("mamba2").blocks[0], "attn")
    assert missing(wired("gpt2").blocks[0].mlp, "W_gate").startswith("'blocks.0.mlp' has no")


def test_names_of_the_model_that_nobody_has_are_the_models_to_refuse() -> None:
    assert "has 'blokcs'" in missing(wired("gpt2"), "blokcs")


# The module's own attributes.


def test_the_modules_attributes_are_not_shadowed() -> None:
    module = tiny.build("t5", "encoder_decoder")
    model = TransformerModel(module)
    assert model.encoder is module.encoder
    assert model.lm_head is module.lm_head
    module.embed = module.blocks = torch.nn.Identity()
    assert model.embed is module.embed
    assert isinstance(model.blocks, Parts)
    same(model.blocks[0].hook_resid_pre, model.hook_dict["decoder.blocks.0.hook_resid_pre"])


def test_no_attribute_but_ours_costs_a_probe() -> None:
    model = wired("gpt2")
    for name in ("lm_head", "config", "generate", "nothing", "_repr_mimebundle_", "shape", "W_X"):
        hasattr(model, name)
    assert part_of(model, "lm_head") is None
    assert model._anatomy is None
    assert isinstance(model.embed, Part)
    assert model._anatomy is not None


# What a notebook shows.


def test_completion_lists_what_is_there() -> None:
    model = wired("gpt2")
    assert {"attn", "mlp", "ln1", "ln2", "hook_resid_pre", "hook_q_input"} <= set(
        dir(model.blocks[0])
    )
    names = set(dir(model.blocks[0].attn))
    assert {"W_Q", "b_Q", "W_O", "hook_q", "hook_z", "hook_pattern"} <= names
    for name in names:
        getattr(model.blocks[0].attn, name)


def test_parts_print_shortly() -> None:
    model = wired("gpt2")
    assert repr(model.blocks[0].mlp) == (
        "Part('blocks.0.mlp': hook_pre, hook_post, hook_in, W_in, b_in, W_out, b_out)"
    )
    assert repr(model.embed) == "Part('embed': W_E)"
    assert repr(model.blocks).startswith("Parts('blocks': 2 blocks, the first with hook_resid_pre,")
    assert repr(model.blocks[:0]) == "Parts('blocks': 0 blocks, the first with nothing)"


def test_parts_can_be_copied() -> None:
    part = wired("gpt2").blocks[0]
    assert copy.copy(part) == part
    assert part != "blocks.0"


def test_parts_run_as_the_modules_behind_them() -> None:
    model = ip.load("pocket", device="cpu")
    gpt2 = model.module
    tokens = model.to_tokens("The capital of France is")
    logits, cache = model.run_with_cache(tokens, names_filter=["embed", "resid_post", "resid_mid"])
    assert torch.equal(model.embed(tokens), cache["embed"])
    last = cache["resid_post", -1]
    assert torch.equal(model.unembed(model.ln_final(last)), logits)
    assert torch.equal(model.ln_final(last), gpt2.transformer.ln_f(last))
    middle = cache["resid_mid", 3]
    block = gpt2.transformer.h[3]
    assert model.blocks[3].mlp.module is block.mlp
    assert model.blocks[3].attn.module is block.attn
    assert model.blocks[3].module is block
    assert torch.equal(
        model.blocks[3].mlp(model.blocks[3].ln2(middle)), block.mlp(block.ln_2(middle))
    )
    with pytest.raises(TypeError, match="no single module"):
        model.pos_embed(tokens)
