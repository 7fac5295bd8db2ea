"""`interpose demo`: what it prints, what it writes, and what it says when it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import interpose as ip
from interpose.cli import demo
from interpose.cli.main import main
from interpose.render.grid import Grid
from tests.pages import loads_nothing


def test_the_demo_prints_its_findings_and_writes_one_page_that_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert main(["demo", "--html", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "' Paris'" in printed
    assert "' Rome'" in printed
    assert str(out) in printed
    assert "\x1b[" not in printed  # no colours where nobody can see them
    page = out.read_text()
    assert "Which layers and positions carry the answer" in page
    loads_nothing(page)


def test_the_trace_is_that_of_raw_torch_hooks() -> None:
    model = ip.load("pocket", device="cpu")
    story = demo.investigate(model, demo.CLEAN, demo.CORRUPT)
    module = model.module
    clean, corrupt = (model.to_tokens(text) for text in (demo.CLEAN, demo.CORRUPT))
    paris, rome = model.to_single_token(" Paris"), model.to_single_token(" Rome")

    def lead(tokens: torch.Tensor) -> float:
        logits = module(tokens).logits[0, -1]
        return float(logits[paris] - logits[rome])

    with torch.no_grad():
        best, worst = lead(clean), lead(corrupt)
        kept: dict[str, torch.Tensor] = {}
        for layer, pos in ((0, 1), (3, 2), (5, 4), (6, 1)):
            block = module.transformer.h[layer]
            handle = block.register_forward_pre_hook(lambda _, args: kept.update(x=args[0]))
            lead(clean)
            handle.remove()

            def patch(
                _: object, args: tuple[torch.Tensor, ...], pos: int = pos
            ) -> tuple[object, ...]:
                stream = args[0].clone()
                stream[:, pos] = kept["x"][:, pos]
                return (stream, *args[1:])

            handle = block.register_forward_pre_hook(patch)
            patched = lead(corrupt)
            handle.remove()
            share = (patched - worst) / (best - worst)
            assert story.traced[layer, pos] == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        ("The Colosseum is in", "must have the same number of tokens"),
        ("The Eiffel Tower is in", "nothing to trace"),
    ],
)
def test_prompts_that_cannot_be_compared_are_refused(
    corrupt: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--clean", demo.CLEAN, "--corrupt", corrupt]) == 2
    assert said in capsys.readouterr().err


def test_what_the_page_tells_to_run_runs_and_shows_the_finding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ip.load("pocket", device="cpu")
    exec(demo.investigate(model, demo.CLEAN, demo.CORRUPT).script(), {})
    clean, corrupt, patched, ablated = (
        float(line.split("(")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()
    )
    assert clean > 5 > -5 > corrupt
    assert patched > corrupt + 5
    assert ablated < clean - 0.5


def test_mistakes_are_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--clean", "The capital of Japan is"]) == 2
    assert "go together" in capsys.readouterr().err
    assert main(["demo", "--html", str(tmp_path)]) == 2
    assert "--html cannot write to" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="did you mean 'pocket'"):
        ip.load("poket")
    with pytest.raises(FileNotFoundError, match="no folder"):
        ip.load("./nowhere/pocket")


def test_a_grid_keeps_columns_that_share_a_label_apart() -> None:
    grid = Grid(values=[[0.5, -1.0], [0.0, -0.001]], rows=["0", "1"], columns=["a", "a"])
    plain = grid.text(coloured=False).splitlines()
    assert [line.split() for line in plain] == [
        ["a", "a"],
        ["0", "0.50", "-1.00"],
        ["1", "0.00", "0.00"],
    ]
    coloured = grid.text(coloured=True)
    assert "\x1b[48;2;5;48;97;38;2;255;255;255m" in coloured  # -1 is dark blue with white ink
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == grid.text(coloured=False)
    assert grid.html().count("</td><td") == 2


def test_grid_labels_are_escaped() -> None:
    assert "<b>" not in Grid(values=[[1.0]], rows=["<b>"], columns=["<b>"]).html()
