"""One type for each mechanism: a fresh `check()` gives what docs/models.md says, row by row."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.models import tiny

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "models.md"
SCRIPT = ROOT / "scripts" / "models_page.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("models_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["models_page"] = module
    spec.loader.exec_module(module)
    return module


page = load_script()
ROWS = {(row.kind, row.model_type): row for row in page.parse(PAGE.read_text())}

# How the inside of attention is reached, written down by hand from transformers' source.
INTERFACE = """
    gpt2 llama gemma2 gemma3n_text olmo2 gpt_neox opt phi3 cohere granite mixtral deepseek_v3
    gpt_oss llama4_text bert bart diffllama hrm_text deepseek_v4 qwen3_next nemotron_h zamba2 falcon_h1
    jamba minimax recurrent_gemma
"""
KERNEL = "falcon"
SOFTMAX = "bloom gptj mpt codegen gpt_neo xglm"
NONE = "mamba mamba2 rwkv"
FAILING = {"zaya": "no blocks.*.v", "jetmoe": "no blocks.*.q", "xlnet": "no blocks.*.z"}
CAUSAL = [*f"{INTERFACE} {KERNEL} {SOFTMAX} {NONE}".split(), *FAILING]
OTHERS = [
    ("encoder_decoder", "t5"),
    ("encoder_decoder", "bart"),
    ("encoder_decoder", "whisper"),
    ("vision", "vit"),
    ("vision", "clip_vision_model"),
    ("audio", "wav2vec2"),
    ("masked", "bert"),
    ("classifier", "gpt2"),
]
EVERY = [*(("causal", name) for name in CAUSAL), *OTHERS]


@pytest.mark.parametrize(("kind", "model_type"), EVERY)
def test_a_fresh_check_gives_the_row_on_the_page(kind: str, model_type: str) -> None:
    assert page.examine(model_type, kind, differences=False) == ROWS[kind, model_type]


@pytest.mark.parametrize(("kind", "model_type"), EVERY)
def test_the_page_says_what_is_known_by_hand(kind: str, model_type: str) -> None:
    row = ROWS[kind, model_type]
    if model_type in FAILING:
        assert row.result == "fail"
        assert FAILING[model_type] in row.wrong
        return
    assert (row.result, row.wrong) == ("pass", "")
    ways = {"interface": INTERFACE, "kernel": KERNEL, "softmax": SOFTMAX, "none": NONE}
    if kind == "causal":
        expected = next(way for way, names in ways.items() if model_type in names.split())
        assert row.attention == expected
    assert row.sites > (15 if row.attention == "none" else 30)


def test_the_page_has_a_row_for_every_type() -> None:
    assert list(ROWS) == [(kind, name) for kind in tiny.KINDS for name in sorted(tiny.KINDS[kind])]
    unbuilt = {name for (_, name), row in ROWS.items() if row.result == "not built"}
    assert unbuilt == set(tiny.UNBUILDABLE)
    assert {row.result for row in ROWS.values()} <= {"pass", "fail", "not built"}
    for row in ROWS.values():
        assert (row.wrong == "") == (row.result == "pass"), row


def test_the_totals_are_those_of_the_rows() -> None:
    lines = re.findall(
        r"^\| ([\w -]+?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.M
    )
    found = {title: tuple(map(int, numbers)) for title, *numbers in lines}
    assert set(found) == {*page.TITLES.values(), "all"}
    for kind, title in (*page.TITLES.items(), (None, "all")):
        counts = Counter(row.result for row in ROWS.values() if kind in (row.kind, None))
        built = counts["pass"] + counts["fail"]
        assert found[title] == (counts.total(), built, counts["pass"], counts["fail"]), title


def test_the_page_is_what_its_rows_give_and_of_this_transformers() -> None:
    assert page.render(ROWS.values()) == PAGE.read_text()
    assert f"transformers {transformers.__version__}," in PAGE.read_text()


def test_rows_survive_being_written_and_read() -> None:
    row = page.Row(
        kind="causal",
        model_type="odd",
        result="fail",
        sites=3,
        attention="kernel + softmax",
        wrong="sums at resid_mid: a + b = c to …",
        absent=(("one reason", "resid_mid, mlp.pre"), ("another reason", "attn.z")),
    )
    other = replace(row, kind="vision", result="pass", wrong="", absent=())
    assert page.parse(page.render([row, other])) == [row, other]


def test_the_script_compares_and_writes_chosen_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--types", "fnet", "--jobs", "0", "--page", str(tmp_path / "models.md")]
    other = tmp_path / "models.md"
    other.write_text(PAGE.read_text())
    assert page.main([*arguments, "--check"]) == 0
    assert capsys.readouterr().out == ""
    spoilt = PAGE.read_text().replace("| fnet | pass |", "| fnet | fail |")
    other.write_text(spoilt)
    assert page.main([*arguments, "--check"]) == 1
    shown = capsys.readouterr().out
    assert "-| fnet | fail |" in shown
    assert "+| fnet | pass |" in shown
    assert other.read_text() == spoilt
    assert page.main(arguments) == 0
    assert other.read_text() == PAGE.read_text()


def test_the_script_refuses_unknown_types(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        page.main(["--types", "lama"])
    assert "no such types: lama" in capsys.readouterr().err
