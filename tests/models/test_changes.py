"""A model that changes after its first use: nothing that was found out before is believed any longer.

After every change the model must give what a model wrapped afterwards gives, and a sweep what raw torch hooks give, one
forward per cell. Every change is also shown to move the logits, or the sites, before that says anything.
"""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import interpose as ip
from interpose.engine.stamp import Stamp
from interpose.models.discovery import recorded_forward
from interpose.models.knowledge import Conditions
from interpose.models.transformer import TransformerModel
from tests.models import tiny
from tests.models.texts import speaking
from tests.sweeps import oracle

TOKENS = torch.arange(10, 21)[None]
WEIGHTS = ("W_E", "W_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "b_Q", "b_O")
PAIR = (20, 33)


class Adapted(nn.Module):
    """A linear map with a low-rank path beside it, as adapter libraries put them in."""

    def __init__(self, base: nn.Module, given: int, made: int) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = given, made
        self.down = nn.Parameter(torch.randn(given, 2) / given**0.5)
        self.up = nn.Parameter(torch.randn(2, made))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x)
        return made + x @ self.down @ self.up


class Quantised(nn.Module):
    """A linear map in eight bits: its weight is a buffer, and no matrix of floats."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = float(linear.weight.detach().abs().max()) / 15  # few steps, so that it shows
        self.register_buffer(
            "rounded", (linear.weight.detach() / self.scale).round().to(torch.int8)
        )
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.rounded.float() * self.scale, self.bias)


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Double(nn.Linear):
    """What some libraries make of a module by changing its class."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Ahead(nn.Module):
    """An activation that looks ahead."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + x.cumsum(1).flip(1)


class Packed(Tensor):
    """A tensor of another kind, as quantising libraries put in the place of weights."""


def block(module: Any, number: int = 1) -> Any:
    return oracle.blocks(module)[number]


def adapt(owner: nn.Module, name: str) -> None:
    old = owner.get_submodule(name)
    fused = type(old).__name__ == "Conv1D"
    made, given = old.weight.shape[::-1] if fused else old.weight.shape
    setattr(owner, name, Adapted(old, int(given), int(made)).eval())


def resize(module: Any) -> None:
    module.resize_token_embeddings(120, mean_resizing=False)
    with torch.no_grad():
        module.lm_head.weight.copy_(module.lm_head.weight.flip(0))


def reverse(module: Any) -> None:
    blocks = oracle.blocks(module)
    for at, part in enumerate(list(blocks)[::-1]):
        blocks[at] = part


def another_block(module: Any) -> None:
    blocks = oracle.blocks(module)
    blocks[1] = copy.deepcopy(blocks[1])
    tiny.randomise(blocks[1])


def one_less(module: Any) -> None:
    del oracle.blocks(module)[2]
    module.config.num_hidden_layers = 2


def other_weights(module: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        other = copy.deepcopy(module)
        tiny.randomise(other)
    module.load_state_dict(other.state_dict())


def quantise(module: Any) -> None:
    part = block(module).mlp
    for name, linear in list(part.named_children()):
        if isinstance(linear, nn.Linear):
            setattr(part, name, Quantised(linear))


def pack(module: Any) -> None:
    down = block(module).mlp.down_proj
    down.weight = nn.Parameter(2 * down.weight.detach().as_subclass(Packed))


def wrap_forward(module: Any) -> None:
    """As libraries do that trace: a forward that takes anything and hands it on."""
    for part in block(module).modules():
        part.forward = functools.partial(
            lambda old, *args, **kwargs: old(*args, **kwargs), part.forward
        )


def replace_forward(module: Any) -> None:
    """The class's function itself, which shows its receiver."""
    attention = block(module).self_attn

    class Controller:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.__wrapped__ = function

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__(attention, *args, **kwargs)

    attention.forward = Controller(type(attention).forward)


def own_forward(module: Any) -> None:
    part = block(module).mlp

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x))  # type: ignore[no-any-return]

    part.forward = types.MethodType(forward, part)


def forward_of_a_leaf(part: nn.Module) -> None:
    """As libraries do that move weights: another forward, whose arguments have other names."""
    old = part.forward

    def forward(x: Tensor) -> Tensor:
        return old(x).flip(-1)  # type: ignore[no-any-return]

    part.forward = forward  # type: ignore[method-assign]


def larger_eps(module: Any) -> None:
    for part in module.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = 0.5


def shift(module: Any, args: Any, output: Tensor) -> Tensor:
    """What somebody's hook does: it counts on positions."""
    output[..., 0] += torch.arange(output.shape[1], dtype=output.dtype)
    return output


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "resized embeddings": ("llama", resize),
    "an adapter on the unembedding": ("llama", lambda m: adapt(m, "lm_head")),
    "an adapter on queries": ("llama", lambda m: adapt(block(m).self_attn, "q_proj")),
    "an adapter on a fused projection": ("gpt2", lambda m: adapt(block(m).attn, "c_attn")),
    "an adapter on an MLP": ("llama", lambda m: adapt(block(m).mlp, "up_proj")),
    "blocks in another order": ("llama", reverse),
    "another block": ("gpt_neox", another_block),
    "one block less": ("gpt2", one_less),
    "other weights": ("llama", other_weights),
    "64 bits": ("llama", lambda m: m.double()),
    "quantised": ("llama", quantise),
    "weights of another kind": ("llama", pack),
    "a parametrisation": (
        "llama",
        lambda m: parametrize.register_parametrization(
            block(m).self_attn.k_proj, "weight", Halved()
        ),
    ),
    "pruning": ("llama", lambda m: prune.l1_unstructured(block(m).mlp.down_proj, "weight", 0.5)),
    "another class": ("llama", lambda m: setattr(block(m).self_attn.v_proj, "__class__", Double)),
    "another class of an activation": (
        "llama",
        lambda m: setattr(block(m).mlp.act_fn, "__class__", Ahead),
    ),
    "a forward that takes anything": ("llama", wrap_forward),
    "a forward that shows its receiver": ("llama", replace_forward),
    "a forward of one's own": ("llama", own_forward),
    "a leaf's forward of its own": ("llama", lambda m: forward_of_a_leaf(block(m).mlp.down_proj)),
    "an unembedding's forward of its own": ("llama", lambda m: forward_of_a_leaf(m.lm_head)),
    "another epsilon": ("llama", larger_eps),
    "another multiplier": ("granite", lambda m: setattr(block(m), "residual_multiplier", 0.7)),
    "a hook of somebody else": ("gpt2", lambda m: block(m).mlp.register_forward_hook(shift)),
    "attention that looks ahead": (
        "llama",
        lambda m: [setattr(b.self_attn, "is_causal", False) for b in oracle.blocks(m)],
    ),
    "heads that are pruned in place": ("llama", lambda m: narrower(block(m).mlp)),
}
SAME_LOGITS = {"64 bits", "a forward that takes anything", "a forward that shows its receiver"}


def narrower(mlp: Any) -> None:
    """Neurons left out by giving parameters other data."""
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.data = linear.weight.data[:20]
        linear.out_features = 20
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :20].contiguous()
    mlp.down_proj.in_features = 20


def used(name: str) -> TransformerModel:
    """A model of which everything is known."""
    model = TransformerModel(oracle.build(name))
    model.run_with_cache(TOKENS)
    swept(model)
    _ = [getattr(model, weight) for weight in WEIGHTS], model.cfg
    model(model(TOKENS, stop_at_layer=1), start_at_layer=1)
    return model


def swept(model: Any) -> Tensor:
    clean, corrupt = oracle.pair()
    found = ip.sweep(
        model, clean, corrupt, metric=ip.metrics.logit_difference(*PAIR), progress=False
    )
    return found.each[0]


def swept_by_hand(module: Any) -> Tensor:
    clean, corrupt = oracle.pair()
    cells = [
        oracle.Cell(oracle.Spot(part), oracle.at(pos))
        for part in oracle.blocks(module)
        for pos in range(oracle.LENGTH)
    ]
    logits = oracle.patched(module, corrupt, clean, cells)[..., -1, :]
    return (logits[..., PAIR[0]] - logits[..., PAIR[1]]).unflatten(0, (-1, oracle.LENGTH))


def weight(model: Any, name: str) -> Any:
    try:
        return getattr(model, name)
    except ip.Unsupported as error:
        return str(error)


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_known_is_found_out_anew(change: str) -> None:
    name, apply = CHANGES[change]
    model = used(name)
    before = model.module(input_ids=TOKENS).logits.detach()
    apply(model.module)
    after = model.module(input_ids=TOKENS).logits.detach()
    apart = float((after[..., :99].double() - before.double()).abs().max())
    assert apart < 1e-4 if change in SAME_LOGITS else apart > 1e-2
    fresh = TransformerModel(model.module)
    assert list(model.sites) == list(fresh.sites)
    assert model.sites.absent == fresh.sites.absent
    _, cache = model.run_with_cache(TOKENS)
    _, wanted = fresh.run_with_cache(TOKENS)
    assert list(cache) == list(wanted)
    for key in wanted:
        assert torch.equal(cache[key], wanted[key]), key
    for key in WEIGHTS:
        found, right = weight(model, key), weight(fresh, key)
        assert torch.equal(found, right) if isinstance(right, Tensor) else found == right, key
    assert model.cfg == fresh.cfg


@torch.no_grad()
@pytest.mark.parametrize("change", [c for c in CHANGES if c != "64 bits"])
def test_a_sweep_is_one_forward_per_cell_after_every_change(change: str) -> None:
    name, apply = CHANGES[change]
    model = used(name)
    before = swept_by_hand(model.module)
    apply(model.module)
    wanted = swept_by_hand(model.module)
    if change not in SAME_LOGITS:
        both = min(len(before), len(wanted))
        assert float((before[:both] - wanted[:both]).abs().max()) > 1e-2
    size = float(wanted.abs().max())
    assert float((swept(model) - wanted).abs().max()) < 1e-4 * size


@torch.no_grad()
def test_a_forward_that_is_put_into_a_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries of faster kernels do; this one looks ahead, so that an old proof would not hold."""
    model = used("llama")
    before = swept_by_hand(model.module)
    mlp = type(block(model.module).mlp)
    old = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: old(self, x) + x.cumsum(1).flip(1))
    wanted = swept_by_hand(model.module)
    assert float((before - wanted).abs().max()) > 1e-2
    assert float((swept(model) - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


def test_an_adapter_is_in_what_is_read() -> None:
    """By raw torch: queries are what the adapter returns, and not what the map inside it does."""
    model = used("llama")
    adapt(block(model.module).self_attn, "q_proj")
    seen: list[Tensor] = []
    handle = block(model.module).self_attn.q_proj.register_forward_hook(
        lambda m, args, output: seen.append(output.detach())
    )
    _, cache = model.run_with_cache(TOKENS, names_filter=[("q", 1)])
    handle.remove()
    assert torch.equal(cache["q", 1].flatten(-2), seen[-1])
    with pytest.raises(ip.Unsupported, match="base_layer"):
        _ = model.blocks[1].attn.W_Q
    assert model.blocks[0].attn.W_Q.shape == (4, 32, 8)


@torch.no_grad()
def test_hooks_that_stay_go_where_their_sites_are() -> None:
    model, seen = used("llama"), []
    handle = model.add_hook(("q", 1), lambda value, hook: seen.append(value))
    model(TOKENS)
    adapt(block(model.module).self_attn, "q_proj")
    model.sites  # noqa: B018 - someone else may be the first to notice
    model(TOKENS)
    adapter = block(model.module).self_attn.q_proj
    fresh = TransformerModel(model.module)
    inside = fresh.run_with_cache(TOKENS)[1]["blocks.1.ln1.hook_normalized"]
    assert torch.allclose(seen[1].flatten(-2), adapter.forward(inside), atol=1e-5)
    assert not torch.allclose(seen[0], seen[1], atol=1e-2)
    assert handle.fired == len(seen)
    handle.remove()
    model(TOKENS)
    assert handle.fired == len(seen)
    assert not adapter._forward_hooks
    assert not adapter.base_layer._forward_hooks


@torch.no_grad()
def test_hooks_and_recordings_of_an_open_block_follow_too() -> None:
    model = used("gpt2")
    with model.hooks([ip.zero("mlp_out", layer=1)]), model.record(("resid_post", 1)) as cache:
        model(TOKENS)
        oracle.blocks(model.module)[1] = copy.deepcopy(block(model.module, 0))
        model(TOKENS)
    kept = list(cache)
    assert len(kept) == 2
    edit = ip.zero("mlp_out", layer=1)
    zeroed = model.run_with_cache(TOKENS, hooks=[edit])[1]["resid_post", 1]
    assert torch.allclose(cache[kept[1]], zeroed, atol=1e-5)
    assert not torch.allclose(cache[kept[0]], cache[kept[1]], atol=1e-2)


def test_a_hook_whose_site_is_gone_says_so() -> None:
    model = used("gpt2")
    handle = model.add_hook(("resid_post", 2), lambda value, hook: None)
    one_less(model.module)
    with pytest.raises(ip.SiteNotFound, match=r"blocks\.2\.hook_resid_post") as raised:
        model(TOKENS)
    assert "changed since" in str(raised.value.__notes__)
    handle.remove()
    model(TOKENS)


def load(module: Any, weights: dict[str, Tensor]) -> None:
    module.load_state_dict(weights)


def hand_over(module: Any, weights: dict[str, Tensor]) -> None:
    """As adapters are merged: each parameter stays, and is given other numbers."""
    for name, parameter in module.named_parameters():
        parameter.data = weights[name].clone()


@pytest.mark.parametrize("give", [load, hand_over])
def test_what_could_not_be_seen_in_zeros_is_seen_when_weights_are_loaded(give: Any) -> None:
    module = oracle.build("llama")
    trained = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for part in oracle.blocks(module):
            part.self_attn.o_proj.weight.zero_()
            part.mlp.down_proj.weight.zero_()
    model = TransformerModel(module)
    without = set(model.sites)
    give(module, trained)
    fresh = TransformerModel(module)
    assert list(model.sites) == list(fresh.sites)
    assert without < set(fresh.sites)  # nothing was added to the stream
    assert torch.equal(
        model.run_with_cache(TOKENS)[1]["resid_mid", 1],
        fresh.run_with_cache(TOKENS)[1]["resid_mid", 1],
    )


@pytest.mark.parametrize(
    "change",
    {
        "a list": lambda m: setattr(m.config, "layer_types", ["sliding_attention"] * 3),
        "an entry of a list": lambda m: m.config.layer_types.__setitem__(1, "sliding_attention"),
        "a function": lambda m: setattr(m.lm_head, "after", torch.tanh),
        "another function": lambda m: setattr(m.model.norm, "after", torch.tanh),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_a_trial_showed_rests_on_lists_and_functions_too(change: Any) -> None:
    module = oracle.build("llama")
    module.config.layer_types, module.model.norm.after = ["full_attention"] * 3, torch.relu
    before = Conditions(module)
    assert before.hold()
    module(input_ids=TOKENS)
    assert before.hold()
    change[1](module)
    assert not before.hold()
    assert Conditions(module).hold()


def compiled(owner: Any, name: str) -> None:
    """A part that runs compiled code, which does not look at hooks of torch that come later."""
    setattr(owner, name, torch.compile(getattr(owner, name), backend="eager"))


COMPILED: dict[str, Callable[[Any], None]] = {
    "the module": lambda m: m.compile(backend="eager"),
    "a block": lambda m: compiled(oracle.blocks(m), "1"),
    "an MLP": lambda m: compiled(block(m), "mlp"),
    "the unembedding": lambda m: compiled(m, "lm_head"),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:Dynamo")
@pytest.mark.parametrize("part", COMPILED)
def test_parts_that_run_compiled_code_are_looked_into_as_before(part: str) -> None:
    torch._dynamo.reset()
    model = used("llama")
    wanted, sites = swept_by_hand(model.module), list(model.sites)
    COMPILED[part](model.module)
    bare = model.module(input_ids=TOKENS).logits
    for looked in (model, TransformerModel(model.module)):
        assert list(looked.sites) == sites
        assert float((swept(looked) - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
        assert torch.equal(model.module(input_ids=TOKENS).logits, bare)
    torch._dynamo.reset()


def test_inputs_that_one_gave_to_the_probe_are_used_again() -> None:
    model = speaking("llama", layers=2)
    given = {"input_ids": TOKENS, "use_cache": False}
    model.probe(given)
    assert model.anatomy.tokens == (1, 11)
    adapt(block(model.module).self_attn, "q_proj")
    assert model.anatomy.tokens == (1, 11)
    with pytest.raises(ValueError, match="input_ids"):
        model.probe({"no_such": TOKENS})
    assert model.anatomy.tokens == (1, 11)  # refused inputs are forgotten


# What it costs, and what it keeps.


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts probe forwards."""
    made: list[int] = []
    look = recorded_forward.look
    monkeypatch.setattr(recorded_forward, "look", lambda *args: made.append(1) or look(*args))
    return made


def test_nothing_is_compared_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = used("llama")
    compared: list[int] = []
    holds = Stamp.holds
    monkeypatch.setattr(Stamp, "holds", lambda self: compared.append(1) or holds(self))
    model(TOKENS)
    model.module(input_ids=TOKENS)
    assert compared == []
    model.run_with_cache(TOKENS, names_filter="resid_post")
    assert compared == [1]


def test_a_model_that_stays_the_same_is_probed_once(looks: list[int]) -> None:
    model = used("llama")
    model.module.train()
    model.module.eval()
    with model.hooks([ip.skip("model.layers.0.mlp", lambda x: x), ip.zero("z", layer=1)]):
        model.run_with_cache(TOKENS, names_filter="pattern")  # bypasses stand in forwards meanwhile
        model.run_with_cache(TOKENS, names_filter="pattern")
    model.module.model.layers[0].register_forward_hook(lambda *_: None)
    model.run_with_cache(TOKENS)
    loss = model(TOKENS, return_type="loss")
    loss.backward()
    torch.optim.SGD(model.module.parameters(), lr=0.1).step()
    model.run_with_cache(TOKENS)
    model.module.load_state_dict(model.module.state_dict())
    model.run_with_cache(TOKENS)
    assert looks == [1]


def test_offloaded_parameters_that_are_new_with_every_run_cost_no_probe(looks: list[int]) -> None:
    """Offloading puts a parameter without numbers in the place of each one, and another after every run."""
    model = used("llama")
    part = block(model.module).mlp.down_proj
    weights = part.weight.detach().clone()

    def bring(module: Any, args: Any) -> None:
        module._parameters["weight"] = nn.Parameter(weights)

    def take(module: Any, args: Any, output: Any) -> None:
        module._parameters["weight"] = nn.Parameter(weights.to("meta"))

    part.register_forward_pre_hook(bring)
    part.register_forward_hook(take)
    _, before = model.run_with_cache(TOKENS)
    for _ in range(3):
        _, cache = model.run_with_cache(TOKENS)
    assert looks == [1]
    assert all(torch.equal(cache[name], before[name]) for name in before)


def test_weights_that_were_replaced_are_let_go() -> None:
    model = used("llama")
    linear = block(model.module).mlp.down_proj
    old = weakref.ref(linear.weight)
    linear.weight = nn.Parameter(linear.weight.detach().clone())
    gc.collect()
    assert old() is None  # at once: a stamp keeps no weights alive
    module = weakref.ref(block(model.module))
    another_block(model.module)
    model.run_with_cache(TOKENS)
    gc.collect()
    assert module() is None


@torch.no_grad()
def test_a_sweep_is_proven_again_only_when_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from interpose.sweeps import proof

    tried: list[int] = []
    attempt = proof._try
    monkeypatch.setattr(proof, "_try", lambda model: tried.append(1) or attempt(model))
    model = used("llama")
    model.module(input_ids=TOKENS)
    model.run_with_cache(TOKENS)
    swept(model)
    assert tried == [1]
    handle = block(model.module).mlp.register_forward_hook(shift)
    swept(model)
    assert tried == [1, 1]
    handle.remove()
    swept(model)
    with torch.no_grad():
        block(model.module).mlp.down_proj.weight.mul_(2)
    swept(model)
    assert len(tried) == 4


def test_other_code_of_ours_that_looks_for_itself_is_told_too() -> None:
    """Multipliers of branches, in the TransformerLens dialect."""
    from interpose.dialects.transformer_lens import HookedTransformer

    model = HookedTransformer(oracle.build("granite"))
    _, cache = model.run_with_cache(TOKENS)
    first = cache.stack_head_results(layer=2)
    for part in oracle.blocks(model.module):
        part.residual_multiplier = 0.9
    _, cache = model.run_with_cache(TOKENS)
    fresh = HookedTransformer(model.module)
    wanted = fresh.run_with_cache(TOKENS)[1].stack_head_results(layer=2)
    assert torch.allclose(cache.stack_head_results(layer=2), wanted, atol=1e-5)
    assert float((first - wanted).abs().max()) > 1e-2


@torch.no_grad()
def test_hooks_that_a_short_text_cannot_show_are_run_cell_by_cell() -> None:
    """A hook that looks at the twelfth position: the proof has eleven."""
    model = used("gpt2")

    def late(module: Any, args: Any, output: Tensor) -> Tensor:
        output[:, 11:12, 0] += 5
        return output

    with torch.no_grad():
        handle = block(model.module).mlp.register_forward_hook(late)
        wanted = swept_by_hand(model.module)
        found = swept(model)
        handle.remove()
        assert float((swept(model) - wanted).abs().max()) > 1e-2
    assert torch.allclose(found, wanted, atol=1e-5)
