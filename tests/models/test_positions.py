"""Positions while text is generated: whatever carries what was read, values and edits are those of one forward.

The oracle is always a forward without any cache over the final text: what is recorded, or edited, at a position
while the text is made must be what that forward has, or gets, there.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.sites.axes import (
    first_position,
    key_axis,
    position_axis,
    sequence_of,
    told_by_size,
)
from interpose.taps.context import Whereabouts
from tests.models import tiny

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
OPTIONS = {"max_new_tokens": 5, **GREEDY}
BOUND = 512 * torch.finfo(torch.float32).eps
"""Sums of some hundred float32 numbers, in another order, through a few layers."""

STATES = ["mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm"]
CACHES = ["gpt2", "llama", "mistral", "gemma2", "jamba", "minimax", "deepseek_v3"]
POST = "blocks.1.hook_resid_post"


def built(kind: str, *, length: int = 7) -> tuple[Any, Tensor]:
    """A model and tokens; of rwkv one row, for transformers' own cannot go on from the state of several."""
    module = tiny.build(kind)
    return ip.wrap(module), tiny.inputs(module, batch=1 if kind == "rwkv" else 2, length=length)[
        "input_ids"
    ]


def off(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).abs().max() / expected.abs().max())


def whole(model: Any, tokens: Tensor, names: Any, hooks: Any = (), **given: Tensor) -> Any:
    """What one forward over a text has, without the last token, which was never fed."""
    with torch.no_grad():
        return model.run_with_cache(
            {"input_ids": tokens[:, :-1], "use_cache": False, **given},
            names_filter=names,
            hooks=hooks,
        )[1]


# What is recorded.


@pytest.mark.parametrize("kind", STATES + CACHES)
def test_what_is_recorded_is_what_one_forward_over_the_text_has(kind: str) -> None:
    model, ids = built(kind)
    kinds = ("resid_post", "mixer_out", "rot_k", "attn.hook_k", "hook_v", "attn_scores", "pattern")
    kinds += ("z",)
    names = [name for name in model.sites if name.endswith(kinds)]
    with model.record(names) as cache:
        tokens = model.generate(ids, **OPTIONS)
    expected = whole(model, tokens, names)
    assert len(names) >= model.cfg.n_layers
    for name in names:
        assert off(cache[name], expected[name]) < BOUND, name


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "mamba"])
def test_padding_at_the_left_is_counted(kind: str) -> None:
    model, ids = built(kind)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    direction = torch.linspace(-4, 4, 32)
    edit = ip.add("blocks.0.hook_resid_post", direction, pos=[4, 8])
    with model.record(POST, hooks=[edit]) as cache:
        tokens = model.generate({"input_ids": ids, "attention_mask": mask}, **OPTIONS)
    longer = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
    given = {"attention_mask": longer}
    if kind != "mamba":
        given["position_ids"] = (longer.cumsum(1) - 1).clamp(min=0)
    expected = whole(model, tokens, POST, [edit], **given)
    real = longer.bool()
    assert off(cache[POST][real], expected[POST][real]) < BOUND
    assert off(cache[POST][real], whole(model, tokens, POST, **given)[POST][real]) > 0.01


def test_a_text_that_goes_on_from_a_given_cache_is_one_and_one_that_goes_back_is_another() -> None:
    from transformers import DynamicCache

    model, ids = built("llama")
    kept = DynamicCache(config=model.config)
    with model.record(POST) as cache:
        first = model.generate({"input_ids": ids, "past_key_values": kept}, **OPTIONS)
        more = torch.cat([first, ids[:, :3]], 1)
        second = model.generate({"input_ids": more, "past_key_values": kept}, **OPTIONS)
        assert kept.get_seq_length() == second.shape[1] - 1
        kept.crop(6 - kept.get_seq_length())
        third = model.generate(
            {"input_ids": torch.cat([ids[:, :6], ids[:, :2]], 1), "past_key_values": kept},
            **OPTIONS,
        )
    found = cache.calls(POST)
    assert len(found) == 2
    for value, tokens in zip(found, (second, third)):
        assert off(value, whole(model, tokens, POST)[POST]) < BOUND


def test_rows_that_join_share_what_one_row_began_and_fewer_rows_are_a_text_of_their_own() -> None:
    from transformers import DynamicCache

    model, ids = built("llama")
    kept = DynamicCache(config=model.config)
    sites = [POST, "blocks.1.attn.hook_pattern"]
    both = torch.cat([ids[:1, :4].expand(2, 4), ids[:, 4:6]], 1)
    with torch.no_grad(), model.record(sites) as cache:
        model.module(input_ids=both[:1, :4], past_key_values=kept)
        kept.batch_repeat_interleave(2)
        model.module(input_ids=both[:, 4:], past_key_values=kept)
        kept.batch_select_indices(torch.tensor([1]))
        kept_row = torch.cat([both[1:], ids[1:, 6:]], 1)
        model.module(input_ids=kept_row[:, 6:], past_key_values=kept)
    for site in sites:
        shared, alone = cache.calls(site)
        assert off(shared, model.run_with_cache(both, names_filter=site)[1][site]) < BOUND
        one = model.run_with_cache(kept_row, names_filter=site)[1][site]
        assert off(alone, one[:, 6:] if site == POST else one[:, :, 6:]) < BOUND


def test_calls_of_a_module_within_a_pass_are_texts_of_their_own() -> None:
    module: Any = tiny.build("albert", "masked")
    model = ip.wrap(module)
    ids = tiny.inputs(module)["input_ids"]
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
    with torch.no_grad(), model.record(path) as cache:
        model(ids)
    assert len(cache.calls(path)) == module.config.num_hidden_layers


def test_a_model_that_reads_both_ways_has_each_step_as_it_was() -> None:
    """CPM-Ant: every token sees all others, so that what it was in the prompt is not what it is in the end."""
    model, ids = built("cpmant")
    with model.record(POST) as cache:
        tokens = model.generate(ids, **OPTIONS)
    steps = cache.calls(POST)
    assert [step.shape[1] - model.config.prompt_length for step in steps] == [7, -31, -31, -31, -31]
    with torch.no_grad():
        one, many = (
            model.module(input_ids=text, use_cache=False).logits for text in (ids, tokens[:, :-1])
        )
    assert off(one, many[:, :7]) > 0.01  # by raw torch: later tokens change earlier ones
    assert off(steps[0], model.run_with_cache(ids, names_filter=POST)[1][POST]) < BOUND


# Edits.

WHERE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pos": [2, 8]}, {"pos": [2, 8]}),
    ({"pos": -1}, {"pos": 6}),
    ({"pos": slice(5, 9)}, {"pos": slice(5, 9)}),
    ({"phase": "prompt"}, {"pos": slice(0, 7)}),
    ({"phase": "generated"}, {"pos": slice(7, None)}),
]


@pytest.mark.parametrize("kind", [*STATES, "llama", "jamba"])
def test_edits_count_positions_as_in_one_forward_over_the_text(kind: str) -> None:
    model, ids = built(kind)
    direction = torch.linspace(-4, 4, model.cfg.d_model)
    for said, meant in WHERE:
        edit = ip.add("blocks.0.hook_resid_post", direction, **said)
        with model.record(POST, hooks=[edit]) as cache:
            tokens = model.generate(ids, **OPTIONS)
        same = ip.add("blocks.0.hook_resid_post", direction, **meant)
        expected = whole(model, tokens, POST, [same])[POST]
        plain = whole(model, tokens, POST)[POST]
        assert off(expected, plain) > 0.05, said
        assert off(cache[POST], expected) < BOUND, said


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        *((kind, "rot_k") for kind in ("gpt2", "llama", "mistral", "gemma2", "deepseek_v3")),
        ("llama", "k"),
        ("deepseek_v3", "k"),
        ("deepseek_v3", "v"),
    ],
)
def test_edits_of_keys_count_keys(kind: str, of: str) -> None:
    """The window of a sliding cache begins later than the text; the pass, later than the window.

    Latent attention makes the keys and values of all positions in every pass.
    """
    model, ids = built(kind)
    name, factor = f"blocks.0.attn.hook_{of}", 3.0
    for pos in ([2, 5], -1, [6, 8]):
        edit = ip.scale(name, factor, pos=pos)
        with model.record([name, POST], hooks=[edit]) as cache:
            tokens = model.generate(ids, **OPTIONS)
        same = ip.scale(name, factor, pos=6 if pos == -1 else pos)
        expected, plain = whole(model, tokens, [name, POST], [same]), whole(model, tokens, POST)
        assert off(expected[POST], plain[POST]) > 0.01, pos
        for one in (name, POST):
            assert off(cache[one], expected[one]) < BOUND, (pos, one)


@pytest.mark.parametrize("static", [False, True])
def test_the_first_key_of_a_sliding_cache_has_its_position(static: bool) -> None:
    model, ids = built("mistral", length=2)
    window = model.config.sliding_window
    assert window == 4
    seen = []

    def look(value: Tensor, hook: ip.HookPoint) -> None:
        at = hook.window(value.shape, 1)
        seen.append((at.first, at.end))

    options = {"cache_implementation": "static"} if static else {}
    with model.hooks([("blocks.0.attn.hook_rot_k", look)]):
        model.generate(ids, max_new_tokens=8, **GREEDY, **options)
    ends = [2, 3, 4, 5, 6, 7, 8, 9]
    assert seen == [(max(0, end - window), end) for end in ends]


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_an_edit_of_the_logits_counts_the_last_positions(kind: str) -> None:
    """While text is generated only the last logits are computed, so the first of them is not position 0."""
    model, ids = built(kind)
    plain = model.generate(ids, **OPTIONS)
    bonus = torch.zeros(model.cfg.d_vocab)
    bonus[7] = 1000.0
    assert not bool((plain[:, 7:] == 7).any())
    for pos in (-1, 6, 8):
        with model.hooks([ip.add("unembed.hook_out", bonus, pos=pos)]):
            tokens = model.generate(ids, **OPTIONS)
        place = 7 if pos < 7 else 9
        assert (tokens == 7).nonzero()[:, 1].tolist().count(place) == 2, pos
        assert torch.equal(tokens[:, :place], plain[:, :place])


def test_beams_do_not_change_where_a_step_is() -> None:
    model, ids = built("mamba")
    seen = []
    with model.hooks([(POST, lambda value, hook: seen.append((hook.offset, len(value))))]):
        model.generate(ids, num_beams=3, **OPTIONS)
    assert seen == [(0, 6), *[(offset, 6) for offset in (7, 8, 9, 10)]]


# Prompts that are no tokens, and prompts of decoders.


@pytest.mark.parametrize("kind", ["llama", "mamba", "recurrent_gemma"])
def test_a_prompt_of_embeddings_has_positions(kind: str) -> None:
    model, ids = built(kind)
    with torch.no_grad():
        embeds = model.module.get_input_embeddings()(ids)
    direction = torch.linspace(-4, 4, 32)
    plain = model.generate(ids, **OPTIONS)
    for where in ({"pos": -1}, {"pos": 8}, {"phase": "prompt"}, {"phase": "generated"}):
        edit, made = ip.add("blocks.0.hook_resid_post", direction, **where), []
        for given in ({"input_ids": ids}, {"inputs_embeds": embeds}):
            with model.record(POST, hooks=[edit]) as cache:
                tokens = model.generate(given, **OPTIONS)
            made.append((tokens[:, -5:], cache[POST]))
        assert torch.equal(made[0][0], made[1][0]), where
        assert off(made[1][1], made[0][1]) < BOUND, where
        assert off(made[0][1], whole(model, plain, POST)[POST]) > 0.05


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_prompt_of_a_decoder_is_what_it_begins_with(kind: str) -> None:
    module = tiny.build(kind, "encoder_decoder")
    model: Any = ip.wrap(module)
    given = {"input_ids": tiny.inputs(module)["input_ids"]}
    start = {"decoder_input_ids": torch.tensor([[1, 12, 13]] * 2)}
    name, seen = "decoder.blocks.0.hook_resid_post", []
    for more in ({}, start):
        with model.hooks([(name, lambda value, hook: seen.append((hook.offset, hook.prompt)))]):
            model.generate(given | more, decoder_start_token_id=1, max_new_tokens=3, **GREEDY)
    assert seen == [(0, 1), (1, 1), (2, 1), (0, 3), (3, 3), (4, 3)]


def test_an_encoder_that_generate_calls_by_itself_counts_calls_and_knows_its_padding() -> None:
    """In T5Gemma one dropout follows attention and MLP alike: what the MLP adds is its second call."""
    module = tiny.build("t5gemma", "encoder_decoder")
    model: Any = ip.wrap(module)
    ids = tiny.inputs(module)["input_ids"]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][0, -2:] = 0
    name, masks = "encoder.blocks.0.hook_mlp_out", []
    assert model.sites[name].tail.call == 1
    edit = ip.scale(name, 3.0, pos=2)

    def look(value: Tensor, hook: ip.HookPoint) -> None:
        masks.append(hook.given.get("attention_mask"))

    with model.record(name, hooks=[edit, (name, look)]) as cache:
        tokens = model.generate(given, decoder_start_token_id=3, max_new_tokens=3, **GREEDY)
    with torch.no_grad():
        more = {"decoder_input_ids": tokens[:, :-1]}
        _, expected = model.run_with_cache(given | more, names_filter=name, hooks=[edit])
        _, plain = model.run_with_cache(given | more, names_filter=name)
    assert off(cache[name], expected[name]) < BOUND
    assert off(cache[name], plain[name]) > 0.01
    assert len(masks) == 1
    assert torch.equal(masks[0], given["attention_mask"])


# Speculative decoding.

REPEATS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
LONGER = {"max_new_tokens": 12, **GREEDY}


def drafts(kind: str, how: str) -> dict[str, Any]:
    if how == "prompt lookup":
        return {"prompt_lookup_num_tokens": 4}
    return {"assistant_model": tiny.build(kind, seed=1)}


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_rejected_candidates_are_not_recorded(kind: str, how: str) -> None:
    model, _ = built(kind)
    names = [POST, "blocks.0.attn.hook_rot_k", "blocks.1.attn.hook_pattern"]
    plain, passes = model.generate(REPEATS, **LONGER), []
    look = (POST, lambda value, hook: passes.append(value.shape[1]))
    for generate in (model.generate, model.module.generate):
        passes.clear()
        with model.record(names, fwd_hooks=[look]) as cache:
            tokens = generate(REPEATS, **LONGER, **drafts(kind, how))
        assert torch.equal(tokens, plain)
        assert sum(passes) > tokens.shape[1] - 1, "nothing was rejected"
        expected = whole(model, tokens, names)
        for name in names:
            assert off(cache[name], expected[name]) < BOUND, name


def test_candidates_rejected_at_the_very_end_are_not_recorded() -> None:
    """After the last pass none comes that would show where the text really ends."""
    model, _ = built("gpt2")
    plain, cut = model.generate(REPEATS, **LONGER), 0
    for count in range(1, 12):
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        options["eos_token_id"] = int(plain[0, 7 + count])
        ends = []
        with model.record(POST, fwd_hooks=[(POST, _ends_of(ends))]) as cache:
            tokens = model.generate(REPEATS, prompt_lookup_num_tokens=4, **options)
        cut += ends[-1] > tokens.shape[1] - 1
        assert off(cache[POST], whole(model, tokens, POST)[POST]) < BOUND
    assert cut, "no text ended with a rejected candidate"


def _ends_of(found: list[int]) -> Any:
    def look(value: Tensor, hook: ip.HookPoint) -> None:
        found.append(hook.offset + value.shape[1])

    return look


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_edits_count_positions_also_of_candidates(how: str) -> None:
    model, _ = built("llama")
    direction = torch.linspace(-4, 4, 32)
    for where in ({"pos": [3, 11]}, {"phase": "generated"}, {"pos": -2}):
        edit, made = ip.add("blocks.0.hook_resid_post", direction, **where), []
        for options in ({}, drafts("llama", how)):
            with model.record(POST, hooks=[edit]) as cache:
                tokens = model.generate(REPEATS, **LONGER, **options)
            made.append((tokens, cache[POST]))
        assert torch.equal(made[0][0], made[1][0])
        assert off(made[1][1], made[0][1]) < BOUND
        assert off(made[0][1], whole(model, made[0][0], POST)[POST]) > 0.05


def test_a_selection_has_no_rejected_candidates_either() -> None:
    model, _ = built("gpt2")
    options = {**LONGER, "prompt_lookup_num_tokens": 4}
    tokens = model.generate(REPEATS, **options)
    expected = whole(model, tokens, POST)[POST]
    for where, chosen in (
        ({"phase": "generated"}, range(8, tokens.shape[1] - 1)),
        ({"pos": [2, 9, 10, 13]}, [2, 9, 10, 13]),
        ({"neuron": [1, 2]}, None),
    ):
        with model.record(ip.at(POST, **where)) as cache:
            model.generate(REPEATS, **options)
        picked = expected[..., [1, 2]] if chosen is None else expected[:, list(chosen)]
        assert off(cache[POST], picked) < BOUND
    unknown = pytest.raises(ip.Unsupported, match=r"positions from \d+ on were taken back")
    with unknown, model.record(POST, keep={1: slice(-3, None)}):
        model.generate(REPEATS, **options)


def test_a_model_that_drafts_for_itself_has_one_text() -> None:
    model, _ = built("llama")
    for more in ({"assistant_model": model.module}, {"assistant_early_exit": 1}):
        with model.record([POST, "blocks.0.hook_resid_post"]) as cache:
            tokens = model.generate(REPEATS, **LONGER, **more)
        expected = whole(model, tokens, list(cache))
        for name in cache:
            assert off(cache[name], expected[name]) < BOUND


def test_an_assistant_with_hooks_of_its_own_counts_by_itself() -> None:
    model, assistant = ip.wrap(tiny.build("llama")), ip.wrap(tiny.build("llama", seed=1))
    seen: list[Any] = []
    look = (POST, lambda value, hook: seen.append((hook.offset, hook.prompt, value.shape[1])))
    with model.record(POST) as cache, assistant.hooks(fwd_hooks=[look]):
        tokens = model.generate(REPEATS, assistant_model=assistant.module, **LONGER)
    assert off(cache[POST], whole(model, tokens, POST)[POST]) < BOUND
    ends = [offset + count for offset, _, count in seen]
    assert len(seen) > 5
    assert seen[0] == (0, None, 8)
    assert all(offset <= end for (offset, _, _), end in zip(seen[1:], ends))


def test_what_guides_a_text_is_a_text_of_its_own() -> None:
    """Guidance runs the model a second time in each step, over the text without its prompt."""
    model, ids = built("llama")
    direction = torch.linspace(-4, 4, 32)
    edit = ip.add("blocks.0.hook_resid_post", direction, phase="generated")
    with model.record(POST, hooks=[edit]) as cache:
        tokens = model.generate(ids, guidance_scale=1.5, **OPTIONS)
    texts = cache.calls(POST)
    assert len(texts) == 2
    for value, first in zip(texts, (0, 6)):
        same = ip.add("blocks.0.hook_resid_post", direction, pos=slice(7 - first, None))
        expected = whole(model, tokens[:, first:], POST, [same])[POST]
        assert off(value, expected) < BOUND, first


def test_a_step_that_transformers_undoes_is_not_recorded(monkeypatch: Any) -> None:
    """On some devices it asks whether to stop one step late, and takes that step back."""
    from transformers.generation import utils

    undo = utils.GenerationMixin.generate

    @functools.wraps(undo)
    def late(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return undo(self, *args, **kwargs)[:, :-1]

    monkeypatch.setattr(utils.GenerationMixin, "generate", late)
    for kind in ("llama", "mamba"):
        model, ids = built(kind)
        with model.record(POST) as cache:
            tokens = model.generate(ids, **OPTIONS)
        assert tokens.shape[1] == 11
        assert off(cache[POST], whole(model, tokens, POST)[POST]) < BOUND


# Passes that nobody counts for us.


def test_passes_by_hand_go_on_from_what_their_cache_says() -> None:
    for kind in ("llama", "xlstm"):
        model, ids = built(kind)
        key = "cache_params" if kind == "xlstm" else "past_key_values"
        edit = ip.scale("blocks.0.hook_resid_post", 3.0, pos=slice(1, 6, 4))
        with torch.no_grad(), model.record(POST, hooks=[edit]) as cache:
            out = model.module(ids[:, :4], use_cache=True)
            model.module(ids[:, 4:], use_cache=True, **{key: out[key]})
        expected = whole(model, torch.cat([ids, ids[:, :1]], 1), POST, [edit])
        assert off(cache[POST], expected[POST]) < BOUND


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
def test_a_state_that_does_not_say_how_much_it_has_read_is_an_error(kind: str) -> None:
    model, ids = built(kind)
    key = "state" if kind == "rwkv" else "cache_params"
    edit = ip.scale("blocks.0.hook_resid_post", 3.0, pos=1)
    with torch.no_grad():
        with model.hooks([edit]):
            out = model.module(ids[:, :4], use_cache=True)
        step = {"input_ids": ids[:, 4:5], "use_cache": True, key: out[key]}
        unknown = pytest.raises(ip.Unsupported, match=r"goes on from a state that does not say")
        with unknown, model.hooks([edit]):
            model.module(**step)
        with model.hooks([ip.scale("blocks.0.hook_resid_post", 3.0)]):
            model.module(**step)  # which needs no positions
    with (
        pytest.raises(ip.Unsupported, match=r"Generate with model.generate\(...\)"),
        model.record(POST),
    ):
        model.module.generate(ids, **OPTIONS)


def test_a_cache_that_its_model_leaves_empty_is_not_believed() -> None:
    model, ids = built("recurrent_gemma")
    with pytest.raises(ip.Unsupported, match="goes on from a state"), model.record(POST):
        model.module.generate(ids, **OPTIONS)


# Cross attention.


@pytest.mark.parametrize("kind", ["t5", "bart"])
class TestCrossAttention:
    def wrapped(self, kind: str) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
        module = tiny.build(kind, "encoder_decoder")
        ids = tiny.inputs(module)["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        options = {"decoder_start_token_id": 1, "max_new_tokens": 6, **GREEDY}
        return ip.wrap(module), {"input_ids": ids, "attention_mask": mask}, options

    def test_its_keys_are_the_encoders(self, kind: str) -> None:
        model, given, options = self.wrapped(kind)
        wanted = ("hook_k", "hook_v", "rot_k", "pattern", "hook_attn_scores", "resid_post", "out")
        names = [name for name in model.sites if name.startswith("decoder.")]
        names = [name for name in names if name.endswith(wanted)]
        assert sum("cross_attn" in name for name in names) >= 10
        with model.record(names) as cache:
            tokens = model.generate(given, **options)
        expected = whole_of_both(model, given, tokens, names)
        for name in names:
            assert off(cache[name], expected[name]) < BOUND, name
        pattern = cache["decoder.blocks.0.cross_attn.hook_pattern"]
        assert pattern.shape == (2, 4, 6, 7)  # six decoder positions, seven of the encoder

    @pytest.mark.parametrize("key", [1, -1, [2, 4]])
    def test_a_knockout_cuts_the_encoders_keys(self, kind: str, key: Any) -> None:
        model, given, options = self.wrapped(kind)
        name, post = (
            "decoder.blocks.1.cross_attn.hook_attn_scores",
            "decoder.blocks.1.hook_resid_post",
        )
        columns = torch.tensor(key).reshape(-1)

        def cut(scores: Tensor, hook: ip.HookPoint) -> Tensor:
            scores[..., columns] = float("-inf")
            return scores

        with model.record(post, hooks=[ip.knockout(site=name, key=key)]) as cache:
            tokens = model.generate(given, **options)
        expected = whole_of_both(model, given, tokens, post, fwd_hooks=[(name, cut)])
        plain = whole_of_both(model, given, tokens, post)
        assert off(expected[post], plain[post]) > 0.01
        assert off(cache[post], expected[post]) < BOUND

    def test_an_edit_counts_the_encoders_positions(self, kind: str) -> None:
        model, given, options = self.wrapped(kind)
        name, post = "decoder.blocks.1.cross_attn.hook_v", "decoder.blocks.1.hook_resid_post"
        site = model.sites[name]
        for pos, place in ((3, 3), (-3, 4)):
            with model.record(post, hooks=[ip.zero(name, pos=pos)]) as cache:
                tokens = model.generate(given, **options)
            plain = whole_of_both(model, given, tokens, post)

            def clear(module: Any, args: Any, output: Tensor, place: int = place) -> Tensor:
                return output.index_fill(1, torch.tensor([place]), 0.0)

            handle = site.module.register_forward_hook(clear)  # raw torch
            expected = whole_of_both(model, given, tokens, post)
            handle.remove()
            assert off(expected[post], plain[post]) > 0.01
            assert off(cache[post], expected[post]) < BOUND
        with pytest.raises(ip.NothingSelected), model.hooks([ip.zero(name, phase="generated")]):
            model.generate(given, **options)

    def test_a_mean_leaves_out_the_padding_of_its_own_side(self, kind: str) -> None:
        model, given, _ = self.wrapped(kind)
        mask = torch.ones_like(given["input_ids"])
        mask[1, 4:] = 0
        both = given | {"decoder_input_ids": given["input_ids"], "decoder_attention_mask": mask}
        for side, real in (("encoder", given["attention_mask"]), ("decoder", mask)):
            name = f"{side}.blocks.0.hook_mlp_out"
            with torch.no_grad():
                value = model.run_with_cache(both, names_filter=name)[1][name]
                edited = model.run_with_cache(both, names_filter=name, hooks=[ip.mean(name)])[1][
                    name
                ]
            expected = value[real.bool()].mean(0)
            assert off(edited[0, 0], expected) < BOUND
            assert off(value.mean((0, 1)), expected) > 0.01


def whole_of_both(model: Any, given: Any, tokens: Tensor, names: Any, **options: Any) -> Any:
    inputs = given | {"decoder_input_ids": tokens[:, :-1], "use_cache": False}
    with torch.no_grad(), model.record(names, **options) as cache:
        model.module(**inputs)
    return cache


# Models that hand the work of generating to a part of themselves.


class Adapted(nn.Module):
    """As adapters are: its `generate` is that of what it adapts, so that it is never called itself."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_model = base
        self.config = base.config

    def get_base_model(self) -> Any:
        return self.base_model

    def get_input_embeddings(self) -> Any:
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.base_model.get_output_embeddings()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_an_adapter_counts_as_what_it_adapts(kind: str) -> None:
    module = tiny.build(kind)
    model: Any = ip.wrap(Adapted(module))
    ids = tiny.inputs(module)["input_ids"]
    edit = ip.scale("blocks.0.hook_resid_post", 3.0, pos=[-1, 9])
    with model.record(POST, hooks=[edit]) as cache:
        tokens = model.generate({"input_ids": ids}, **OPTIONS)
    same = ip.scale("blocks.0.hook_resid_post", 3.0, pos=[6, 9])
    expected = whole(ip.wrap(module), tokens, POST, [same])
    assert off(cache[POST], expected[POST]) < BOUND
    assert off(cache[POST], whole(ip.wrap(module), tokens, POST)[POST]) > 0.05


# The table of axes.


def test_every_axis_of_positions_says_what_it_counts() -> None:
    assert [sequence_of(axis) for axis in ("pos", "query", "key")] == ["queries", "queries", "keys"]
    assert sequence_of("encoder_pos", "decoder.blocks.0.cross_attn.hook_k") == "encoder"
    assert sequence_of("pos", "encoder.blocks.0.hook_resid_pre") == "encoder"
    assert sequence_of("pos", "encoder.blocks.0.hook_resid_pre", encodes=False) == "queries"
    assert sequence_of("key", "vision.blocks.0.attn.hook_pattern") == "patches"
    assert sequence_of("pos", "vision_1.blocks.0.hook_resid_pre") == "patches"
    assert sequence_of("pos", "decoder.blocks.0.hook_resid_pre") == "queries"
    assert sequence_of("d_model") is None
    assert position_axis(("batch", "head", "query", "key")) == 2
    assert position_axis(("batch", "key", "head", "d_head")) == 1
    assert position_axis(("batch", "d_model")) is None
    assert key_axis(("batch", "head", "query", "encoder_pos")) == 3
    assert key_axis(("batch", "key", "head", "d_head")) is None
    assert first_position("keys", 4, offset=7, length=1) == 4
    assert first_position("keys", 20, offset=7, length=1) == 0
    assert first_position("queries", 1, offset=3, length=4, last=True) == 6
    assert first_position("encoder", 9, offset=7, length=1) == 0
    assert told_by_size("queries", 1, offset=7, length=1) == "queries"
    assert told_by_size("queries", 8, offset=7, length=1) == "keys"
    assert told_by_size("queries", 8, offset=0, length=5) == "queries"  # images stand before a text
    assert told_by_size("queries", 8, offset=7, length=None) == "queries"
    assert told_by_size("encoder", 8, offset=7, length=1) == "encoder"


@pytest.mark.parametrize(
    ("kind", "of"), [("llama", "causal"), ("mamba", "causal"), ("t5", "encoder_decoder")]
)
def test_every_site_with_positions_is_known_to_the_table(kind: str, of: str) -> None:
    """Named sizes that differ tell which axis is which: encoder 7, decoder 5."""
    module = tiny.build(kind, of)
    model: Any = ip.wrap(module)
    given = tiny.inputs(module)
    if of == "encoder_decoder":
        given["decoder_input_ids"] = given["decoder_input_ids"][:, :5]
    with torch.no_grad():
        _, cache = model.run_with_cache(given, names_filter=list(model.sites))
    sizes = {"queries": 5 if of == "encoder_decoder" else 7, "encoder": 7}
    sizes["keys"] = sizes["queries"]
    for name, value in cache.items():
        axes = model.sites[name].axes
        counted = {at: sequence_of(axis, name) for at, axis in enumerate(axes)}
        for at, sequence in counted.items():
            if sequence is not None and not name.startswith("hook_"):
                assert value.shape[at] == sizes[sequence], (name, axes)
        assert any(counted.values()), name


def test_patches_are_counted_by_themselves() -> None:
    """Five patches (one of them the class token) and seven tokens: -1 is the last of whichever it is said of."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    eyes = CLIPVisionConfig(**sizes, num_hidden_layers=3, image_size=8, patch_size=4)
    text = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=99)
    config = LlavaConfig(vision_config=eyes, text_config=text, image_token_index=98)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module: Any = LlavaForConditionalGeneration(config).eval()
        tiny.randomise(module)
        pixels = torch.randn(1, 3, 8, 8)
    given = {"input_ids": torch.tensor([[5, 98, 98, 98, 98, 6, 7]]), "pixel_values": pixels}
    model: Any = ip.wrap(module)
    model.probe(given)
    name = "vision.blocks.0.hook_resid_post"
    direction = torch.linspace(-4, 4, 32)
    with model.record([name, POST]) as plain:
        model.generate(given, **OPTIONS)
    for pos, place in ((-1, 4), (1, 1)):
        with model.record([name, POST], hooks=[ip.add(name, direction, pos=pos)]) as cache:
            tokens = model.generate(given, **OPTIONS)

        def move(module: Any, args: Any, output: Any, place: int = place) -> Any:
            value = output if isinstance(output, Tensor) else output[0]
            value[:, place] += direction

        handle = model.sites[name].module.register_forward_hook(move)  # raw torch
        with model.record(POST) as expected:
            assert torch.equal(model.generate(given, **OPTIONS), tokens)
        handle.remove()
        assert off(cache[POST][:, :7], plain[POST][:, :7]) > 0.01
        assert off(cache[POST], expected[POST]) < BOUND
        assert off(cache[name][0, place] - plain[name][0, place], direction) < BOUND


def test_positions_of_other_towers_are_all_there_and_all_prompt() -> None:
    module = nn.Identity()
    where = Whereabouts(7, 9, 1, None, True)  # of the text
    axes = ("batch", "pos", "d_model")
    for name in ("vision.blocks.0.hook_x", "encoder.blocks.0.hook_x", "audio.blocks.0.hook_x"):
        point = ip.HookPoint(ip.wrap(module), "x", name, module, 0, axes, where)
        made = point.window((2, 16, 8), 1)
        assert (made.first, made.end, made.total, made.is_all) == (0, 16, 16, True)
    point = ip.HookPoint(ip.wrap(module), "x", "blocks.0.hook_x", module, 0, axes, where)
    made = point.window((2, 1, 8), 1)
    assert (made.first, made.end, made.total, made.is_all) == (7, 8, 9, False)
