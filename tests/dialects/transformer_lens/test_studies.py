"""Three small models, each trained once here: they learn their task, and show the circuit that the example looks for.

The same numbers of the untrained model are far off, so what is asserted is what training made. The bounds hold for all
seeds that were tried, not for the example's own alone.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"
STUDIES = ("balanced_brackets.py", "induction_heads.py", "modular_addition.py")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other worker has the other core
    yield
    torch.set_num_threads(threads)


def run(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script finds in an untrained model and in a trained one."""
    assert name in STUDIES
    untrained, trained = runpy.run_path(str(EXAMPLES / name), run_name="__main__")["found"].values()
    said = capsys.readouterr().out
    assert said.count("after ") == 2
    return untrained, trained


def test_a_head_weighs_the_brackets_that_follow(capsys: pytest.CaptureFixture[str]) -> None:
    untrained, trained = run("balanced_brackets.py", capsys)
    # Balanced, wrong order, wrong count, both: each alone, so the hard ones cannot hide.
    assert trained["right, off nowhere"].min() > 0.99
    assert untrained["right, off nowhere"].min() < 0.5
    assert trained["looks at itself and later"] > 0.75
    assert untrained["looks at itself and later"] < 0.6
    # What the head says inside the string is what the order is judged by. The count is judged by what
    # it says at the first two, which see the whole string, in four of six seeds, and inside in two.
    start, inside = trained["right, off at the first two"], trained["right, off inside"]
    assert start[1] > 0.9
    assert inside[1] < 0.8
    assert min(start[2], inside[2]) < 0.75
    assert start[0] > 0.9  # what is missed is what is wrong: balanced strings stay balanced
    assert inside[0] > 0.9


def test_a_head_that_looks_back_feeds_the_heads_that_repeat(
    capsys: pytest.CaptureFixture[str],
) -> None:
    untrained, trained = run("induction_heads.py", capsys)
    chance = torch.tensor(64.0).log()
    assert trained["loss, again"] < 0.1
    assert trained["loss, said first"] > 0.9 * chance
    assert untrained["loss, again"] > 0.9 * chance

    back, behind = trained["0.h looks one back"], trained["1.h looks behind the same token"]
    assert back.max() > 0.9
    assert behind.max() > 0.9
    assert untrained["0.h looks one back"].max() < 0.3
    assert untrained["1.h looks behind the same token"].max() < 0.1

    def stands_out(found: dict[str, Any]) -> torch.Tensor:
        score, first = found["K-composition of 0.h with the 1.h"], found["0.h looks one back"]
        others = score[first < min(0.5, float(first.max()))]  # two heads may share the work
        return score[first.argmax()] / others.max()

    assert stands_out(trained) > 1.25
    assert stands_out(untrained) < 1.15
    assert trained["loss, again, without the 0.h that look back"] > 0.75 * chance
    assert trained["loss, again, without the 0.h that do not"] < 0.2


def test_sums_are_waves(capsys: pytest.CaptureFixture[str]) -> None:
    untrained, trained = run("modular_addition.py", capsys)
    assert trained["right, whole"] > 0.99
    assert untrained["right, whole"] < 0.1
    assert trained["embedding, all five"] > 0.8
    assert untrained["embedding, all five"] < 0.35
    assert trained["right, five alone"] > 0.9
    assert trained["right, without the five"] < 0.15
