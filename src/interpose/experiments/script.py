"""An experiment as a short script that does the same and prints the same."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from interpose.edits.edit import Edit
from interpose.edits.expressions import literal
from interpose.edits.saving import said
from interpose.experiments import saving
from interpose.experiments.tensors import expressions
from interpose.files.beside import name_of
from interpose.sweeps.metrics import Metric

if TYPE_CHECKING:
    from interpose.experiments.experiment import Experiment


def written(experiment: Experiment, path: Path | None) -> str:
    """The script.

    Args:
        experiment: what it does.
        path: where the experiment is saved, for tensors that are too large to be written out.
    """
    tensors: dict[str, Tensor] = {}
    saving.as_data(experiment, tensors)  # or why not
    edits = expressions(saving.edits_of(experiment), tensors)
    *naming, running = _doing(experiment, edits)
    body = [_loading(experiment), *naming, f"metric = {_metric(experiment.metrics)}", running]
    used = _names("\n".join(body))
    ours, others = ["import interpose as ip"], []
    if "tensors" in used:
        if path is None:
            raise ValueError(
                "the edits hold tensors that are too large for a script. Save the experiment, and say where: "
                "experiment.save('x.json'), experiment.to_python('x.json')."
            )
        file = name_of(saving.stem_of(path), saving.tensors_of(experiment))
        body.insert(0, f"tensors = load_file(Path(__file__).with_name({file!r}))")
        others.append("from pathlib import Path")
        ours.append("from safetensors.torch import load_file")
    if "torch" in used:
        ours.insert(0, "import torch")
    if "replace" in used:
        others.insert(0, "from dataclasses import replace")
    if "re" in used:
        others.insert(0, "import re")
    return "\n".join([*others, *([""] if others else []), *ours, "", *body, ""])


def _loading(experiment: Experiment) -> str:
    dtype = f", dtype=torch.{experiment.dtype}" if experiment.dtype else ""
    return f"model = ip.load({literal(experiment.model)}{dtype})"


def _doing(experiment: Experiment, edits: list[str]) -> list[str]:
    """Lines that name texts and edits, and the last, which runs them."""
    options = (
        [] if experiment.prepend_bos is None else [f"prepend_bos={literal(experiment.prepend_bos)}"]
    )
    texts: dict[str, Any] = {
        name: getattr(experiment, name)
        for name in ("clean", "corrupt")
        if getattr(experiment, name)
    }
    lines = [
        f"{name} = {_texts(given)}"
        for name, given in (texts or {"texts": experiment.inputs}).items()
    ]
    if experiment.edits:
        lines.append(f"edits = {_lines(edits[: len(experiment.edits)])}")
    if experiment.sweep is None:
        options = ["edits=edits", *options] if experiment.edits else options
        return [*lines, f"print(ip.measure({', '.join(['model', 'texts', 'metric', *options])}))"]
    words = dict(experiment.sweep)
    edit: Edit | None = words.pop("edit", None)
    options += [f"{name}={literal(value)}" for name, value in words.items()]
    if edit is not None and set(said(edit)) == {"site"}:
        options.append(f"edit=ip.{type(edit).__name__}")
    elif edit is not None:
        lines.append(f"edit = {edits[-1]}")
        options.append("edit=lambda site, **part: replace(edit, site=site, **part)")
    given = ["model", *texts, *options, "metric=metric", "progress=False"]
    run = f"result = ip.sweep({', '.join(given)})"
    if len(run) > 96:
        run = "result = ip.sweep(\n" + "".join(f"    {word},\n" for word in given) + ")"
    if experiment.edits:
        run = "with model.hooks(edits):\n" + textwrap.indent(run, "    ")
    return [*lines, f"{run}\nprint(result)"]


def _texts(texts: Any) -> str:
    return literal(texts[0]) if len(texts) == 1 and isinstance(texts[0], str) else _listed(texts)


def _listed(parts: Any) -> str:
    return _lines([literal(part) for part in parts])


def _lines(expressions: list[str]) -> str:
    return "[\n" + "".join(f"    {one},\n" for one in expressions) + "]"


def _metric(metrics: Any) -> str:
    if isinstance(metrics, Metric):
        return metrics.to_python()
    lines = (f"    {literal(name)}: {metric.to_python()},\n" for name, metric in metrics.items())
    return "{\n" + "".join(lines) + "}"


def _names(text: str) -> set[str]:
    """The names that a script uses."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
