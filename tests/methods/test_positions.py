"""Where texts are in a batch, how many logits a metric needs, and means with their errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import interpose as ip
from tests.bounds import assert_near
from tests.sweeps import oracle

pytestmark = pytest.mark.bits


@functools.cache
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


def test_positions_are_numbers_or_whole_tokens_with_or_without_the_space() -> None:
    texts = ["The Eiffel Tower is in", "People say that the Eiffel Tower is in the city of"]
    short, long = ip.batches(pocket(), texts)
    assert short.positions("Eiffel Tower") == short.positions(" Eiffel Tower") == [[1, 2]]
    assert long.positions("Eiffel Tower") == [[4, 5]]
    assert long.positions(" the") == [[3, 8]]
    assert short.positions(["The", " in"]) == [[0, 4]]
    assert short.positions(-1) == short.positions([4, -1]) == [[4]]
    assert short.positions(range(1, 3)) == [[1, 2]]
    for part in ("Eiff", "ow", "Tower is i"):
        with pytest.raises(ip.NothingSelected, match=f"{part!r} is not in text 0, whose tokens"):
            short.positions(part)
    with pytest.raises(ip.NothingSelected, match="' Rome' is not in text 1"):
        long.positions(" Rome")
    with pytest.raises(IndexError, match="pos -6 is not there: text 0 has positions 0 to 4"):
        short.positions(-6)


@pytest.mark.parametrize("text", ["Eiffel Tower", " Eiffel Tower", " the", "The", [" in", "Tower"]])
def test_a_text_is_at_the_same_positions_for_a_selector_and_for_a_method(text: Any) -> None:
    said = (
        "The Eiffel Tower is in" if text != " the" else "People say that the Eiffel Tower is in the"
    )
    (batch,) = ip.batches(pocket(), said)
    (where,) = batch.positions(text)
    _, whole = pocket().run_with_cache(said, names_filter="blocks.1.hook_resid_post")
    _, part = pocket().run_with_cache(said, names_filter=ip.at("resid_post", layer=1, pos=text))
    ((_, value),) = part.items()
    assert value.equal(whole["resid_post", 1][:, where])


def test_no_more_logits_are_asked_for_than_a_metric_looks_at() -> None:
    (batch,) = ip.batches(pocket(), "The Eiffel Tower is in")
    metric = ip.metrics.logit(" Paris")
    logits = pocket()(batch.clean, **batch.last_logits(metric))
    assert logits.shape[1] == 1
    whole = pocket()(batch.clean)
    assert_near(batch.measure(metric)(logits), batch.measure(metric)(whole), whole)
    assert batch.last_logits(ip.metrics.loss()) == {}
    assert batch.last_logits(lambda logits: logits[:, 0, 0]) == {}


def test_tokens_without_a_tokenizer_have_positions_by_number() -> None:
    model = ip.wrap(oracle.build("gpt2"))
    (batch,) = ip.batches(model, oracle.pair()[0])
    assert batch.positions([1, -1]) == [[1, 12], [1, 12]]


def test_a_mean_has_its_standard_error_where_there_are_several_examples() -> None:
    each = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    said: dict[str, Any] = {"title": "", "axes": {"layer": [0, 1]}, "unit": "logits"}
    found = ip.Scores.averaged(each, **said)
    assert found.values.tolist() == [2.0, 2.0]
    assert found.errors is not None
    assert found.errors.tolist() == pytest.approx([1.0, 0.0])
    assert next(found.records()) == {"layer": 0, "value": 2.0, "error": pytest.approx(1.0)}
    again = ip.Scores.from_dict(found.to_dict())
    assert again.errors is not None
    assert again.errors.equal(found.errors)
    assert ip.Scores.averaged(each[:, :1], **said).errors is None
    with pytest.raises(ValueError, match=r"errors are \(3,\), and axes \(2,\)"):
        ip.Scores(values=each[0], errors=torch.zeros(3), **said)
