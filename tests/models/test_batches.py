"""Continuous batching: every request gets the tokens and activations it would get by itself, and its rows say so."""

from __future__ import annotations

import contextvars
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.errors import NeverFired, Unsupported
from interpose.models.batching.generate_batch import generate_batch
from interpose.models.batching.packed import packed_rows
from interpose.models.transformer import TransformerModel
from tests.leftovers import same_state, state_of
from tests.models import tiny

# gemma2 and vaultgemma cap attention scores, which transformers' paged kernel leaves out; others keep
# state elsewhere than in its paged cache. They are refused: see the tests of refusals.
TYPES = (
    "llama",
    "gpt2",
    "qwen2",
    "mistral",
    "gemma3_text",
    "gpt_neox",
    "mixtral",
    "opt",
    "gpt_oss",
)
LENGTHS = (3, 11, 1, 7, 23)
NEW = 6


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = torch.Generator("cpu").manual_seed(1)
    return [torch.randint(5, 90, (n,), generator=draw, device="cpu").tolist() for n in lengths]


def build(model_type: str = "llama", **options: Any) -> TransformerModel:
    module = tiny.build(model_type, dropout=0.0, **options)
    module.generation_config.eos_token_id = None
    return TransformerModel(module)


@pytest.fixture
def model() -> TransformerModel:
    return build()


def alone(model: TransformerModel, prompt: list[int], **options: Any) -> list[int]:
    """What transformers' own generate makes of one prompt."""
    given = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    made = model.module.generate(given, attention_mask=torch.ones_like(given), **options)
    return made[0].tolist()  # type: ignore[no-any-return]


def values(model: TransformerModel, tokens: list[int], sites: list[str]) -> dict[str, Tensor]:
    """What one text by itself has at some sites."""
    with torch.no_grad():
        cache = model.run_with_cache(input_ids=torch.tensor([tokens]), names_filter=sites)[1]
    return {name: cache[name][0] for name in sites}


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= 1e-4 * float(
        other.abs().max()
    )


def bare_logits(model: TransformerModel) -> Tensor:
    with torch.no_grad():
        return model.module(input_ids=torch.tensor(prompts()[1:2])).logits  # type: ignore[no-any-return]


def zero(value: Tensor, hook: Any) -> Tensor:
    return torch.zeros_like(value)


EDIT = ("blocks.0.hook_mlp_out", zero)


# The oracle.


@pytest.mark.parametrize(
    ("model_type", "most"), [*((name, 9) for name in TYPES), ("llama", 512), ("mistral", 512)]
)
def test_every_request_is_as_by_itself(model_type: str, most: int) -> None:
    model = build(model_type)
    result = generate_batch(
        model,
        prompts(),
        names_filter="blocks.*.hook_resid_post",
        max_new_tokens=NEW,
        max_batch_tokens=most,
    )
    sites = list(result.cache)
    assert len(sites) == model.tree.blocks()
    for number, prompt in enumerate(prompts()):
        assert result.tokens[number] == alone(model, prompt)
        wanted = values(model, result.tokens[number][:-1], sites)
        for site in sites:
            got = result.sequence(site, number)
            assert len(got) == len(prompt) + NEW - 1
            assert close(got, wanted[site]), (number, site)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_every_site_with_positions_can_be_captured(model_type: str) -> None:
    model = build(model_type)
    sites = [name for name, site in model.tree.table.sites.items() if "pos" in site.axes]
    result = generate_batch(
        model, prompts(), names_filter=sites, max_new_tokens=NEW, max_batch_tokens=9
    )
    for number, prompt in enumerate(prompts()):
        wanted = values(model, result.tokens[number][:-1], sites)
        for site in sites:
            full = wanted[site][len(prompt) - 1 :] if site.startswith("unembed") else wanted[site]
            got = result.sequence(site, number)
            if got.is_floating_point():
                assert close(got, full), (number, site)
            else:
                assert torch.equal(got, full), (number, site)


def test_eager_attention_is_batched_too() -> None:
    model = build()
    model.module.set_attn_implementation("eager")
    result = generate_batch(model, prompts(), names_filter="resid_post", max_new_tokens=NEW)
    for number, prompt in enumerate(prompts()):
        assert result.tokens[number] == alone(model, prompt)
        assert close(
            result.sequence("blocks.1.hook_resid_post", number),
            values(model, result.tokens[number][:-1], ["blocks.1.hook_resid_post"])[
                "blocks.1.hook_resid_post"
            ],
        )
    assert model.module.config._attn_implementation == "eager"


def test_the_windows_of_sliding_attention_are_shorter_than_the_texts() -> None:
    for name in ("mistral", "gemma3_text", "gpt_oss"):
        assert tiny.build(name).config.sliding_window < max(LENGTHS)


def test_requests_that_were_evicted_start_over_and_have_each_row_once(
    model: TransformerModel,
) -> None:
    site = "blocks.1.hook_resid_post"
    fed: list[int] = []
    result = generate_batch(
        model,
        prompts((13, 14, 15, 12)),
        names_filter=site,
        hooks=[("blocks.0.hook_resid_pre", lambda value, hook: fed.append(value.shape[1]))],
        max_new_tokens=12,
        page_size=4,
        num_blocks=14,
    )
    rows = result.rows(site)
    assert sum(fed) > len(rows)  # some were computed twice
    for number, prompt in enumerate(prompts((13, 14, 15, 12))):
        assert result.tokens[number] == alone(model, prompt, max_new_tokens=12)
        wanted = values(model, result.tokens[number][:-1], [site])[site]
        assert close(result.sequence(site, number), wanted)


def test_equal_prefixes_are_computed_for_each_request(model: TransformerModel) -> None:
    same = [list(range(5, 25)), [*range(5, 25), 3], list(range(5, 25))]
    result = generate_batch(
        model, same, names_filter="blocks.0.attn.hook_z", max_new_tokens=3, page_size=4
    )
    assert [len(result.sequence("blocks.0.attn.hook_z", n)) for n in range(3)] == [22, 23, 22]


def test_a_text_ends_at_the_end_token(model: TransformerModel) -> None:
    plain = generate_batch(model, prompts(), max_new_tokens=NEW)
    stop = plain.generated[1][2]
    site = "blocks.0.hook_resid_post"
    result = generate_batch(
        model, prompts(), names_filter=site, max_new_tokens=NEW, eos_token_id=stop
    )
    for number, prompt in enumerate(prompts()):
        made = plain.generated[number]
        made = made[: made.index(stop) + 1] if stop in made else made
        assert result.generated[number] == made
        assert len(result.sequence(site, number)) == len(prompt) + len(made) - 1
    assert model.module.generation_config.eos_token_id is None


# Labels.


def test_every_row_says_whose_it_is(model: TransformerModel) -> None:
    result = generate_batch(
        model, prompts(), names_filter=["blocks.0.attn.hook_z"], max_batch_tokens=9
    )
    rows = result.rows("blocks.0.attn.hook_z")
    assert rows.values.shape == (sum(LENGTHS) + 19 * len(LENGTHS), 4, 8)
    assert rows.axes == ("head", "d_head")
    for request, position, token in zip(rows.request, rows.position, rows.token):
        assert result.tokens[int(request)][int(position)] == int(token)
    pairs = set(zip(rows.request.tolist(), rows.position.tolist()))
    assert len(pairs) == len(rows)


def test_any_name_of_a_site_finds_its_rows(model: TransformerModel) -> None:
    result = generate_batch(model, prompts(), names_filter=("resid_post", 1), max_new_tokens=2)
    assert torch.equal(
        result.rows("blocks.1.hook_resid_post").values,
        result.rows("blocks.-1.hook_resid_post").values,
    )
    with pytest.raises(KeyError):
        result.rows("blocks.0.hook_resid_post")
    with pytest.raises(KeyError, match="no request 9; there are 0 to 4"):
        result.sequence("blocks.1.hook_resid_post", 9)


def test_a_hook_knows_whose_rows_it_sees(model: TransformerModel) -> None:
    seen: dict[tuple[int, int], int] = {}

    def look(value: Tensor, hook: Any) -> None:
        here = packed_rows()
        assert value.shape[1] == len(here.request)
        columns = (here.request.tolist(), here.position.tolist(), here.token.tolist())
        for request, position, token in zip(*columns):
            seen[request, position] = token

    result = generate_batch(
        model, prompts(), fwd_hooks=[("blocks.0.hook_resid_pre", look)], max_new_tokens=NEW
    )
    assert seen == {
        (number, position): token
        for number, tokens in result.tokens.items()
        for position, token in enumerate(tokens[:-1])
    }
    with pytest.raises(RuntimeError, match="none is running"):
        packed_rows()


def test_results_print_and_turn_into_plain_data(model: TransformerModel) -> None:
    result = generate_batch(model, prompts(), names_filter="blocks.0.attn.hook_z", max_new_tokens=2)
    assert repr(result).startswith(
        "BatchResult: 5 requests, 10 tokens generated in 2 forward passes; 1 sites kept, "
    )
    assert repr(result.rows("blocks.0.attn.hook_z")) == (
        "Rows((50, 4, 8) [row, head, d_head], of 5 requests)"
    )
    data = json.loads(json.dumps(result.to_dict()))
    assert data["prompts"]["0"] == prompts()[0]
    assert len(data["sites"]["blocks.0.attn.hook_z"]["values"]) == 50


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) - 90 for letter in text] for text in texts]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(token + 90) for token in ids)


def test_texts_go_in_and_come_out() -> None:
    model = TransformerModel(tiny.build("llama", dropout=0.0), tokenizer=Letters())
    result = generate_batch(model, ["hello", "abc"], max_new_tokens=3)
    assert result.text is not None
    assert result.prompts[1] == [7, 8, 9]
    assert result.text[0].startswith("hello")
    assert result.text[0] == Letters().decode(result.tokens[0])


# Hooks.


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral"])
def test_an_edit_does_what_it_does_in_generate(model_type: str) -> None:
    model, site = build(model_type), "blocks.1.hook_resid_post"
    plain = generate_batch(model, prompts(), names_filter=site, max_new_tokens=NEW)
    result = generate_batch(
        model,
        prompts(),
        names_filter=site,
        fwd_hooks=[EDIT],
        max_new_tokens=NEW,
        max_batch_tokens=9,
    )
    assert result.tokens != plain.tokens
    for number, prompt in enumerate(prompts()):
        with model.hooks([EDIT]):
            assert result.tokens[number] == alone(model, prompt)
            wanted = values(model, result.tokens[number][:-1], [site])[site]
        assert close(result.sequence(site, number), wanted)
        assert not close(result.sequence(site, number)[0], plain.sequence(site, number)[0])


def around(model: TransformerModel) -> Any:
    return model.hooks([EDIT])


def registered(model: TransformerModel) -> Any:
    handle = model.register(EDIT)

    class Registered:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            handle.remove()

    return Registered()


@pytest.mark.parametrize("on", [around, registered])
def test_hooks_around_the_call_are_heard(
    model: TransformerModel, on: Callable[[TransformerModel], Any]
) -> None:
    given = generate_batch(model, prompts(), fwd_hooks=[EDIT], max_new_tokens=NEW)
    with on(model):
        heard = generate_batch(model, prompts(), max_new_tokens=NEW)
    assert heard.tokens == given.tokens
    assert generate_batch(model, prompts(), max_new_tokens=NEW).tokens != given.tokens


@pytest.mark.parametrize("phase", ["prompt", "generated"])
def test_edits_of_a_phase_do_what_they_do_in_generate(model: TransformerModel, phase: str) -> None:
    edit = ip.add("blocks.0.hook_resid_post", torch.linspace(-2, 2, 32), phase=phase)
    result = generate_batch(model, prompts(), hooks=[edit], max_new_tokens=NEW, max_batch_tokens=9)
    for number, prompt in enumerate(prompts()):
        with model.hooks([edit]):
            given = {"input_ids": torch.tensor([prompt])}
            made = model.generate(given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert result.tokens[number] == made[0].tolist()


def test_edits_of_positions_count_in_each_text(model: TransformerModel) -> None:
    edit = ip.zero("blocks.0.hook_resid_post", pos=0)
    result = generate_batch(
        model, prompts(), names_filter="blocks.0.hook_resid_post", hooks=[edit], max_batch_tokens=9
    )
    rows = result.rows("blocks.0.hook_resid_post")
    assert torch.equal((rows.values.abs().sum(-1) == 0).cpu(), rows.position == 0)


@pytest.mark.parametrize("site", ["blocks.0.hook_mlp_out", "unembed.hook_out"])
def test_hooks_can_see_one_request_at_a_time(model: TransformerModel, site: str) -> None:
    def centre(value: Tensor, hook: Any) -> Tensor:
        assert value.shape[:2] == (1, len(packed_rows().request))
        assert packed_rows().request.unique().numel() == 1
        assert hook.offset == packed_rows().position[0]
        return value - value[:, -1:].roll(1, -1)

    result = generate_batch(
        model, prompts(), fwd_hooks=[(site, centre)], per_request=True, max_new_tokens=NEW
    )

    def plain(value: Tensor, hook: Any) -> Tensor:
        return value - value[:, -1:].roll(1, -1)

    for number, prompt in enumerate(prompts()):
        with model.hooks(fwd_hooks=[(site, plain)]):
            assert result.tokens[number] == alone(model, prompt)


def test_detectors_can_see_one_request_at_a_time(model: TransformerModel) -> None:
    class Lengths(ip.Detector):
        def __init__(self) -> None:
            super().__init__("blocks.0.hook_resid_pre")
            self.rows: dict[int, int] = {}

        def read(self, value: Tensor, hook: Any) -> None:
            request = int(packed_rows().request[0])
            self.rows[request] = self.rows.get(request, 0) + value.shape[1]

    lengths = Lengths()
    generate_batch(model, prompts(), hooks=[lengths], per_request=True, max_new_tokens=NEW)
    assert lengths.rows == {number: n + NEW - 1 for number, n in enumerate(LENGTHS)}


# Threads.


def test_no_thread_is_started_and_others_see_the_bare_model(model: TransformerModel) -> None:
    assert model.tree.table.sites  # discovery's own forward must be the only one while it looks
    bare, wrong, calls = bare_logits(model), [], 0
    done = threading.Event()
    started = threading.Event()

    def call() -> None:
        nonlocal calls
        while not done.is_set():
            calls += 1
            if not torch.equal(bare_logits(model), bare):
                wrong.append(calls)
            started.set()

    def slow(value: Tensor, hook: Any) -> Tensor:
        threads.add(threading.get_ident())
        return value * 0

    threads: set[int] = set()
    other = threading.Thread(target=call)
    other.start()
    started.wait()
    before = threading.active_count()
    try:
        result = generate_batch(
            model, prompts(), fwd_hooks=[("blocks.0.hook_mlp_out", slow)], max_new_tokens=NEW
        )
        assert threading.active_count() == before
    finally:
        done.set()
        other.join()
    assert threads == {threading.get_ident()}
    assert not wrong
    assert calls > 1
    assert not hasattr(
        model.module.config, "is_causal"
    )  # transformers' own loop can leave it there
    assert (
        result.tokens
        == generate_batch(model, prompts(), fwd_hooks=[EDIT], max_new_tokens=NEW).tokens
    )


def test_two_threads_batch_on_one_model_with_hooks_of_their_own() -> None:
    model = build()
    model.module.set_attn_implementation("eager")  # which transformers switches in the config
    wanted = [
        generate_batch(model, prompts(), fwd_hooks=hooks, max_new_tokens=NEW).tokens
        for hooks in ([], [EDIT])
    ]
    got: dict[int, Any] = {}

    def work(which: int) -> None:
        hooks = [EDIT] if which % 2 else []
        got[which] = generate_batch(model, prompts(), fwd_hooks=hooks, max_new_tokens=NEW).tokens

    workers = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [got[which] == wanted[which % 2] for which in range(4)] == [True] * 4
    assert model.module.config._attn_implementation == "eager"


# What is left.


@pytest.fixture(params=["sdpa", "eager"])
def watched(request: pytest.FixtureRequest) -> Iterator[TransformerModel]:
    """A model in training mode that must be, after the test, as it was."""
    model = build()
    model.module.set_attn_implementation(request.param)
    model.module.train()
    assert model.tree.table.sites  # discovery is not what is tested here
    before, config = state_of(model.module), model.module.config.to_dict()
    settings = model.module.generation_config.to_dict()
    threads = threading.active_count()
    yield model
    assert same_state(before, state_of(model.module))
    assert model.module.config._attn_implementation == request.param
    assert model.module.config.to_dict() == config
    assert model.module.generation_config.to_dict() == settings
    assert threading.active_count() == threads


def test_the_model_is_left_as_it_was(watched: TransformerModel) -> None:
    generate_batch(
        watched, prompts(), names_filter="resid_post", fwd_hooks=[EDIT], max_new_tokens=2
    )


@pytest.mark.parametrize("error", [KeyError("of mine"), KeyboardInterrupt()])
def test_an_error_of_a_hook_arrives_as_it_was_raised(
    watched: TransformerModel, error: BaseException
) -> None:
    calls = 0

    def fail(value: Tensor, hook: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error

    with pytest.raises(type(error)) as caught:
        generate_batch(
            watched,
            prompts(),
            names_filter="resid_post",
            fwd_hooks=[("blocks.1.hook_resid_pre", fail)],
        )
    assert caught.value is error
    assert "blocks.1.hook_resid_pre" in caught.value.__notes__[0]
    assert generate_batch(watched, prompts(), max_new_tokens=1).generated


def test_a_wrong_shape_is_refused_and_leaves_nothing(watched: TransformerModel) -> None:
    with pytest.raises(ip.EditShapeError):
        generate_batch(
            watched,
            prompts(),
            fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: value[:, :1])],
        )


def test_a_hook_that_never_fires_is_an_error(watched: TransformerModel) -> None:
    with pytest.raises(NeverFired):
        generate_batch(watched, prompts(), fwd_hooks=[("model.layers.0#1", zero)], max_new_tokens=2)


def test_sampling_follows_the_random_state_and_a_seed_leaves_it(model: TransformerModel) -> None:
    def sampled(**options: Any) -> dict[int, list[int]]:
        return generate_batch(model, prompts(), do_sample=True, **options).tokens

    torch.manual_seed(3)
    one, two = sampled(), sampled()
    torch.manual_seed(3)
    assert sampled() == one != two
    state = torch.get_rng_state()
    assert sampled(seed=5) == sampled(seed=5) != one
    assert torch.equal(state, torch.get_rng_state())


def test_it_works_in_any_context_of_its_own(model: TransformerModel) -> None:
    with model.hooks([EDIT]):
        inside = generate_batch(model, prompts(), max_new_tokens=NEW).tokens
        empty = contextvars.Context()
        # This scope's hook is not heard in a context that never entered it.
        with pytest.raises(NeverFired), model.hooks([EDIT]):
            outside = empty.run(generate_batch, model, prompts(), max_new_tokens=NEW).tokens
    assert inside != outside


# Refusals.


@pytest.mark.parametrize("site", ["blocks.0.attn.hook_pattern", "blocks.*.attn.hook_attn_scores"])
def test_patterns_are_refused_however_they_are_asked_for(
    model: TransformerModel, site: str
) -> None:
    hook = (site, lambda value, hook: value)
    with pytest.raises(Unsupported, match="that is no text's pattern"):
        generate_batch(model, prompts(), names_filter=site)
    with pytest.raises(Unsupported, match="that is no text's pattern"):
        generate_batch(model, prompts(), fwd_hooks=[hook])
    with pytest.raises(Unsupported, match="that is no text's pattern"), model.hooks([hook]):
        generate_batch(model, prompts())
    handle = model.register(hook)
    with pytest.raises(Unsupported, match="that is no text's pattern"):
        generate_batch(model, prompts())
    handle.remove()


def test_values_without_known_positions_are_refused(model: TransformerModel) -> None:
    with pytest.raises(Unsupported, match="has no axis of positions that is known"):
        generate_batch(model, prompts(), names_filter="model.layers.0.self_attn")


def test_edits_of_positions_in_a_scope_around_are_refused(model: TransformerModel) -> None:
    refused = pytest.raises(Unsupported, match=r"Give it to generate_batch itself \(hooks=")
    with refused, model.hooks([ip.zero("blocks.0.hook_resid_post", pos=1)]):
        generate_batch(model, prompts())


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gemma2", "its attention caps scores, and transformers' paged kernel leaves that out"),
        ("gptj", "its logits for packed texts are .* off"),
        ("diffllama", "its logits for packed texts are .* off"),
        ("jamba", "transformers fails with ValueError: Invalid"),
    ],
)
def test_models_that_cannot_be_batched_are_refused(model_type: str, why: str) -> None:
    model = build(model_type)
    state = state_of(model.module)
    for _ in range(2):
        with pytest.raises(Unsupported, match=f"cannot be batched continuously: {why}"):
            generate_batch(model, prompts())
    assert same_state(state, state_of(model.module))


def test_encoder_decoders_are_refused() -> None:
    model = TransformerModel(tiny.build("t5", "encoder_decoder"))
    with pytest.raises(Unsupported, match="it needs a decoder"):
        generate_batch(model, prompts())


def test_wrong_arguments_are_refused(model: TransformerModel) -> None:
    with pytest.raises(
        TypeError, match="no argument 'max_batch_token'; did you mean 'max_batch_tokens'"
    ):
        generate_batch(model, prompts(), max_batch_token=3)
    with pytest.raises(ValueError, match="there is no text to go on from"):
        generate_batch(model, [])
    for text in ("hello", ["hello"]):
        with pytest.raises(Unsupported, match="wrapped without a tokenizer"):
            generate_batch(model, text)
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        generate_batch(model, [[3], []])
    with pytest.raises(ValueError, match="max_new_tokens is at least 1"):
        generate_batch(model, prompts(), max_new_tokens=0)
    with pytest.raises(Unsupported, match="one text per prompt"):
        generate_batch(model, prompts(), num_return_sequences=2)


def test_a_request_that_can_never_fit_is_an_error(model: TransformerModel) -> None:
    with pytest.raises(RuntimeError):
        generate_batch(model, prompts(), page_size=4, num_blocks=2)
    assert generate_batch(model, prompts(), max_new_tokens=1).generated
