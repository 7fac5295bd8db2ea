"""`interpose sweep`: a sweep over two texts, and what it takes by count."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from interpose.cli.run import shown
from interpose.edits.edit import Edit
from interpose.experiments.experiment import Experiment
from interpose.models.loading import _transformers, wrap
from interpose.sweeps import metrics
from interpose.sweeps.sweep import sweep as run_sweep


def sweep(given: argparse.Namespace) -> Iterator[str]:
    """Run what the arguments say; yields what to print."""
    if given.count:
        yield from count()
        return
    experiment = as_experiment(given)
    yield from shown(experiment, html=given.html, json=given.json, device=given.device)
    if given.save is not None:
        experiment.save(given.save)
        yield f"the experiment: {given.save}  (again: interpose run {given.save})"


def as_experiment(given: argparse.Namespace) -> Experiment:
    """The experiment that the arguments say."""
    if given.clean is None or given.answer is None:
        raise ValueError(
            "a sweep needs --clean TEXT and --answer TOKEN; and --corrupt TEXT to patch from, or --edit zero."
        )
    answer = _single(given.answer)
    metric: metrics.Metric = metrics.logit(answer)
    if given.instead is not None:
        metric = metrics.logit_difference(answer, _single(given.instead))
    over = given.over.split(",")
    words: dict[str, Any] = {"site": given.site.split(","), "over": over}
    words["site"] = _single(words["site"])
    for name in ("patch", "plan", "align", "layer", "head", "neuron", "pos"):
        if getattr(given, name) is not None:
            words[name] = getattr(given, name)
    if given.edit is not None:
        words["edit"] = _edit(given.edit, words["site"])
    elif given.corrupt is None:
        raise ValueError(
            "without --corrupt TEXT there is nothing to patch from; or say --edit zero."
        )
    return Experiment(
        model=given.model,
        clean=given.clean,
        corrupt=given.corrupt,
        metrics=metric,
        sweep=words,
        dtype=given.dtype,
    )


def _single(values: Sequence[str]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def _edit(name: str, site: Any) -> Edit:
    """The edit of that name that needs nothing but a place."""
    try:
        return Edit.from_dict({"type": name, "site": site})
    except (TypeError, ValueError):
        raise ValueError(
            f"--edit takes an edit that needs nothing but a place, such as zero; got {name!r}. For others, write an "
            "experiment: docs/experiments.md."
        ) from None


LAYERS, POSITIONS, FIRST = 12, 15, 10


@torch.no_grad()
def count() -> Iterator[str]:
    """Count the arithmetic of a grid as in the study of indirect objects, and check its numbers."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        n_layer=LAYERS,
        n_head=4,
        n_embd=32,
        vocab_size=96,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config).eval()
    for parameter in module.parameters():
        parameter.normal_(std=0.5)  # as it comes, most of it does next to nothing
    model = wrap(module)
    clean = torch.randint(96, (1, POSITIONS))
    corrupt = clean.clone()
    corrupt[:, FIRST:] = (clean[:, FIRST:] + 1) % 96
    words: dict[str, Any] = {"metric": metrics.logit_difference(5, 7), "progress": False}
    found = run_sweep(model, clean, corrupt, **words)
    single = run_sweep(model, clean, corrupt, plan="one per cell", **words)
    tally, cells = found.tally, found.values.numel()
    references = 2 * POSITIONS * LAYERS
    most, off = found.effect.abs().max(), (found.values - single.values).abs().max()
    yield (
        f"{LAYERS} layers, {POSITIONS} positions, two texts that differ from position {FIRST} on (a tiny GPT-2 with "
        "random weights)\n"
        f"  one forward per cell: {cells} cells x {POSITIONS} positions x {LAYERS} layers = "
        f"{tally.one_per_cell:,} token-layers\n"
        f"  reference runs:       2 texts x {POSITIONS} positions x {LAYERS} layers = {references:,}\n"
        f"  {tally.plan + ':':<22}{tally.token_layers - references:,}\n"
        f"  together:             {tally.token_layers:,} token-layers in {tally.forwards} forwards, "
        f"1/{tally.one_per_cell / tally.token_layers:.1f} of one forward per cell\n"
        f"  largest difference from one forward per cell: {float(off):.1e}, on effects up to {float(most):.2f}"
    )
