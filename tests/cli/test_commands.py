"""Every command: what it takes, prints and writes, what it says of mistakes, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import interpose as ip
from interpose.cli.main import app, main
from interpose.models.proofs.report import Finding, Report
from tests.pages import loads_nothing
from tests.store.cached import as_mi_crow

COMMANDS = [
    "demo",
    "check",
    "sites",
    "run",
    "harvest",
    "size",
    "sweep",
    "steer",
    "store ls",
    "store info",
    "store verify",
    "store export",
    "store import",
    "sae train",
    "sae eval",
    "sae features",
]
COMMON = ["--json", "--csv", "--html", "--python", "--debug"]
SWEEP = ["--clean", "The Eiffel Tower is in", "--corrupt", "The Trevi Fountain is in"]
SWEEP += ["--answer", " Paris", "--instead", " Rome", "--device", "cpu"]


def asked(*words: str) -> Any:
    """What a command does, by typer's runner."""
    return CliRunner().invoke(app, list(words))


def by_itself(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command as a process of its own."""
    command = [sys.executable, "-m", "interpose.cli.main", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def arguments(command: str, folder: Path) -> list[str]:
    """What makes each command do something small."""
    if command == "run":
        path = folder / "experiment.json"
        ip.Experiment(model="pocket", inputs=["The cat"], metrics=ip.metrics.logit(" is")).save(
            path
        )
        return ["run", str(path), "--device", "cpu"]
    if command == "harvest" or command.startswith(("store", "sae")):
        (folder / "texts.txt").write_text("The cat\nThe old dog\n")
        words = ["harvest", "pocket", "texts.txt", "--site", "resid_post,z", "--layer", "0,-1"]
        words += ["--store", "there", "--device", "cpu"]
        if command == "harvest":
            return words
        if command == "store import":
            as_mi_crow(folder / "run", {"layer": [torch.ones(2, 4)]}, batch=1)
            return [*command.split(), "run", "--store", "there"]
        assert asked(*words).exit_code == 0
        if command == "sae train":
            sizes = ["--latents", "16", "--k", "2", "--steps", "3", "--batch-size", "4"]
            more = ["--site", "blocks.0.hook_resid_post", "--without-first", "--device", "cpu"]
            return ["sae", "train", "there", "sae", *sizes, *more]
        if command == "sae eval":
            sites = ["--site", "blocks.6.hook_resid_post", "--device", "cpu"]
            return ["sae", "eval", "pocket", "there", *sites, "--model", "pocket"]
        if command == "sae features":
            sites = ["--site", "blocks.6.hook_resid_post", "--device", "cpu", "--neuron", "3,17"]
            return ["sae", "features", "pocket", "there", *sites, "--model", "pocket"]
        more = {"store ls": [], "store export": ["there", "out", "--format", "npy"]}
        return [*command.split(), *more.get(command, ["there"])]
    given = {
        "demo": [],
        "check": ["pocket", "--layer", "0", "--device", "cpu"],
        "size": ["pocket", "--tokens", "1000"],
        "sites": ["pocket", "blocks.0.attn.*", "--device", "cpu"],
        "sweep": [*SWEEP, "--layer", "0,-1"],
        "steer": ["pocket", "--positive", "I am", "--negative", "I was", "--device", "cpu"],
    }
    return [command, *given[command]]


def test_commands_share_their_options_word_for_word() -> None:
    group: Any = get_command(app)
    inner = {name: group.commands.pop(name) for name in ("store", "sae")}
    there = dict(group.commands) | {
        f"{name} {command}": one
        for name, commands in inner.items()
        for command, one in commands.commands.items()
    }
    assert list(there) == COMMANDS
    helps = {}
    for name, command in there.items():
        there = {option.opts[0]: option.help for option in command.params}
        helps[name] = [there[option] for option in COMMON]
        assert list(there)[-5:] == COMMON
        assert all(there.values()), name
    assert all(same == helps["demo"] for same in helps.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_helps_and_takes_words_of_the_library(command: str) -> None:
    shown = asked(*command.split(), "--help")
    assert shown.exit_code == 0
    assert f"Usage: interpose {command}" in shown.output.replace("root", "interpose")
    for other in ("--layers", "--heads", "--positions", "--direction", "--out"):
        assert other not in shown.output


def test_help_needs_no_command_and_the_version_is_the_packages() -> None:
    shown = asked("--help")
    assert shown.exit_code == 0
    assert all(f"  {command.split()[0]} " in shown.output for command in COMMANDS)
    assert "..." not in shown.output.partition("Commands:")[2]  # no line is cut
    assert asked("--version").output == f"interpose {version('interpose')}\n"
    assert "Usage" in asked().output


@pytest.mark.parametrize("command", COMMANDS)
def test_files_are_written_and_printed_alike(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = arguments(command, tmp_path)
    if command == "check":
        short = Report(model="x", sites={}, absent={}, findings=(Finding("a", "s", True, "b"),))
        monkeypatch.setattr(ip.TransformerModel, "check", lambda self, layer: short)
    files = {kind: str(tmp_path / f"made.{kind}") for kind in ("json", "csv", "html")}
    shown = asked(*words, *(word for kind in files for word in (f"--{kind}", files[kind])))
    assert shown.exit_code == 0, shown.output
    assert all(path in shown.output for path in files.values())
    made = {kind: Path(path).read_text() for kind, path in files.items()}
    assert json.loads(made["json"])
    rows = list(csv.reader(io.StringIO(made["csv"])))
    assert len(rows) > 1
    assert len({len(row) for row in rows}) == 1
    loads_nothing(made["html"])
    assert made["html"].startswith("<!doctype html>")
    shutil.rmtree("out", ignore_errors=True)
    printed = asked(*words, "--csv", "-")
    assert printed.exit_code == 0
    assert printed.stdout == made["csv"]  # nothing else is printed


@pytest.mark.parametrize("command", COMMANDS)
def test_python_prints_a_script_that_does_the_same(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = arguments(command, tmp_path)
    script = asked(*words, "--python")
    assert script.exit_code == 0, script.output
    assert script.stdout.startswith("import ")
    assert not list(tmp_path.glob("*.html"))
    if command == "check":  # takes a while: what it asks is enough
        assert script.output == (
            "import interpose as ip\n\nmodel = ip.load('pocket', device='cpu')\nprint(model.check(layer=[0]))\n"
        )
        return
    exec(script.stdout, {})
    shutil.rmtree("out", ignore_errors=True)
    printed = capsys.readouterr().out
    if command not in ("demo", "store verify"):  # the script of one is short, the other is silent
        assert asked(*words).stdout.rstrip() == printed.rstrip()


def test_a_check_that_fails_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Report(model="x", sites={}, absent={}, findings=(Finding("a", "s", False, "off"),))
    monkeypatch.setattr(ip.TransformerModel, "check", lambda self, layer: bad)
    assert asked("check", "pocket", "--device", "cpu").exit_code == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "pocket", "--layer", "12"], "layer 12 is not there: GPT2LMHeadModel has layers"),
        (["check", "pocket", "--layer", "x"], "--layer takes numbers, such as --layer 0,3,6"),
        (["check", "./nowhere"], "no folder './nowhere'"),
        (["check", "pocket", "--dtype", "float33"], "no dtype 'float33'"),
        (["sites", "pocket", "blocks.9.*"], "blocks.9.*"),
        (
            ["sites", "pocket", "--json", "x.txt"],
            "--json cannot write to 'x.txt': give a name that",
        ),
        (
            ["sites", "pocket", "--html", "no/x.html"],
            "in a folder that is there, or - to print it.",
        ),
        (["sites", "pocket", "--json", "-", "--csv", "-"], "only one of --json, --csv and --html"),
        (["run", "nothing.json"], "nothing.json"),
        (["sweep", "--clean", "The cat sat", "--corrupt", "The", "--answer", " a"], "--align end"),
        (["sweep", *SWEEP, "--pos", "99"], "pos 99 is not there"),
        (["harvest", "pocket", "no.txt", "--site", "z", "--store", "s"], "no file 'no.txt'"),
        (["harvest", "pocket", "x", "--site", "z", "--store", "s", "--part", "4"], "such as 0/4"),
        (["store", "info", "."], "there is no store in '.'"),
        (["store", "ls", "nowhere"], "interpose store ls: there is no folder 'nowhere'"),
        (["sae", "train", "no", "x", "--latents", "4"], "--k says how many latents fire"),
        (["sae", "train", "no", "x", "--latents", "4", "--k", "2"], "there is no store in 'no'"),
        (["sae", "eval", "no", "no"], "there is no store in 'no'"),
        (["store", "info", "."], "interpose harvest MODEL TEXTS --store FOLDER makes one"),
        (["demo", "--clean", "x"], "--clean and --corrupt go together"),
        (["run"], "Missing argument"),
        (["sweep", "--patch", "both"], "'both' is not one of"),
        (["sweep", "--layers", "1"], "No such option"),
        (["nothing"], "No such command"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else "",
)
def test_mistakes_end_with_two_and_speak_of_flags(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = asked(*words)
    assert shown.exit_code == 2
    assert said in shown.stderr, shown.stderr
    assert shown.stdout == ""
    assert "Traceback" not in shown.stderr
    assert "='" not in shown.stderr


HARVEST = ["harvest", "pocket", "texts.txt", "--site", "resid_post", "--layer", "0", "--store", "s"]


def test_a_harvest_says_what_it_needs_and_one_that_was_ended_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from interpose.jobs.job import run
    from interpose.store import harvest

    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("".join(f"The cat {n}\n" for n in range(30)))

    def ended(job: Any, **options: Any) -> None:
        def step(count: int) -> None:
            if len(ip.open_store("s")):
                raise KeyboardInterrupt

        run(job, engine="local", step=step)

    words = [*HARVEST, "--segment-texts", "4", "--device", "cpu"]
    with monkeypatch.context() as patched:
        patched.setattr(harvest, "run", ended)
        shown = asked(*words)
    assert shown.exit_code == 130
    assert "s: about " in shown.stderr
    assert "tokens of 30 texts" in shown.stderr
    assert "What was committed stays" in shown.stderr
    assert "The same command goes on from there." in shown.stderr
    there = len(ip.open_store("s"))
    assert 0 < there < 30
    again = asked(*words)
    assert again.exit_code == 0
    assert f"tokens of {30 - there} texts" in again.stderr
    assert ip.open_store("s").complete
    assert "of 0 texts" in asked(*words).stderr


def test_damage_is_found_taken_back_and_harvested_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("The cat\nThe dog\n")
    words = [*HARVEST, "--device", "cpu"]
    assert asked(*words).exit_code == 0
    assert asked("store", "verify", "s").exit_code == 0
    (path,) = Path("s").glob("segments/*/blocks*")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    shown = asked("store", "verify", "s", "--drop-damaged")
    assert shown.exit_code == 1
    assert path.name in shown.output
    assert "Segments 0 are taken back" in shown.output
    assert asked(*words).exit_code == 0
    assert asked("store", "verify", "s").exit_code == 0


def test_debug_shows_where() -> None:
    quiet, loud = (asked("check", "./nowhere", *more) for more in ([], ["--debug"]))
    assert quiet.exit_code == loud.exit_code == 2
    assert "Traceback" in loud.stderr
    assert loud.stderr.endswith(quiet.stderr)


def test_what_nobody_foresaw_is_told_with_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ip, "load", broken)
    shown = asked("sites", "pocket")
    assert shown.exit_code == 2
    assert shown.stderr == (
        "interpose sites: RuntimeError: out of luck. This was not foreseen; --debug shows where it happened.\n"
    )


def test_main_gives_the_status_and_takes_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["nothing"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_processes_end_as_told(tmp_path: Path) -> None:
    listed = by_itself("sites", "pocket", "blocks.0.hook_resid_*", "--json", "-", folder=tmp_path)
    assert listed.returncode == 0
    assert "blocks.0.hook_resid_mid" in json.loads(listed.stdout)
    wrong = by_itself("check", "poket", folder=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == (
        "interpose check: no folder 'poket'; did you mean 'pocket', the model in the package?\n"
    )
    assert by_itself(folder=tmp_path).returncode == 2
