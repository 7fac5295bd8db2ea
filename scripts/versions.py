"""Run the tests at the lowest versions that pyproject.toml allows, or on each Python that is found.

``python -m scripts.versions oldest`` and ``python -m scripts.versions pythons`` (`make oldest`, `make pythons`). Each
environment is made in ``build/environments``, by pip with whatever indexes it is told to use. A Python that has torch
itself, as a distribution installs it, is used with it. Where pip would bring CUDA, nothing is installed and it is said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build" / "environments"
NEEDED = ("transformers", "dev")  # the extras that tests need
UNNEEDED = ("mypy", "ruff", "types-tqdm")
CUDA = re.compile("nvidia|cuda|triton")


def floors() -> dict[str, str]:
    """The lowest version of each dependency that pyproject.toml allows, as its first two numbers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    asked += [one for extra in NEEDED for one in project["optional-dependencies"][extra]]
    found = (re.fullmatch(r"([\w-]+)>=(\d+(?:\.\d+)?)", one) for one in asked)
    return {match[1]: match[2] for match in found if match and match[1] not in UNNEEDED}


def pins() -> dict[str, str]:
    """The versions that constraints.txt has of the same."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if "==" in line)
    return {name: found[name] for name in floors()}


def requirements(which: str, there: dict[str, str]) -> list[str]:
    """What pip is to install, beside what a Python has itself.

    Args:
        which: ``oldest`` or ``pythons``.
        there: versions of what it has.
    """
    if which == "oldest":
        wanted = {name: f"{name}=={version}.*" for name, version in floors().items()}
    else:
        wanted = {name: f"{name}=={version}" for name, version in pins().items()}
    return [asked for name, asked in wanted.items() if name not in there]


def own(python: str, which: str) -> dict[str, str]:
    """What of torch and numpy a Python has itself, if its torch is of a version that is wanted."""
    code = (
        "import importlib.metadata as m, json\n"
        "names = {d.name.lower() for d in m.distributions() if d.name}\n"
        "print(json.dumps({n: m.version(n) for n in ('torch', 'numpy') if n in names}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    wanted = (floors() if which == "oldest" else pins())["torch"]
    return found if f"{found.get('torch')}.".startswith(f"{wanted}.") else {}


def brings_cuda(report: str) -> list[str]:
    """What of CUDA is in pip's report of what it would install."""
    names = (one["metadata"]["name"].lower() for one in json.loads(report)["install"])
    return sorted(name for name in names if CUDA.search(name))


def pythons(least: tuple[int, int]) -> Iterator[str]:
    """Each Python on the path that runs, from the lowest version that is supported."""
    for minor in range(least[1], least[1] + 10):
        name = f"python{least[0]}.{minor}"
        try:
            done = subprocess.run([name, "-c", "import ensurepip"], capture_output=True)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            yield name


def run(python: str, which: str, rest: list[str], *, cuda: bool) -> str:
    """Make an environment, run the tests in it, and say in a line what came of it."""
    there = own(python, which)
    asked = requirements(which, there)
    home = HOME / f"{which}-{Path(python).name}"
    inside = str(home / "bin" / "python")
    options = ["--system-site-packages"] if there else []
    subprocess.run([python, "-m", "venv", *options, str(home)], check=True)
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    if not cuda:
        plan = [*pip, "--dry-run", "--ignore-installed", "--report", "-", *asked]
        done = subprocess.run(plan, capture_output=True, text=True)
        if done.returncode:
            return f"not run: {done.stderr.strip().splitlines()[-1]}"
        if found := brings_cuda(done.stdout):
            return (
                f"not run: torch would bring {len(found)} packages of CUDA, such as {found[0]}. Tell pip of a torch "
                "without (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), or say --cuda."
            )
    subprocess.run([*pip, *asked], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    tests = [inside, "-m", "pytest", "-m", "not exhaustive", *rest]
    done = subprocess.run(
        tests, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    print(done.stdout)
    return ("passed: " if done.returncode == 0 else "FAILED: ") + done.stdout.splitlines()[-1]


def main() -> int:
    """The exit status is 1 if tests failed, or none ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("oldest", "pythons"))
    parser.add_argument("--cuda", action="store_true", help="let torch bring CUDA, gigabytes of it")
    given, rest = parser.parse_known_args()
    chosen = [sys.executable] if given.which == "oldest" else list(pythons((3, 11)))
    found = {python: run(python, given.which, rest, cuda=given.cuda) for python in chosen}
    for python, said in found.items():
        print(f"{python}: {said}")
    passed = [said.startswith("passed") for said in found.values() if "not run" not in said]
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
