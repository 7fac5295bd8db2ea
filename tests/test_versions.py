"""Which versions `make oldest` and `make pythons` install, and what they leave alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts import versions


def test_the_oldest_are_the_floors_and_the_others_the_pins() -> None:
    oldest = versions.requirements("oldest", {})
    assert {"torch==2.6.*", "transformers==5.9.*", "pytest==8.3.*"} <= set(oldest)
    assert not any("mypy" in asked or "ruff" in asked for asked in oldest)
    named = [asked.split("==")[0] for asked in versions.requirements("pythons", {})]
    assert named == [asked.split("==")[0] for asked in oldest]
    assert not any("*" in asked for asked in versions.requirements("pythons", {}))
    some = versions.requirements("oldest", {"torch": "2.6.0", "numpy": "2.2"})
    assert not any(asked.startswith(("torch==", "numpy==")) for asked in some)


def test_every_dependency_has_a_floor_and_a_pin() -> None:
    assert set(versions.pins()) == set(versions.floors())
    assert "torch" in versions.floors()


def test_cuda_is_seen_in_what_pip_would_install() -> None:
    def report(*names: str) -> str:
        return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})

    assert versions.brings_cuda(report("torch", "numpy")) == []
    assert versions.brings_cuda(report("torch", "nvidia-cudnn-cu12", "Triton")) == [
        "nvidia-cudnn-cu12",
        "triton",
    ]


def test_where_torch_would_bring_cuda_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def fake(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        plan = json.dumps({"install": [{"metadata": {"name": "nvidia-nccl"}}]})
        return subprocess.CompletedProcess(command, 0, stdout=plan, stderr="")

    monkeypatch.setattr(versions, "own", lambda python, which: {})
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(sys, "argv", ["versions", "oldest"])
    assert versions.main() == 1
    assert "not run: torch would bring 1 packages of CUDA" in capsys.readouterr().out
    assert [("--dry-run" in call, "venv" in call) for call in calls] == [
        (False, True),
        (True, False),
    ]
