"""`interpose run`: an experiment from its file, as its result, as a page, or as the script that does the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from interpose.experiments.experiment import Experiment


def run(
    path: str, *, python: bool, html: str | None, device: str | None, json: str | None = None
) -> Iterator[str]:
    """Run an experiment; yields what to print."""
    experiment = Experiment.load(path)
    if python:
        yield experiment.to_python(path).rstrip("\n")
        return
    yield from shown(experiment, html=html, device=device, json=json)


def shown(
    experiment: Experiment, *, html: str | None, device: str | None, json: str | None = None
) -> Iterator[str]:
    """The result of an experiment, and where it was written."""
    wanted = {"page": (html, ".html"), "numbers": (json, ".json")}
    for what, (path, ending) in wanted.items():
        if path is not None and (
            Path(path).suffix != ending or not Path(path).resolve().parent.is_dir()
        ):
            raise ValueError(
                f"the {what} cannot be written to {path!r}: give a name that ends in {ending}, in a folder that is "
                "there."
            )
    result = experiment.run(device=device, progress=sys.stderr.isatty())
    yield repr(result)
    for what, (path, _) in wanted.items():
        if path is not None:
            yield f"the {what}: {result.save(path).resolve()}"
