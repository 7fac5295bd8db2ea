"""What TransformerLens's guides and courses teach, as they write it: only the import and the model's name differ."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import interpose.dialects.transformer_lens.patching as patching
import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import (
    ActivationCache,
    HookedTransformer,
    TransformerBridge,
)
from interpose.dialects.transformer_lens.hook_points import HookPoint

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
HEADS = [(layer, head) for layer in range(7) for head in range(6)]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    torch.set_grad_enabled(True)
    return HookedTransformer.from_pretrained("pocket", device="cpu")


@pytest.fixture(autouse=True)
def no_hooks_left(model):
    yield
    assert not model.list_hooks()


def logit_diff(model, logits):
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")
    return logits[0, -1, mary] - logits[0, -1, john]


def test_reading_activations_with_a_hook(model):
    stored = {}

    def store(activation, hook: HookPoint):
        stored[hook.name] = activation.detach().clone()

    logits = model.run_with_hooks(CLEAN, fwd_hooks=[("blocks.2.hook_resid_post", store)])
    assert logits.shape == (1, 15, model.cfg.d_vocab)
    assert stored["blocks.2.hook_resid_post"].shape == (1, 15, model.cfg.d_model)


def test_listing_hook_points(model):
    names = list(model.hook_dict.keys())
    for name in (
        "hook_embed",
        "blocks.0.attn.hook_pattern",
        "blocks.6.mlp.hook_post",
        "ln_final.hook_scale",
    ):
        assert name in names
    attention = [name for name in names if name.startswith("blocks.0.attn.")]
    assert "blocks.0.attn.hook_z" in attention
    assert all(isinstance(hp.name, str) for hp in model.hook_points())


def test_zeroing_a_head_with_partial(model):
    def head_ablation_hook(value, hook: HookPoint, head_index: int):
        value[:, :, head_index, :] = 0.0
        return value

    tokens = model.to_tokens(CLEAN + " Mary")
    original = model(tokens, return_type="loss", loss_per_token=True)[0, -1]
    ablated = model.run_with_hooks(
        tokens,
        return_type="loss",
        loss_per_token=True,
        fwd_hooks=[(utils.get_act_name("v", 5), partial(head_ablation_hook, head_index=2))],
    )[0, -1]
    assert ablated > original + 0.05


def test_activation_patching_with_and_without_positions(model):
    clean, corrupt = model.to_tokens(CLEAN), model.to_tokens(CORRUPT)
    _, cache = model.run_with_cache(clean)
    best, worst = logit_diff(model, model(clean)), logit_diff(model, model(corrupt))
    assert best > 5 > -5 > worst

    def patch_position(resid, hook: HookPoint, position: int):
        resid[:, position, :] = cache[hook.name][:, position, :]
        return resid

    def patch_all(resid, hook: HookPoint):
        return cache[hook.name]

    whole = model.run_with_hooks(
        corrupt, fwd_hooks=[(utils.get_act_name("resid_pre", 3), patch_all)]
    )
    torch.testing.assert_close(logit_diff(model, whole), best, atol=1e-3, rtol=1e-3)
    recovered = {}
    for position in range(clean.shape[1]):
        hook = (utils.get_act_name("resid_pre", 0), partial(patch_position, position=position))
        patched = model.run_with_hooks(corrupt, fwd_hooks=[hook])
        recovered[position] = ((logit_diff(model, patched) - worst) / (best - worst)).item()
    (changed,) = (clean != corrupt).nonzero()[:, 1].tolist()
    assert recovered[changed] == pytest.approx(1, abs=1e-3)
    assert max(value for at, value in recovered.items() if at != changed) < 1e-3


def test_causal_tracing_over_layers_with_a_recovery_measure(model):
    clean = model.to_tokens("The Eiffel Tower is in")
    corrupt = model.to_tokens("The Trevi Fountain is in")
    paris = model.to_single_token(" Paris")
    clean_logits, cache = model.run_with_cache(clean)

    def chance(logits):
        return logits[0, -1].softmax(dim=-1)[paris].item()

    base, full = chance(model(corrupt)), chance(clean_logits)
    assert full - base > 0.5

    def restore(resid, hook, pos):
        resid[:, pos, :] = cache[hook.name][:, pos, :]
        return resid

    recovery = torch.zeros(model.cfg.n_layers)
    for layer in range(model.cfg.n_layers):
        hooks = [(f"blocks.{layer}.hook_resid_post", partial(restore, pos=-1))]
        recovery[layer] = (chance(model.run_with_hooks(corrupt, fwd_hooks=hooks)) - base) / (
            full - base
        )
    assert recovery[0] < 0.1
    assert recovery[-1] == pytest.approx(1, abs=1e-3)
    assert int((recovery > 0.5).nonzero()[0]) in (4, 5)


def test_filters_by_callable_on_names(model):
    seen = []
    model.run_with_hooks(
        CLEAN,
        fwd_hooks=[
            (lambda name: name.endswith("attn_out"), lambda v, hook: seen.append(hook.name))
        ],
    )
    assert seen == [f"blocks.{layer}.hook_attn_out" for layer in range(7)]
    _, cache = model.run_with_cache(CLEAN, names_filter=lambda name: "resid" in name)
    assert all("resid" in name for name in cache)
    _, one = model.run_with_cache(CLEAN, names_filter="blocks.0.attn.hook_q")
    assert set(one.keys()) == {"blocks.0.attn.hook_q"}


def test_importance_of_heads_by_loss(model):
    said = torch.randint(1, model.cfg.d_vocab, (1, 30))
    tokens = torch.cat([said, said], dim=1)  # the second half can be predicted
    base = model(tokens, return_type="loss").item()

    def importance(layer, head):
        def zero(z, hook):
            z[:, :, head] = 0
            return z

        return (
            model.run_with_hooks(
                tokens, return_type="loss", fwd_hooks=[(f"blocks.{layer}.attn.hook_z", zero)]
            ).item()
            - base
        )

    scores = {pair: importance(*pair) for pair in HEADS}
    best = max(scores, key=scores.get)
    assert best[0] in (3, 4, 5)  # previous-token and induction heads
    assert scores[best] > 0.1
    assert min(scores.values()) < 0.02


def test_direct_logit_attribution_by_hand(model):
    tokens = model.to_tokens(CLEAN)
    _, cache = model.run_with_cache(tokens)
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")
    direction = model.W_U[:, mary] - model.W_U[:, john]
    attribution = torch.zeros(7, 6)
    for layer, head in HEADS:
        head_out = cache["z", layer][0, -1, head] @ model.W_O[layer, head]
        scaled = cache.apply_ln_to_stack(head_out[None, None], layer=-1, pos_slice=-1)
        attribution[layer, head] = scaled[0, 0] @ direction
    stack, labels = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    attrs = cache.logit_attrs(stack, tokens=" Mary", incorrect_tokens=" John", pos_slice=-1)
    torch.testing.assert_close(attrs.reshape(7, 6), attribution, atol=1e-4, rtol=1e-4)
    assert labels[attrs[:, 0].argmax()] == "L5H2"  # it looks at Mary and copies her name


def test_comparing_two_prompts_heads_and_ablating_those_that_differ(model):
    honest = model.to_tokens("Question: What is the capital of France? Answer:")
    swayed = model.to_tokens(
        "Question: I think the capital of France is Rome. What is the capital of France? Answer:"
    )
    _, plain = model.run_with_cache(honest)
    _, opinion = model.run_with_cache(swayed)
    rome, paris = model.to_single_token(" Rome"), model.to_single_token(" Paris")
    difference = torch.zeros(7, 6)
    for layer, head in HEADS:
        a, b = plain["z", layer][0, -1, head], opinion["z", layer][0, -1, head]
        difference[layer, head] = ((a - b) @ model.W_O[layer, head]).norm()
    chosen = [divmod(int(index), 6) for index in difference.flatten().topk(6).indices]

    def ablate(z, hook, head):
        z[:, -1, head] = 0
        return z

    hooks = [(utils.get_act_name("z", layer), partial(ablate, head=head)) for layer, head in chosen]
    before = model(swayed)[0, -1]
    after = model.run_with_hooks(swayed, fwd_hooks=hooks)[0, -1]
    assert before[rome] > before[paris]
    assert after[rome] - after[paris] < before[rome] - before[paris] - 2


def test_backward_hooks_that_scale_gradients(model):
    tokens = model.to_tokens(CLEAN)
    grads = {}

    def keep(grad, hook):
        grads[hook.name] = grad.clone()

    def scale(grad, hook):
        return grad * 3

    model.reset_hooks()
    model.add_hook("blocks.3.hook_resid_post", keep, "bwd")
    model(tokens, return_type="loss").backward()
    plain = grads["blocks.3.hook_resid_post"]
    model.add_hook("blocks.4.hook_resid_post", scale, "bwd")
    model(tokens, return_type="loss").backward()
    torch.testing.assert_close(grads["blocks.3.hook_resid_post"], 3 * plain)
    model.reset_hooks()
    model.module.zero_grad()


def test_permanent_hooks_and_hooks_that_leak_only_outside_a_context(model):
    tokens = model.to_tokens(CLEAN)
    plain = model(tokens)

    def double(value, hook):
        return value * 2

    model.add_hook("blocks.0.hook_mlp_out", double, is_permanent=True)
    model.reset_hooks()
    assert not torch.equal(model(tokens), plain)
    model.remove_all_hook_fns(including_permanent=True)
    assert torch.equal(model(tokens), plain)
    model.add_hook("blocks.0.hook_mlp_out", double)  # leaks until it is reset
    assert not torch.equal(model(tokens), plain)
    model.reset_hooks()
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", double)]):
        assert not torch.equal(model(tokens), plain)
    assert torch.equal(model(tokens), plain)


def test_prepended_hooks_run_first(model):
    def add(value, hook):
        return value + 1

    def double(value, hook):
        return value * 2

    tokens = model.to_tokens(CLEAN)
    made = {}
    for prepend in (False, True):
        model.add_hook("blocks.6.hook_resid_post", add)
        model.add_hook("blocks.6.hook_resid_post", double, prepend=prepend)
        _, cache = model.run_with_cache(tokens, names_filter="blocks.6.hook_resid_post")
        made[prepend] = cache["blocks.6.hook_resid_post"]
        model.reset_hooks()
    torch.testing.assert_close(
        made[False] - made[True], torch.ones_like(made[True]), atol=1e-4, rtol=0
    )


def test_the_bridge_reads_by_both_kinds_of_names():
    bridge = TransformerBridge.boot_transformers("pocket", device="cpu")
    bridge.enable_compatibility_mode()
    logits, cache = bridge.run_with_cache(CLEAN)
    assert isinstance(cache, ActivationCache)
    assert cache["blocks.0.attn.hook_q"].shape == (1, 15, 6, 32)
    assert cache["ln_final.hook_normalized"].shape == (1, 15, 192)
    torch.testing.assert_close(bridge.unembed(cache["ln_final.hook_normalized"]), logits)


def test_path_patching_with_a_freezing_hook(model):
    """ARENA's idiom: the frozen heads take their values from `orig_cache[hook.name]`."""
    clean, corrupt = model.to_tokens(CLEAN), model.to_tokens(CORRUPT)
    z_filter = lambda name: name.endswith("z")  # noqa: E731
    _, new_cache = model.run_with_cache(corrupt, names_filter=z_filter, return_type=None)
    _, orig_cache = model.run_with_cache(clean, names_filter=z_filter, return_type=None)

    def patch_or_freeze_head_vectors(z, hook, head_to_patch):
        z[...] = orig_cache[hook.name][...]
        if head_to_patch[0] == hook.layer():
            z[:, :, head_to_patch[1]] = new_cache[hook.name][:, :, head_to_patch[1]]
        return z

    def effect(head):
        hook_fn = partial(patch_or_freeze_head_vectors, head_to_patch=head)
        name = utils.get_act_name("resid_post", model.cfg.n_layers - 1)
        _, cache = model.run_with_cache(
            clean,
            names_filter=lambda n: n == name,
            return_type=None,
            fwd_hooks=[(z_filter, hook_fn)],
        )
        assert set(cache.keys()) == {name}
        return logit_diff(model, model.unembed(model.ln_final(cache[name])))

    base = logit_diff(model, model(clean))
    effects = {head: (effect(head) - base).item() for head in [(6, 0), (6, 4), (0, 0), (2, 3)]}
    assert effects[6, 0] < -1  # it tells which name was said again
    assert abs(effects[2, 3]) < 0.1


def test_patching_functions_on_the_indirect_object_task(model):
    clean, corrupt = model.to_tokens(CLEAN), model.to_tokens(CORRUPT)
    _, cache = model.run_with_cache(clean)
    best, worst = (logit_diff(model, model(tokens)).item() for tokens in (clean, corrupt))

    def metric(logits):
        return (logit_diff(model, logits) - worst) / (best - worst)

    with torch.no_grad():
        heads = patching.get_act_patch_attn_head_out_all_pos(model, corrupt, cache, metric)
        stream = patching.get_act_patch_resid_pre(model, corrupt, cache, metric)
    assert heads.shape == (7, 6)
    assert stream.shape == (7, clean.shape[1])
    assert divmod(int(heads.argmax()), 6)[0] in (4, 6)
    assert stream[0, 10] == pytest.approx(1, abs=1e-3)  # where the prompts differ
    assert stream[6, 10] > 0.9  # and where it is still read from by the last block


@pytest.mark.parametrize("site", ["resid_mid", "pattern", "z", "q", "mlp_out", "attn_scores"])
def test_a_patch_by_return_and_in_place_is_the_same_with_and_without_gradients(model, site):
    clean, corrupt = model.to_tokens(CLEAN), model.to_tokens(CORRUPT)
    name = utils.get_act_name(site, 4)
    _, cache = model.run_with_cache(clean, names_filter=name)

    def by_return(value, hook):
        return cache[hook.name]

    def in_place(value, hook):
        value[:] = cache[hook.name]

    def both(value, hook):
        value[:] = cache[hook.name]
        return value

    found = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found += [
                model.run_with_hooks(corrupt, fwd_hooks=[(name, fn)]).detach()
                for fn in (by_return, in_place, both)
            ]
    assert (found[0] - model(corrupt)).abs().max() > 0.01
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_prompts_can_be_tested(model, capsys):
    utils.test_prompt("The capital of France is", " Paris", model, prepend_space_to_answer=False)
    printed = capsys.readouterr().out
    assert " Paris" in printed
    assert "Rank" in printed or "rank" in printed
