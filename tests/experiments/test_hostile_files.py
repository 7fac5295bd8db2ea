"""Experiments that someone else has made: no field of one becomes code, and a broken file ends in a sentence."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file

import interpose as ip
from interpose.cli.main import main
from tests.experiments.hostile import ATTACKS, MARK, edits, experiments, must_be_harmless

GOOD = {
    "format": "interpose.experiment",
    "version": 2,
    "model": "pocket",
    "inputs": ["a"],
    "metrics": {"type": "loss"},
}
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=2000)


def written(path: Path, **words: Any) -> Path:
    path.write_text(json.dumps({**GOOD, **words}))
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"prepend_bos": ATTACKS[0]}, r'prepend_bos is "0\)\\nimport os.*, and should be true or false'),
        ({"prepend_bos": 1}, "prepend_bos is 1, and should be true or false"),
        ({"model": ["pocket"]}, "model is a list of 1, and should be a text of 1 to 4096 letters"),
        ({"model": ""}, "model is '', and should be a text"),
        ({"dtype": 3}, "dtype is 3, and should be a text"),
        ({"dtype": "nn.Module"}, "makes no experiment: no dtype 'nn.Module'"),
        ({"inputs": [3]}, r"inputs\[0\] is 3, and should be a text, or a list"),
        ({"inputs": [[-1]]}, r"inputs\[0\]\[0\] is -1, and should be a whole number from 0"),
        ({"inputs": ["a", [1]]}, "makes no experiment: inputs are texts, or tokens, not both"),
        ({"inputs": []}, "makes no experiment: an experiment without a sweep has inputs"),
        ({"edits": [{"type": "zero", "site": "z", "at": "x"}, 3]}, r"edits\[1\] is 3, and should"),
        ({"edits": {"type": "zero"}}, "edits is an object with 'type', and should be a list"),
        ({"metrics": [1]}, "metrics is a list of 1, and should be an object"),
        ({"metrics": {"a": 3}}, "metrics.a is 3, and should be an object"),
        ({"metrics": {"type": "function", "of": "x"}}, "type is 'function', and no metric is called so"),
        ({"metrics": {"type": "logit", "answer": {}}}, "metrics.answer is empty, and should be a text"),
        ({"metrics": {"type": "logit", "answer": 1, "pos": "0"}}, "metrics.pos is '0', and should be"),
        ({"metrics": {"type": "loss", "pos": 3}}, "makes no loss: loss looks at several positions"),
        ({"sweep": 3, "inputs": []}, "sweep is 3, and should be an object"),
        ({"sweep": {"layer": {}}}, "sweep.layer is empty, and should be a whole number"),
        ({"sweep": {"patch": "x"}}, "sweep.patch is 'x', and should be 'clean' or 'corrupt'"),
        ({"sweep": {"edit": 3}}, "sweep.edit is 3, and should be an object"),
        ({"sweep": {"edit": {"type": "zero"}}}, "sweep.edit makes no zero"),
        ({"sweep": {"batch_size": 10**12}}, "sweep.batch_size is 1000000000000, and should be"),
        ({"tensors": "/etc/passwd"}, "tensors is '/etc/passwd', and should be the name of a file beside"),
        ({"tensors": 3}, "tensors is 3, and should be a text"),
        ({"version": 1, "sweep": 3}, "sweep is 3, and should be an object"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_what_it_should_be_is_named(
    words: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "x.json", **words)
    with pytest.raises(ip.FileError, match=said) as caught:
        ip.Experiment.load(path)
    assert str(caught.value).startswith(repr(str(path)))
    assert main(["run", str(path), "--python"]) == 2
    assert capsys.readouterr().err == f"interpose run: {caught.value}\n"


def test_what_is_made_by_hand_becomes_no_code_either() -> None:
    words: dict[str, Any] = {"model": "pocket", "inputs": ["a"], "metrics": ip.metrics.loss()}
    with pytest.raises(TypeError, match="prepend_bos is True, False or None; got"):
        ip.Experiment(**words, prepend_bos="0); import os")
    with pytest.raises(ValueError, match="no dtype"):
        ip.Experiment(**words, dtype=3)  # type: ignore[arg-type]

    class Sly(str):
        def __repr__(self) -> str:
            return "__import__('os')"

    class SlyNumber(int):
        def __repr__(self) -> str:
            return "__import__('os')"

    made = ip.Experiment(
        **{**words, "model": Sly("pocket"), "inputs": [Sly("a")]},
        edits=[ip.zero(Sly("z"), layer=SlyNumber(3), pos=Sly("b"))],
    )
    assert "__import__" not in made.to_python()
    must_be_harmless(made.to_python())


def strings(tree: ast.AST) -> list[str]:
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [value for value in found if isinstance(value, str)]


def test_a_text_that_looks_like_a_tensor_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    text = 'tensors[\'add.value\'] " tensors["add.value"]'
    value = torch.arange(40.0)
    edit = [ip.add(text, value, pos=text), ip.add(text, value + 1, layer=1)]
    experiment = ip.Experiment(model=text, inputs=[text], metrics={text: LOGIT}, edits=edit)
    experiment.save(path)
    script = experiment.to_python(path)
    assert strings(must_be_harmless(script)).count(text) == 6
    assert "tensors['add.value']" in ast.unparse(ast.parse(script))
    assert "tensors['add.value~2']" in script


LOGIT = ip.metrics.logit("a")


def script_is_harmless_and_says_the_same(experiment: ip.Experiment, folder: Path) -> None:
    path = folder / "x.json"
    experiment.save(path)
    again = ip.Experiment.load(path)
    assert again == experiment
    script = again.to_python(path)
    tree = must_be_harmless(script)
    assert {text for text in ATTACKS if text == experiment.model} <= set(strings(tree))
    # The edits that the script makes are those of the experiment.
    lines = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    named = {ast.unparse(line.targets[0]): line.value for line in lines}
    if not experiment.edits:
        return
    (file,) = [*folder.glob("*.safetensors"), None][:1]
    beside = {"tensors": load_file(file)} if file is not None else {}
    made = eval(ast.unparse(named["edits"]), {"ip": ip, "torch": torch, "re": re, **beside})
    assert [one.to_dict() for one in made] == [one.to_dict() for one in experiment.edits]
    assert not (folder / MARK).exists()


@QUICK
@given(experiments())
def test_no_text_of_an_experiment_becomes_code(
    tmp_path_factory: pytest.TempPathFactory, experiment: ip.Experiment
) -> None:
    script_is_harmless_and_says_the_same(experiment, tmp_path_factory.mktemp("x"))


@LONG
@given(experiments())
def test_no_text_of_many_experiments_becomes_code(
    tmp_path_factory: pytest.TempPathFactory, experiment: ip.Experiment
) -> None:
    script_is_harmless_and_says_the_same(experiment, tmp_path_factory.mktemp("x"))


@QUICK
@given(edits())
def test_no_text_of_an_edit_becomes_code(edit: ip.Edit) -> None:
    tensors: dict[str, torch.Tensor] = {}
    code = edit.to_python(tensors)
    must_be_harmless(code)
    made = eval(code, {"ip": ip, "torch": torch, "re": re, "tensors": tensors})
    assert made.to_dict() == edit.to_dict()


def test_the_judge_of_scripts_is_no_toy() -> None:
    for wrong in (
        "import os",
        "from os import system",
        "ip.load('x').module",
        "open('x')",
        "print(ip.load)(3)",
        "torch.load('x')",
        "ip.metrics.function(len)",
        "x = 3; x()",
        "tensors[open('x')]",
        "[a for a in 'x']",
        "f'{3}'",
        "lambda: 3",
        "def f(): 0",
        "__import__('os')",
        "ip.__class__",
        "re.compile('x').sub",
        "exec('x')",
    ):
        with pytest.raises(AssertionError):
            must_be_harmless(wrong)
