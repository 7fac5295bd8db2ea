"""Cells are those of raw hooks one by one; the same place is the plain run; the last layer is the logit lens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from interpose.methods.patchscopes import Patchscope
from tests.bounds import assert_near
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.pages import loads_nothing
from tests.sweeps import oracle

pytestmark = pytest.mark.bits

TYPES = ["gpt2", "llama", "gemma2", "gpt_neox"]
LAYERS = 3
SOURCE = torch.randint(10, 60, (1, 6), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(10, 60, (1, 8), generator=torch.Generator().manual_seed(2))
FROM, TO = 2, 5
CAPITAL, CURRENCY = "The capital of France is", "The currency of Japan is"


@pytest.fixture(scope="module")
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


def by_hand(module: Any, name: str, source: int, target: int, kind: str = "resid_post") -> Tensor:
    """The logits of the other prompt's last token, with the source's value in its place, by raw hooks."""
    (values,) = oracle.values(module, SOURCE, [oracle.spot(module, name, kind, source)])

    def change(value: Tensor) -> Tensor:
        value[:, TO] = values[:, FROM]
        return value

    with oracle.spot(module, name, kind, target).through(change):
        return oracle.logits(module, TARGET)[0, -1]


@pytest.mark.parametrize("name", TYPES)
def test_cells_are_those_of_raw_hooks(name: str) -> None:
    module = oracle.build(name)
    before = state_of(module)
    found = ip.patchscope(
        ip.wrap(module), SOURCE, TARGET, source_pos=FROM, into_pos=TO - 8, into_layer="all",
        metric=ip.metrics.logit(17), max_rows=4,
    )  # fmt: skip
    assert same_state(before, state_of(module))
    assert found.axes == {"source_layer": [0, 1, 2], "into_layer": [0, 1, 2]}
    for number, cell in enumerate(found.records()):
        wanted = by_hand(module, name, cell["source_layer"], cell["into_layer"])
        assert_near(cell["value"], float(wanted[17]), oracle.some_logits(module))
        assert cell["says"] == found.says[number] == int(wanted.argmax())
    assert found.protocol["without_a_patch"] == pytest.approx(
        float(oracle.logits(module, TARGET)[0, -1, 17]), abs=1e-5
    )
    assert found.values[:, :2].std() > 1e-3  # it matters, except after the last layer's attention
    assert found.protocol["forwards"] == 2 + 3


def test_each_layer_goes_into_itself_unless_said_otherwise() -> None:
    model = ip.wrap(oracle.build("llama"))
    words = {"source_pos": FROM, "into_pos": TO, "metric": ip.metrics.logit(17)}
    grid = ip.patchscope(model, SOURCE, TARGET, into_layer="all", **words)
    same = ip.patchscope(model, SOURCE, TARGET, **words)
    assert same.axes == {"layer": [0, 1, 2]}
    torch.testing.assert_close(same.values, grid.values.diagonal())
    some = ip.patchscope(model, SOURCE, TARGET, source_layer=[0, -1], into_layer=1, **words)
    assert some.axes == {"source_layer": [0, 2], "into_layer": [1]}
    torch.testing.assert_close(some.values, grid.values[[0, 2]][:, [1]])


def test_other_sites_can_be_moved() -> None:
    module = oracle.build("gpt2")
    found = ip.patchscope(
        ip.wrap(module), SOURCE, TARGET, source_pos=FROM, into_pos=TO, into_layer="all",
        site="z", metric=ip.metrics.logit(17),
    )  # fmt: skip
    for cell in found.records():
        wanted = by_hand(module, "gpt2", cell["source_layer"], cell["into_layer"], "z")
        assert_near(cell["value"], float(wanted[17]), oracle.some_logits(module))


@pytest.mark.parametrize("name", TYPES)
def test_the_same_place_of_the_same_prompt_is_the_plain_run(name: str) -> None:
    model = ip.wrap(oracle.build(name))
    found = ip.patchscope(
        model, TARGET, TARGET, source_pos=4, into_pos=4, metric=ip.metrics.kl(), max_rows=1
    )
    assert_near(found.values, torch.zeros(LAYERS), 1.0)
    plain = model(TARGET)[0, -1].detach()
    sure = ip.patchscope(model, TARGET, TARGET, max_rows=1)
    assert_near(
        sure.values, plain.softmax(-1).max().expand(LAYERS), oracle.some_logits(model.module)
    )
    assert sure.says == [int(plain.argmax())] * LAYERS


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_last_layer_of_the_other_prompt_is_the_logit_lens(name: str) -> None:
    module = oracle.build(name)
    found = ip.patchscope(
        ip.wrap(module), SOURCE, TARGET, source_pos=FROM, into_layer=[-1], metric=ip.metrics.logit(17)
    )  # fmt: skip
    norm = module.transformer.ln_f if name == "gpt2" else module.model.norm
    for layer in range(LAYERS):
        place = oracle.spot(module, name, "resid_post", layer)
        (stream,) = oracle.values(module, SOURCE, [place])
        with torch.no_grad():
            lens = module.lm_head(norm(stream[0, FROM]))
        assert_near(float(found.values[layer, 0]), float(lens[17]), oracle.some_logits(module))
        assert found.says[layer] == int(lens.argmax())


def test_the_relation_arrives_before_the_answer_in_the_pocket_model(pocket: Any) -> None:
    found = ip.patchscope(pocket, CAPITAL, CURRENCY, into_layer="all", answer=" Paris")
    head, rows = found.words()
    assert head == ["source / into", "0", "1", "2", "3", "4", "5", "6"]
    assert rows[2][1:4] == ["' Tokyo'"] * 3
    assert rows[5][1:] == ["' Paris'"] * 7
    assert found.values[5].min() > 0.7
    assert found.values[:4].max() < 0.05
    country = ip.patchscope(
        pocket, "People in France speak", "The capital of Japan is",
        source_pos=" France", into_pos=" Japan", answer=" Paris",
    )  # fmt: skip
    assert country.says == [" Paris"] * 5 + [" Tokyo"] * 2


def test_generated_text_has_the_patch_in_its_prompt_alone(pocket: Any) -> None:
    found = ip.patchscope(pocket, CAPITAL, CURRENCY, into_layer=[1, 4], generate=4, max_rows=5)
    assert len(found.generated) == 14
    tokens = pocket.to_tokens(CURRENCY)
    _, cache = pocket.run_with_cache(CAPITAL, names_filter="resid_post")
    for number, cell in enumerate(found.records()):
        row = tokens[0].tolist()
        for _ in range(4):  # without a KV cache: the whole text anew, the patch at its fifth token

            def put(value: Tensor, hook: Any) -> None:
                value[:, 4] = cache["resid_post", cell["source_layer"]][:, 4]  # noqa: B023

            hooks = [(("resid_post", cell["into_layer"]), put)]
            logits = pocket.run_with_hooks(torch.tensor([row]), fwd_hooks=hooks)
            row.append(int(logits[0, -1].argmax()))
            if row[-1] == pocket.tokenizer.eos_token_id:
                break
        wanted = pocket.tokenizer.decode(row[5:], skip_special_tokens=True)
        assert found.generated[number] == cell["generated"] == wanted
        assert wanted.startswith(cell["says"])


def test_it_prints_and_is_saved(pocket: Any) -> None:
    same = ip.patchscope(pocket, CAPITAL, CURRENCY, answer=" Paris", generate=2)
    lines = repr(same).splitlines()
    assert lines[0] == (
        "What 'The currency of Japan is' says with resid_post of 'The capital of France is', position 4, put into "
        "position 4"
    )
    assert lines[-2].split() == ["5", "0.887", "'", "Paris'", "'", "Paris.'"]
    grid = ip.patchscope(pocket, CAPITAL, CURRENCY, into_layer="all", generate=2)
    for found in (same, grid):
        page = found.html()
        loads_nothing(page)
        assert "&#x27; Paris.&#x27;" in page
        again = Patchscope.from_dict(found.to_dict())
        assert torch.equal(again.values, found.values)
        assert repr(again) == repr(found)
    assert grid.top(1)[0].keys() == {"source_layer", "into_layer", "value", "says", "generated"}


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    model = ip.wrap(tiny.build("llama"))
    found = ip.patchscope(model, SOURCE, TARGET[0].tolist(), generate=3)
    assert all(isinstance(said, int) for said in found.says)
    assert [text[0] for text in found.generated] == found.says
    assert "What [" in repr(found)


def test_wrong_questions_are_refused(pocket: Any) -> None:
    with pytest.raises(ValueError, match="not both"):
        ip.patchscope(pocket, CAPITAL, CURRENCY, answer=" Paris", metric=ip.metrics.kl())
    with pytest.raises(ValueError, match="source is one text; got 2"):
        ip.patchscope(pocket, [CAPITAL, CURRENCY], CURRENCY)
    with pytest.raises(IndexError, match="pos 5 is not there: into has positions 0 to 4"):
        ip.patchscope(pocket, CAPITAL, CURRENCY, into_pos=5)
    with pytest.raises(ValueError, match="the token ' Rome' is not among"):
        ip.patchscope(pocket, CAPITAL, CURRENCY, source_pos=" Rome")
    with pytest.raises(IndexError, match="layers 0 to 6"):
        ip.patchscope(pocket, CAPITAL, CURRENCY, into_layer=[9])


def test_the_protocol_names_a_function_without_its_address() -> None:
    def seventeen(logits: Tensor) -> Tensor:
        return logits[:, -1, 17]

    model = ip.wrap(tiny.build("gpt2", layers=LAYERS))
    found = ip.patchscope(model, SOURCE, TARGET, metric=seventeen)
    assert found.protocol["metric"] == "seventeen"
    same = ip.patchscope(model, SOURCE, TARGET, metric=ip.metrics.logit([17]))  # of the one text
    assert_near(found.values, same.values, oracle.some_logits(model.module))


def test_models_of_the_transformer_lens_dialect_go_on_with_the_patch() -> None:
    module = tiny.build("llama", layers=LAYERS)
    options: dict[str, Any] = {"into_pos": 3, "generate": 3}
    plain = ip.patchscope(ip.wrap(module), SOURCE, TARGET, **options)
    lens = ip.patchscope(HookedTransformer(module).eval(), SOURCE, TARGET, **options)
    assert lens.generated == plain.generated
    assert len({str(text) for text in lens.generated or ()}) > 1
    sizes = {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 12,
        "d_head": 8,
        "d_vocab": 61,
        "act_fn": "relu",
    }
    scratch = HookedTransformer(
        HookedTransformerConfig.from_dict({**sizes, "device": "cpu"})
    ).eval()
    made = ip.patchscope(scratch, SOURCE, TARGET, **options).generated
    assert made is not None
    assert [len(text) for text in made] == [3, 3]
