"""Files with something else in some places: what comes out is what they say, or `ip.FileError` in a sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import interpose as ip
from tests.files.changes import changed


def edits() -> list[ip.Edit]:
    vector = torch.arange(4.0)
    return [
        ip.zero("z", layer=[0, 2], head=-1, pos=slice(1, None), exclude={"site": "a", "rows": 1}),
        ip.add("x", {("x", 1): vector, "y": vector}, strength=0.5, at=(..., slice(2))),
        ip.patch("x", ip.Cache({"x": vector}), pos=" a"),
        ip.rotate("x", ip.Rotation(4, 2), vector, k=1),
        ip.noise("x", 0.1, seed=3),
        ip.knockout(3, query=-1, key=[" a"]),
    ]


@pytest.mark.parametrize("seed", range(12))
def test_files_of_experiments_and_edits_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    experiment = ip.Experiment(
        model="pocket", inputs=["a"], metrics={"a": ip.metrics.logit(" a")}, edits=edits()
    )
    swept = {"site": "z", "over": ["layer"], "layer": [1], "edit": ip.scale("z", 0.5)}
    sweep = ip.Experiment(model="m", clean="a", metrics=ip.metrics.loss(), sweep=swept)
    shared = {"format": "interpose.edits", "version": 2, "edits": [e.to_dict() for e in edits()]}
    file = tmp_path / "edits.json"
    refused = 0
    for _ in range(100):
        for data, load in (
            (experiment.to_dict(), lambda: ip.Experiment.load(file).to_python(file)),
            (sweep.to_dict(), lambda: ip.Experiment.load(file).to_python(file)),
            (shared, lambda: repr(ip.load_edits(tmp_path))),
        ):
            file.write_text(json.dumps(changed(data, draw)))
            try:
                load()
            except ip.FileError as error:
                said = str(error)
            else:
                continue
            assert said.startswith(repr(str(file))), said
            assert len(said) < 3000, said
            refused += 1
    assert 100 < refused < 300
