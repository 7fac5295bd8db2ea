"""Semantic sites with what runs models: compilation, checkpointing, threads, generation, adapters."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.leftovers import hooks_on
from tests.models import tiny
from tests.models.texts import TEXTS, speaking

PATTERN = "blocks.0.attn.hook_pattern"


def built(kind: str) -> tuple[Any, Tensor]:
    module = tiny.build(kind)
    return module, tiny.inputs(module)["input_ids"]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


# Compilation.


def test_an_unhooked_model_still_compiles_whole_after_discovery() -> None:
    module, ids = built("llama")
    model = ip.wrap(module)
    assert len(model.sites) > 40
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=ids, use_cache=False).logits, model(ids))


def test_hooks_inside_attention_fire_in_a_compiled_model() -> None:
    module, ids = built("llama")
    model = ip.wrap(module)
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        bare = compiled(input_ids=ids, use_cache=False).logits
        with model.hooks([(PATTERN, lambda value, hook: torch.zeros_like(value))]):
            edited = compiled(input_ids=ids, use_cache=False).logits
        again = compiled(input_ids=ids, use_cache=False).logits
    assert relative(edited, bare) > 1e-3
    assert torch.equal(again, bare)


# Checkpointing.


@pytest.mark.parametrize("site", ["blocks.0.hook_resid_mid", PATTERN, "blocks.0.attn.hook_z"])
def test_gradients_under_checkpointing_are_those_without(site: str) -> None:
    module, ids = built("llama")
    module.config.attention_dropout = 0.0
    for part in module.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    module.train()
    model = ip.wrap(module)

    def loss(output: Any) -> Tensor:
        return output.logits.float().square().mean()

    def edit(value: Tensor, hook: ip.HookPoint) -> Tensor:
        return value * 0.5

    grads = []
    for checkpointing in (False, True):
        module.gradient_checkpointing_enable() if checkpointing else None
        module.zero_grad()
        with model.hooks([(site, edit)]):
            loss(module(input_ids=ids, use_cache=False)).backward()
        grads.append(module.get_input_embeddings().weight.grad.clone())
    assert grads[0].abs().max() > 0
    assert torch.equal(*grads)
    with model.hooks([(site, edit)]):
        late = loss(module(input_ids=ids, use_cache=False))
    with pytest.raises(ip.GradientError, match="Call backward"):
        late.backward()


# Threads.


def test_a_thread_that_reads_patterns_leaves_others_their_kernel() -> None:
    module, ids = built("gpt2")
    model = ip.wrap(module)
    with torch.no_grad():
        bare = module(input_ids=ids).logits
        model.run_with_cache(ids, names_filter=PATTERN)
    others: list[bool] = []
    stop = threading.Event()

    def use() -> None:
        with torch.no_grad():
            while not stop.is_set():
                others.append(torch.equal(module(input_ids=ids).logits, bare))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(60):
                model.run_with_hooks(ids, fwd_hooks=[(PATTERN, lambda value, hook: value * 0)])
    finally:
        stop.set()
        thread.join()
    assert len(others) > 5
    assert all(others)


def test_discovery_while_another_thread_uses_the_model_finds_the_same() -> None:
    module, ids = built("llama")
    expected = set(ip.wrap(module).sites)
    stop = threading.Event()

    def use() -> None:
        with torch.no_grad():
            while not stop.is_set():
                module(input_ids=ids)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(5):
            assert set(ip.wrap(module).sites) == expected
    finally:
        stop.set()
        thread.join()


# Generation.

OPTIONS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "mistral", "gemma2", "bloom", "falcon", "gpt_oss"]
)
def test_generated_values_are_those_of_one_forward_over_the_whole_text(kind: str) -> None:
    module, ids = built(kind)
    model = ip.wrap(module)
    wanted = ["blocks.*.hook_resid_post", "blocks.1.attn.hook_z", "blocks.0.attn.hook_pattern"]
    bare = module.generate(ids, **OPTIONS)
    with model.record(wanted) as cache:
        tokens = model.generate(ids, **OPTIONS)
    assert torch.equal(tokens, bare)
    with torch.no_grad():
        _, whole = model.run_with_cache(tokens[:, :-1], names_filter=wanted)
    for name in whole:
        assert cache[name].shape == whole[name].shape, name
        assert relative(cache[name], whole[name]) < 1e-4, name


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "bloom"])
@pytest.mark.parametrize(
    "where", [{"phase": "prompt"}, {"phase": "generated"}, {"pos": [2, 8]}, {"pos": slice(5, 9)}]
)
def test_positions_mean_the_same_with_and_without_a_cache(kind: str, where: Any) -> None:
    module, ids = built(kind)
    model = ip.wrap(module)
    shift = torch.linspace(-4, 4, 32)
    made = []
    for use_cache in (True, False):
        with model.record(
            "blocks.1.hook_resid_post", hooks=[ip.add("blocks.0.hook_mlp_out", shift, **where)]
        ) as cache:
            tokens = model.generate(ids, use_cache=use_cache, **OPTIONS)
        made.append((tokens, cache["resid_post", 1]))
    with model.record("blocks.1.hook_resid_post") as cache:
        model.generate(ids, **OPTIONS)
    assert torch.equal(made[0][0], made[1][0])
    assert relative(made[0][1], made[1][1]) < 1e-4
    touched = (made[0][1] - cache["resid_post", 1]).abs().amax(-1)[0]
    first = {"phase=prompt": 0, "phase=generated": 7, "pos": 2, "slice": 5}
    key = (
        f"phase={where['phase']}"
        if "phase" in where
        else "slice"
        if isinstance(where["pos"], slice)
        else "pos"
    )
    assert touched[: first[key]].max() == 0 if first[key] else True
    assert touched[first[key]] > 1e-2


def test_a_static_cache_does_not_swallow_hooks() -> None:
    module, ids = built("llama")
    model = ip.wrap(module)
    seen = []
    with model.hooks([("blocks.0.attn.hook_z", lambda value, hook: seen.append(hook.offset))]):
        model.generate(ids, cache_implementation="static", **OPTIONS)
    assert seen == [0, 7, 8, 9, 10]


def test_what_was_given_as_texts_comes_back_as_texts() -> None:
    model = speaking("llama")
    one, two = TEXTS[0], TEXTS[:2]
    tokens = model.generate(one, return_type="tokens", **OPTIONS)
    text = model.tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert text.startswith(one)
    assert text != one
    assert model.generate(one, **OPTIONS) == text
    for several in ([one], (one,)):
        assert model.generate(several, **OPTIONS) == [text]
    assert model.generate(two, **OPTIONS) == model.generate(tuple(two), **OPTIONS)
    assert torch.equal(model.generate(model.to_tokens(one), **OPTIONS), tokens)


def test_nothing_is_left_on_the_module_after_generating_and_raising() -> None:
    module, ids = built("bloom")
    model = ip.wrap(module)
    model.generate(ids, **OPTIONS)
    before = hooks_on(module)

    def fails(value: Tensor, hook: ip.HookPoint) -> None:
        if hook.offset > 8:
            raise KeyError("late")

    with pytest.raises(KeyError), model.hooks([(PATTERN, fails)]):
        model.generate(ids, **OPTIONS)
    assert hooks_on(module) == before
    assert not any("forward" in vars(part) for part in module.modules())


def test_hooks_of_one_text_are_those_of_a_scope_around_it() -> None:
    module, ids = built("llama")
    model = ip.wrap(module)
    plain, shift = model.generate(ids, **OPTIONS), torch.linspace(-4, 4, 32)
    steer = ip.add(("resid_post", 1), shift, phase="generated")
    with model.hooks([steer]):
        wanted = model.generate(ids, **OPTIONS)
    assert not torch.equal(wanted, plain)
    assert torch.equal(model.generate(ids, hooks=[steer], **OPTIONS), wanted)
    pair = (("resid_post", 1), lambda value, hook: value + shift if hook.offset else value)
    assert torch.equal(model.generate(ids, fwd_hooks=[pair], **OPTIONS), wanted)
    assert torch.equal(model.generate(ids, **OPTIONS), plain)


# Adapters, quantised weights, copies.


class Adapted(nn.Module):
    """A linear map with a low-rank adapter beside it, as adapter libraries build them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Rounded(nn.Module):
    """A linear map whose weight is kept in eight bits."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        scale = base.weight.data.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        eighths = (base.weight.data / scale).round().to(torch.int8)
        self.weight = nn.Parameter(eighths, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("kind", [Adapted, Rounded])
def test_other_linear_maps_have_activations_but_no_weight_views(kind: Any) -> None:
    torch.manual_seed(0)
    module, ids = built("llama")
    for block in module.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(block.self_attn, name, kind(getattr(block.self_attn, name)))
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(block.mlp, name, kind(getattr(block.mlp, name)))
    model = ip.wrap(module)
    report = model.check(tiny.inputs(module))
    assert report.passed, report
    assert {"q", "k", "v", "z", "pre", "post"} <= {site.kind for site in model.sites.values()}
    with pytest.raises(ip.SiteNotFound, match="besides a weight"):
        model.run_with_cache(ids, names_filter="blocks.0.attn.hook_result")
    with pytest.raises(ip.Unsupported):
        _ = model.blocks[0].attn.W_Q


def test_copies_made_while_hooks_are_on_have_none() -> None:
    module, ids = built("gpt2")
    model = ip.wrap(module)
    with torch.no_grad():
        bare = module(input_ids=ids).logits
        zero = [
            (name, lambda value, hook: value * 0)
            for name in (PATTERN, "blocks.0.hook_resid_mid", "blocks.0.hook_q_input")
        ]
        with model.hooks(zero):
            twin = copy.deepcopy(module)
            assert not torch.equal(module(input_ids=ids).logits, bare)
        assert torch.equal(twin(input_ids=ids).logits, bare)


def test_a_copied_or_pickled_model_keeps_its_tokenizer() -> None:
    module, ids = built("gpt2")
    model = ip.wrap(module, tokenizer="a tokenizer")
    with torch.no_grad():
        expected = model(ids)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.tokenizer == "a tokenizer"
            assert torch.equal(twin(ids), expected)


# Edits that say where by layer, head and position.


def test_an_edit_of_one_head_and_position_changes_these_numbers_only() -> None:
    module, ids = built("llama")
    model = ip.wrap(module)
    with torch.no_grad():
        _, clean = model.run_with_cache(ids, names_filter=("z", 1))
        edits = [ip.zero("z", layer=1, head=[0, -1], pos=[2, 5])]
        _, cache = model.run_with_cache(ids, names_filter=("z", 1), hooks=edits)
    expected = clean["z", 1].clone()
    expected[:, [2, 5], 0] = 0
    expected[:, [2, 5], 3] = 0
    assert clean["z", 1][:, [2, 5]].abs().min() > 0
    assert torch.equal(cache["z", 1], expected)


def test_a_value_of_the_whole_site_fills_the_same_places() -> None:
    module, ids = built("gpt2")
    model = ip.wrap(module)
    other = ids.flip(0)
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, names_filter=["resid_pre", "z"])
        for kind, where in (("resid_pre", {"pos": [1, 3]}), ("z", {"head": 2, "pos": slice(2, 5)})):
            _, got = model.run_with_cache(
                other,
                names_filter=(kind, 1),
                hooks=[ip.fill(kind, cache[kind, 1], layer=1, **where)],
            )
            _, plain = model.run_with_cache(other, names_filter=(kind, 1))
            expected = plain[kind, 1].clone()
            at: Any = (slice(None), where["pos"], *((2,) if "head" in where else ()))
            expected[at] = cache[kind, 1][at]
            assert not torch.equal(expected, plain[kind, 1])
            assert torch.equal(got[kind, 1], expected)


def test_edits_that_cannot_mean_anything_say_so() -> None:
    module, ids = built("llama")
    model = ip.wrap(module)

    def error(edit: ip.Hook) -> str:
        with pytest.raises((ValueError, IndexError)) as caught:
            model.run_with_hooks(ids, hooks=[edit])
        return str(caught.value)

    assert error(ip.zero("resid_pre", layer=0, head=1)) == (
        "zero('resid_pre', layer=0, head=1): 'blocks.0.hook_resid_pre' has no axis of heads: "
        "it is ('batch', 'pos', 'd_model')."
    )
    assert error(ip.zero("z", layer=0, head=4)).endswith(
        "head 4 is not there: 'blocks.0.attn.hook_z' has heads 0 to 3."
    )
    assert error(ip.zero("z", layer=0, pos=7)).endswith(
        "pos 7 is not there: 'blocks.0.attn.hook_z' has positions 0 to 6."
    )
    assert "inside model.generate only" in error(ip.zero("z", layer=0, phase="generated"))
    assert "what it selects of 'blocks.0.hook_resid_pre' is (2, 1, 32)" in error(
        ip.fill("resid_pre", torch.zeros(2, 3, 32), layer=0, pos=1)
    )
    with pytest.raises(ValueError, match="phase is 'prompt' or 'generated'"):
        ip.zero("z", phase="later")
    with pytest.raises(TypeError, match="a layer goes with a kind"):
        ip.zero(None, layer=1)


def test_positions_are_cut_along_the_axis_that_is_called_so() -> None:
    module, ids = built("gpt2")
    model = ip.wrap(module)
    with torch.no_grad():
        _, whole = model.run_with_cache(ids)
        _, last = model.run_with_cache(ids, pos_slice=-1)
    assert last["z", 0].shape == (2, 1, 4, 8)
    assert torch.equal(last["z", 0], whole["z", 0][:, -1:])
    assert torch.equal(last["pattern", 0], whole["pattern", 0][:, :, -1:])


def test_what_is_recorded_by_path_is_found_by_what_it_means() -> None:
    module, ids = built("llama")
    model: Any = ip.wrap(module)
    paths = {site.aliases[0]: name for name, site in model.sites.items() if site.aliases}
    assert paths["model.layers.1.mlp"] == "blocks.1.hook_mlp_out"
    with model.record(list(paths)) as cache:
        output = module(input_ids=ids)
    assert set(cache) == set(paths)
    for path in cache:
        assert cache[paths[path]] is cache[path]
    assert torch.equal(cache["unembed.hook_out"], output.logits)


def test_passes_over_other_texts_are_calls_of_their_own() -> None:
    module, ids = built("gpt2")
    model = ip.wrap(module)
    with torch.no_grad(), model.record(("resid_post", 1)) as cache:
        model(ids[:, :5])
        model(ids[:, :6])
    assert [value.shape[1] for value in cache.calls("blocks.1.hook_resid_post")] == [5, 6]
