"""The search for layer and strength, against one run for each; texts side by side; the command."""

from __future__ import annotations

import dataclasses
import functools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import interpose as ip
from interpose.cli.main import app

pytestmark = pytest.mark.bits

GOOD = [f"The film was {word}, so Anna felt" for word in ("wonderful", "great", "perfect")]
BAD = [f"The film was {word}, so Anna felt" for word in ("terrible", "awful", "useless")]
ASKED = ["The concert was amazing, so Peter felt", "Today the meal was lovely, so Kate felt"]
OTHER = [
    "The capital of France is Paris.",
    "The keys near the cabinet are old.",
    "The war lasted long.",
]
LAYERS, STRENGTHS = [3, 4], [-1.0, 0.5, 1.0, 4.0]


@functools.cache
def pocket() -> Any:
    return ip.load("pocket", device="cpu").requires_grad_(False)


@functools.cache
def vector() -> ip.SteeringVector:
    return ip.steering_vector(pocket(), BAD, GOOD, progress=False)


@functools.cache
def curve(damage: str = "loss", how: Any = "add") -> ip.SteeringCurve:
    return ip.steer(
        pocket(), vector(), ASKED, answer=[" sad", " angry"], other=OTHER, layer=LAYERS,
        strength=STRENGTHS, damage=damage, how=how, most_damage=0.5, progress=False,
    )  # fmt: skip


@pytest.mark.parametrize(("damage", "how"), [("loss", "add"), ("kl", "add_keeping_norm")])
def test_every_number_is_that_of_a_run_by_itself(damage: str, how: str) -> None:
    model, found = pocket(), curve(damage, how)
    answers = [model.to_single_token(word) for word in (" sad", " angry")]

    def measured(edits: list[Any]) -> list[float]:
        effect, right, cost = [], [], []
        for text, answer in zip(ASKED, answers):
            last = model.run_with_hooks(text, hooks=edits)[0, -1]
            effect.append(float(last.softmax(-1)[answer]))
            right.append(float(last.argmax() == answer))
        for text in OTHER:
            logits = model.run_with_hooks(text, hooks=edits)[0].log_softmax(-1)
            tokens, plain = model.to_tokens(text)[0], model(text)[0, -1].log_softmax(-1)
            if damage == "loss":
                cost.append(-float(logits[:-1].gather(1, tokens[1:, None]).mean()))
            else:
                cost.append(float((plain.exp() * (plain - logits[-1])).sum()))
        return [sum(some) / len(some) for some in (effect, right, cost)]

    base = measured([])
    assert found.baseline["metric"] == pytest.approx(base[0], abs=1e-4)
    for layer in LAYERS:
        for strength in STRENGTHS:
            edit = getattr(vector(), how)(strength, layer=layer)
            effect, right, cost = measured([edit])
            place = {"layer": layer, "strength": strength}
            assert found.at(measure="effect", **place) == pytest.approx(effect - base[0], abs=1e-4)
            assert found.at(measure="right", **place) == pytest.approx(right, abs=1e-6)
            assert found.at(measure="damage", **place) == pytest.approx(cost - base[2], abs=1e-3)
    assert found.protocol["plan"].startswith("wavefront")


def test_chosen_is_the_largest_effect_whose_damage_is_bounded() -> None:
    found = curve()
    chosen = found.chosen
    assert chosen is not None
    effect, damage = found.values[0], found.values[2]
    best = found.at(measure="effect", **chosen)
    assert best > 0.2
    assert found.at(measure="damage", **chosen) <= 0.5
    assert best == effect[damage <= 0.5].max()
    assert damage.max() > 0.5  # the bound rules something out
    assert repr(found.edit) == repr(vector().add(chosen["strength"], layer=chosen["layer"]))
    marks = {(a, b): found.mark(a, b) for a in LAYERS for b in STRENGTHS}
    assert list(marks.values()).count("chosen") == 1
    assert marks[chosen["layer"], chosen["strength"]] == "chosen"
    for (layer, strength), mark in marks.items():
        over = found.at(measure="damage", layer=layer, strength=strength) > 0.5
        assert (mark == "too much damage") == over
    assert f"chosen: layer {chosen['layer']}, strength" in repr(found)
    none = dataclasses.replace(found, most_damage=-10.0)
    assert none.chosen is None
    assert "nothing is chosen: the largest effect" in repr(none)
    with pytest.raises(
        ValueError, match="no layer and strength has an effect with a damage of -10"
    ):
        none.edit  # noqa: B018


def test_a_function_makes_edits_of_ones_own() -> None:
    both = ip.steer(
        pocket(), vector(), ASKED[0], metric=ip.metrics.logit_difference(" sad", " happy"), other=OTHER[:1], layer=4,
        strength=[1.0], how=lambda layer, by: [vector().add(by, layer=layer), vector().add(-by, layer=layer)],
        progress=False,
    )  # fmt: skip
    assert both.values[0].abs().max() < 1e-3
    assert both.values[1].isnan().all()
    with pytest.raises(ValueError, match="function of one's own"):
        dataclasses.replace(both, values=both.values.abs() + 1e-6, most_damage=1.0).edit  # noqa: B018


def test_the_page_and_the_picture_show_the_curve_and_the_choice(tmp_path: Path) -> None:
    found = curve()
    root = ElementTree.fromstring(found.svg())
    circles = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(circles) == len(LAYERS) * len(STRENGTHS) + 1  # and the ring
    page = found.save(tmp_path / "x.html").read_text()
    assert page.count(">chosen<") == 1
    assert "too much damage" in page
    again = ip.load_result(found.save(tmp_path / "x.json"))
    assert isinstance(again, ip.SteeringCurve)
    assert again.chosen == found.chosen
    assert repr(again.edit) == repr(found.edit)
    data = json.loads((tmp_path / "x.json").read_text())
    with pytest.raises(ip.FileError):
        ip.SteeringCurve.from_dict({**data, "how": "save"})


def test_mistakes_are_refused_before_anything_runs() -> None:
    asked: dict[str, Any] = {"other": OTHER, "progress": False}
    with pytest.raises(ValueError, match=r"answer=\.\.\. or metric"):
        ip.steer(pocket(), vector(), ASKED, **asked)
    asked["answer"] = " sad"
    with pytest.raises(ValueError, match="none is 0"):
        ip.steer(pocket(), vector(), ASKED, strength=[0.0, 1.0], **asked)
    with pytest.raises(ValueError, match="damage is 'loss' or 'kl'"):
        ip.steer(pocket(), vector(), ASKED, damage="accuracy", **asked)
    with pytest.raises(ValueError, match="how is 'add'"):
        ip.steer(pocket(), vector(), ASKED, how="multiply", **asked)
    with pytest.raises(ip.Unsupported, match="of a 'llama' model"):
        ip.steer(pocket(), dataclasses.replace(vector(), model_type="llama"), ASKED, **asked)


# Side by side.


def test_both_sides_are_what_generate_gives() -> None:
    model = pocket()
    edits = {
        "sad": vector().add(1.0, layer=4),
        "glad": [vector().add(-1.0, layer=4), ip.scale("z", 1.0, layer=0)],
    }
    shown = ip.side_by_side(model, ASKED, edits, max_new_tokens=3)
    for row, text in enumerate(ASKED):
        tokens = model.to_tokens(text)
        for name, some in shown.written.items():
            hooks = edits.get(name, [])
            with model.hooks(hooks if isinstance(hooks, list) else [hooks]):
                made = model.generate(
                    tokens, return_type="tokens", max_new_tokens=3, do_sample=False
                )
            assert some[row] == model.to_string(made[0, tokens.shape[1] :])
    assert shown.written["sad"] != shown.written["as it is"]
    assert [record["value"] for record in shown.records() if record["how"] == "sad"] == [1, 1]
    assert (
        "sad: add('resid_post', tensor(192,), layer=4, strength=1.0); 2 of 2 texts are others"
        in repr(shown)
    )
    assert "<mark" in shown.html()
    drawn = [
        ip.side_by_side(model, ASKED[0], edits["sad"], seed=7, max_new_tokens=6).written
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    nothing = ip.side_by_side(
        model, ASKED[0], ip.scale("z", 1.0, layer=0), seed=7, max_new_tokens=6
    ).written
    assert (
        nothing["steered"] == nothing["as it is"] == drawn[0]["as it is"]
    )  # the same draws on both sides


def test_an_edit_that_never_applies_is_an_error_and_not_the_same_text_twice() -> None:
    with pytest.raises(ip.NeverFired):
        ip.side_by_side(pocket(), ASKED[0], vector().add(layer=4, pos=100), max_new_tokens=3)
    for wrong, said in (([], "without any"), ({"as it is": vector().add()}, "choose another")):
        with pytest.raises(ValueError, match=said):
            ip.side_by_side(pocket(), ASKED[0], wrong)


# The command.


def asked(*words: str) -> Any:
    return CliRunner().invoke(app, ["steer", "pocket", "--device", "cpu", *words])


def test_the_command_makes_keeps_searches_and_shows(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_text("\n".join(BAD) + "\n\n")
    made = asked(*(word for text in GOOD for word in ("--negative", text)), "--positive", f"@{file}", "--save",
                 str(tmp_path / "x.safetensors"), "--json", "-")  # fmt: skip
    assert made.exit_code == 0, made.output
    kept = ip.SteeringVector.load(tmp_path / "x.safetensors")
    torch.testing.assert_close(kept.directions, vector().directions)
    assert json.loads(made.stdout)["layers"] == kept.layers
    use = ["--vector", str(tmp_path / "x.safetensors"), "--texts", ASKED[0], "--layer", "4"]
    shown = asked(
        *use, "--strength=-1,1", "--max-new-tokens", "3", "--html", str(tmp_path / "x.html")
    )
    assert shown.exit_code == 0, shown.output
    assert "strength 1: add('resid_post', tensor(192,), layer=4, strength=1.0)" in shown.stdout
    assert "<mark" in (tmp_path / "x.html").read_text()
    searched = asked(
        *use, "--strength", "0.5,1", "--answer", " sad", "--other", OTHER[0], "--csv", "-"
    )
    assert searched.exit_code == 0, searched.output
    assert searched.stdout.splitlines()[0] == "measure,layer,strength,value,error"
    for more in ([], ["--answer", " sad", "--other", OTHER[0]]):
        script = asked(*use, "--strength", "1", *more, "--python")
        made_here: list[Any] = []
        namespace: dict[str, Any] = {}
        exec(script.stdout, namespace | {"print": made_here.append})
        assert isinstance(made_here[-1], ip.Result)


def test_the_command_says_what_goes_together() -> None:
    for words, said in (
        ([], "give --positive and --negative to make a vector"),
        (["--positive", "a"], "--positive and --negative go together"),
        (["--vector", "x.gguf", "--answer", "a"], "--answer and --other go together"),
        (["--vector", "x.gguf", "--save", "x.txt"], "--save writes .safetensors"),
        (["--vector", "x.gguf", "--strength", "much"], "--strength takes numbers"),
    ):
        got = asked(*words)
        assert got.exit_code == 2
        assert said in got.output
