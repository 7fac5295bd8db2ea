"""Results of sweeps: their numbers against loops by hand, their data, and what they look like."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import interpose as ip
from interpose.render import colours
from interpose.results import bootstrap
from interpose.sweeps.planning import Tally
from tests.pages import loads_nothing
from tests.sweeps import oracle

TOKENS = ["<b>", " a & b", "\n", " averyverylongtokenthatgoesonandon", '"', " to"]


def made(
    layers: int = 3,
    positions: int = 6,
    examples: int = 1,
    metrics: tuple[str, ...] = ("metric",),
    **words: Any,
) -> ip.SweepResult:
    """A result of random numbers, as `ip.sweep` returns them."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    usual: dict[str, Any] = {
        "axes": {"layer": list(range(layers)), "pos": list(range(positions))},
        "metrics": metrics,
        "several": len(metrics) > 1,
        "each": drawn(len(metrics), layers, positions, examples),
        "clean": drawn(len(metrics), examples) + 3,
        "corrupt": drawn(len(metrics), examples) - 3,
        "patch": "clean",
        "tally": Tally(plan="wavefront", forwards=2, token_layers=10, one_per_cell=130),
        "noise": torch.zeros(len(metrics), 0, examples),
        "tokens": TOKENS[:positions] if examples == 1 else None,
    }
    return ip.SweepResult(**{**usual, **words})


# Numbers.


@pytest.mark.parametrize("of", ["effect", "normalised", "values"])
@pytest.mark.parametrize("patch", ["clean", "corrupt"])
def test_intervals_are_those_of_a_loop_by_hand(
    of: str, patch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = made(examples=7, metrics=("one", "two"), patch=patch)
    low, high = result.interval(0.9, 250, seed=3, of=of)
    monkeypatch.setattr(bootstrap, "_MOST", 30)  # a few at a time: the same
    again = result.interval(0.9, 250, seed=3, of=of)
    torch.testing.assert_close((again.low, again.high), (low, high), rtol=0, atol=0)
    generator = torch.Generator().manual_seed(3)
    means = []
    for _ in range(250):
        drawn = torch.randint(7, (7,), generator=generator)
        base = result.baseline[:, drawn][:, None, None]
        other = (result.clean if patch == "clean" else result.corrupt)[:, drawn]
        way = (other[:, None, None] - base).mean(-1)
        each = result.each[..., drawn]
        mean = {
            "values": each.mean(-1),
            "effect": (each - base).mean(-1),
            "normalised": (each - base).mean(-1) / way,
        }
        means.append(mean[of])
    ordered = torch.stack(means).double().sort(0).values
    for found, share in ((low, 0.05), (high, 0.95)):
        place = share * 249
        under, over = ordered[int(place)], ordered[int(place) + 1]
        expected = under + (place - int(place)) * (over - under)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    inside = getattr(result, of)
    assert ((low < inside) & (inside < high)).float().mean() > 0.9
    assert low.shape == result.values.shape == (2, 3, 6)


def test_intervals_narrow_with_more_examples_and_widen_with_confidence() -> None:
    few, many = made(examples=8), made(examples=200)

    def width(result: ip.SweepResult, confidence: float) -> float:
        low, high = result.interval(confidence, 500)
        return float((high - low).mean())

    assert width(few, 0.95) > 3 * width(many, 0.95)
    assert width(many, 0.99) > 1.2 * width(many, 0.8)


def test_an_interval_over_one_example_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one example alone\. Give several texts"):
        made().interval()
    with pytest.raises(ValueError, match="confidence lies between 0 and 1; got 95"):
        made(examples=3).interval(95)
    with pytest.raises(ValueError, match="of is 'effect', 'normalised' or 'values'; got 'mean'"):
        made(examples=3).interval(of="mean")
    with pytest.raises(ValueError, match="no whole way"):
        made(examples=3, corrupt=None).interval(of="normalised")


def test_effects_count_from_the_run_that_was_changed() -> None:
    clean, corrupt = made(examples=4), made(examples=4, patch="corrupt")
    assert clean.baseline is clean.corrupt
    assert corrupt.baseline is corrupt.clean
    assert made(examples=4, corrupt=None).baseline is not None
    for result, other in ((clean, clean.clean), (corrupt, corrupt.corrupt)):
        assert other is not None
        expected = (result.each - result.baseline).mean(-1)[0]
        torch.testing.assert_close(result.effect, expected)
        way = (other - result.baseline).mean()
        torch.testing.assert_close(result.normalised, expected / way)


def test_the_strongest_places_come_first_whatever_their_sign() -> None:
    result = made(metrics=("one", "two"))
    top = result.top(4)
    assert [record["metric"] for record in top] == ["one"] * 4 + ["two"] * 4
    effects = result.effect[1].flatten()
    for record, place in zip(top[4:], effects.abs().argsort(descending=True)):
        assert (record["layer"], record["pos"]) == divmod(int(place), 6)
        assert record["token"] == TOKENS[record["pos"]]
        assert record["effect"] == float(effects[place])
        assert record["value"] == float(result.values[1, record["layer"], record["pos"]])
    each = made().each.clone()
    each[0, 1, 1] = torch.nan
    broken = dataclasses.replace(made(), each=each)
    assert len(broken.top(100)) == 17
    assert {type(value) for record in broken.top() for value in record.values()} == {
        int,
        str,
        float,
    }


# Data.


def test_a_single_metric_is_no_axis_and_several_are() -> None:
    one, two = made(), made(metrics=("one", "two"))
    assert list(one.axes) == ["layer", "pos"]
    assert (list(two.axes), two.axes["metric"]) == (["metric", "layer", "pos"], ["one", "two"])
    assert two.at(metric="two", layer=1, pos=2) == float(two.each[1, 1, 2, 0])
    assert dataclasses.replace(two, sites=("z",)).axes == two.axes
    assert two.title == "one, two: by layer (3) x pos (6), 1 example"


def test_a_part_of_a_sweep_is_a_sweep() -> None:
    whole = made(metrics=("one", "two"), examples=3, noise=torch.randn(2, 4, 3))
    part = whole.pick(layer=2)
    assert isinstance(part, ip.SweepResult)
    assert torch.equal(part.effect, whole.effect[:, 2])
    assert (part.noise_floors, part.fixed) == (whole.noise_floors, {"layer": 2})
    single = whole.pick(metric="two", pos=4)
    assert torch.equal(single.normalised, whole.normalised[1, :, 4])
    assert single.noise_floors == whole.noise_floors[1:]
    assert (list(single.axes), single.several, single.metrics) == (["layer"], False, ("two",))
    assert torch.equal(whole.sum("pos").values, whole.effect.sum(-1))


def test_errors_are_those_of_the_mean_over_examples() -> None:
    result = made(examples=5)
    assert result.errors is not None
    expected = (result.each - result.baseline)[0].std(-1) / 5**0.5
    torch.testing.assert_close(result.errors, expected)
    assert next(result.records())["error"] == float(result.errors[0, 0])
    assert made().errors is None
    assert "error" not in next(made().records())


def test_a_data_frame_has_a_row_for_each_place_or_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        made().to_pandas()
    real = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name, *rest: (
            SimpleNamespace(DataFrame=list) if name == "pandas" else real(name, *rest)
        ),
    )
    result = made(examples=3, metrics=("one", "two"))
    rows, each = result.to_pandas(), result.to_pandas(examples=True)
    assert (len(rows), len(each)) == (2 * 3 * 6, 2 * 3 * 6 * 3)
    assert list(rows[0]) == ["metric", "layer", "pos", "value", "effect", "normalised", "error"]
    assert list(each[0]) == ["metric", "layer", "pos", "example", "value", "effect", "normalised"]
    for row in rows:
        own = [r for r in each if all(r[k] == row[k] for k in ("layer", "pos", "metric"))]
        assert [r["example"] for r in own] == [0, 1, 2]
        for name in ("value", "effect", "normalised"):
            assert sum(r[name] for r in own) / 3 == pytest.approx(row[name], abs=1e-5)
    share = result.normalised[1, 2, 5]
    assert rows[-1]["normalised"] == pytest.approx(float(share))
    assert "normalised" not in made(corrupt=None).to_pandas()[0]
    assert made().to_pandas()[0]["token"] == "<b>"


# Pictures.


def test_a_page_has_every_label_escaped_and_loads_nothing(tmp_path: Path) -> None:
    path = made(measured=("logit('<i>')",)).save(tmp_path / "page.html")
    page = path.read_text()
    for label in ("&lt;b&gt;", " a &amp; b", "\\n", " averyverylon…", "&quot;"):
        assert label in page
    assert page.count("<b>") == made(tokens=None).html_body().count("<b>")  # headings alone
    assert "<i>" not in page
    assert "logit(&#x27;&lt;i&gt;&#x27;)" in page
    assert "wavefront: 2 forwards, 10 token-layers" in page
    loads_nothing(page)


def test_three_axes_are_a_grid_for_each_entry_of_the_first() -> None:
    each = torch.randn(1, 2, 3, 6, 1)
    axes = {"site": ["attn_out", "mlp_out"], **made().axes}
    result = dataclasses.replace(made(), axes=axes, each=each)
    html = result.html()
    assert html.count("<b>site ") == 2
    assert html.count("&lt;b&gt;") >= 2
    assert len(repr(result).splitlines()) < 40
    assert repr(result).count("attn_out") + repr(result).count("mlp_out") == 10  # the strongest


def test_one_axis_is_bars_and_many_columns_are_folded() -> None:
    one = dataclasses.replace(made(), axes={"layer": [0, 1, 2]}, each=torch.randn(1, 3, 1))
    assert one.html().count("<td") == 9
    assert repr(one).splitlines()[-3:][0].split()[0] == "0"
    wide = made(positions=100, tokens=None)
    assert (
        wide.html().count("<thead>") == 3 + 1
    )  # grids of 38, 38 and 24 columns, and the strongest
    assert "the strongest places" in repr(wide)


def test_effects_within_the_noise_floor_are_marked() -> None:
    result = made(layers=2, noise=torch.tensor([[[0.5], [-2.0], [1.0]]]))
    within = result.effect.abs() <= 2.0
    assert 0 < int(within.sum()) < 12
    assert torch.equal(result.within_noise, within)
    assert not made().within_noise.any()
    assert result.html().count(colours.FAINT_STYLE) == int(within.sum())
    assert made().html().count(colours.FAINT_STYLE) == 0
    text = repr(result)
    assert f"{int(within.sum())} of 12 effects are within it" in text
    assert len(re.findall(r"\(-?\d\.\d\d\)", text)) == int(within.sum())


def test_each_metric_has_a_noise_floor_of_its_own() -> None:
    noise = torch.tensor([[[-3.0]], [[1.0]]])
    result = made(layers=2, metrics=("loud", "quiet"), noise=noise)
    assert result.noise_floor == 3.0
    floors = torch.tensor([3.0, 1.0])[:, None, None]
    within = result.effect.abs() <= floors
    assert not torch.equal(within[1], result.effect[1].abs() <= 3.0)
    assert torch.equal(result.within_noise, within)
    assert result.html().count(colours.FAINT_STYLE) == int(within.sum())
    assert "noise floor 3, 1:" in repr(result)
    again = ip.SweepResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.noise_floors == (3.0, 1.0)


def test_short_floats_have_a_noise_floor_for_each_metric() -> None:
    model = ip.wrap(oracle.build("gpt2").half())
    metrics = {"far": lambda x: 1000 * x[:, -1, 5].float(), "near": lambda x: x[:, -1, 5]}
    found = ip.sweep(model, *oracle.pair(), metric=metrics, max_rows=2, progress=False)
    far, near = found.noise_floors
    assert far == pytest.approx(1000 * near)
    alone = ip.sweep(model, *oracle.pair(), metric=metrics["near"], max_rows=2, progress=False)
    assert torch.equal(found.within_noise[1], alone.within_noise)


def test_a_position_of_what_looks_at_several_is_refused() -> None:
    for wrong in (lambda: ip.metrics.loss(pos=2), lambda: ip.metrics.function(len, pos=0)):
        with pytest.raises(ValueError, match="looks at several positions, so pos means nothing"):
            wrong()
    with pytest.raises(ValueError, match="last is at least 1"):
        ip.metrics.function(len, last=0)


def test_a_token_may_be_a_number_of_torch_or_numpy() -> None:
    model, ends = ip.wrap(oracle.build("gpt2")), oracle.pair()
    wanted = ip.sweep(model, *ends, metric=ip.metrics.logit(7), progress=False)
    for token in (torch.tensor(7), numpy.int64(7)):
        found = ip.sweep(model, *ends, metric=ip.metrics.logit(token), progress=False)
        assert torch.equal(found.each, wanted.each)


def test_a_sweep_of_a_real_model_labels_positions_by_tokens() -> None:
    model = ip.load("pocket", device="cpu")
    clean, corrupt = "The Eiffel Tower is in", "The Trevi Fountain is in"
    metric = ip.metrics.logit_difference(" Paris", " Rome")
    result = ip.sweep(model, clean, corrupt, metric=metric, pos=[1, 4], progress=False)
    assert result.labels == {"layer": list("0123456"), "pos": ["1 ' Eiffel'", "4 ' in'"]}
    assert result.top(1)[0]["token"] in (" Eiffel", " in")
    assert " Eiffel" in repr(result)
    pair = ip.sweep(model, [clean] * 2, [corrupt] * 2, metric=metric, progress=False)
    assert pair.tokens is None
    low, high = pair.interval()
    torch.testing.assert_close(low, high)  # the same text twice


# Metrics as data.


def test_metrics_are_read_back_from_data_and_from_python() -> None:
    metrics = ip.metrics
    for metric in (
        metrics.logit(" Paris"),
        metrics.logit(5, pos=-2),
        metrics.logit_difference([" a", " b"], [1, 2]),
        metrics.probability(" x", log=True),
        metrics.rank(" x"),
        metrics.loss(),
        metrics.kl(pos=3),
    ):
        data = json.loads(json.dumps(metric.to_dict()))
        assert metrics.Metric.from_dict(data) == metric
        assert eval(metric.to_python(), {"ip": ip}) == metric
    assert repr(metrics.logit_difference(" a", " b", pos=-2)) == (
        "logit_difference(' a', ' b', pos=-2)"
    )
    given = metrics.logit_difference(torch.tensor([4, 5]), (" a", " b")).to_dict()
    assert given == {"type": "logit_difference", "answer": [4, 5], "instead": [" a", " b"]}


def test_metrics_that_are_no_data_are_refused() -> None:
    read = ip.metrics.Metric.from_dict
    with pytest.raises(ValueError, match="is a function, and code is not saved"):
        ip.metrics.function(len).to_dict()
    with pytest.raises(ValueError, match="is a function, and code is not saved"):
        ip.metrics.function(len).to_python()
    with pytest.raises(
        ValueError, match=r"is 'accuracy', and no metric is called so\. There are: kl, logit, "
    ):
        read({"type": "accuracy"})
    with pytest.raises(ValueError, match="has a field 'token', which is none of: pos, answer"):
        read({"type": "logit", "answer": " a", "token": 1})
    with pytest.raises(ValueError, match="has no field 'answer', and should have one: a text"):
        read({"type": "logit"})
