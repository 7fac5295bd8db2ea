"""`interpose sweep`: the experiment that its flags say, and what a sweep takes by count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from interpose.edits.edit import Edit
from interpose.experiments.experiment import Experiment
from interpose.models.loading import _transformers
from interpose.models.transformer import TransformerModel
from interpose.sweeps import metrics
from interpose.sweeps.sweep import sweep as run_sweep


def as_experiment(
    *,
    model: str,
    clean: list[str] | None,
    corrupt: list[str] | None,
    answer: list[str] | None,
    instead: list[str] | None,
    dtype: str | None,
    site: list[str],
    over: list[str],
    edit: str | None,
    words: dict[str, Any],
) -> Experiment:
    """The experiment that the flags say; ``words`` are those of a sweep, None where they were not given."""
    if not clean or not answer:
        raise ValueError(
            "a sweep needs --clean TEXT and --answer TOKEN; and --corrupt TEXT to patch from, or --edit zero."
        )
    if not corrupt and edit is None:
        raise ValueError(
            "without --corrupt TEXT there is nothing to patch from; or say --edit zero."
        )
    metric: metrics.Metric = metrics.logit(_single(answer))
    if instead:
        metric = metrics.logit_difference(_single(answer), _single(instead))
    said = {name: value for name, value in words.items() if value is not None}
    if edit is not None:
        said["edit"] = _edit(edit, _single(site))
    return Experiment(
        model=model,
        clean=clean,
        corrupt=corrupt or None,
        metrics=metric,
        sweep={"site": _single(site), "over": over, **said},
        dtype=dtype,
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
    model = TransformerModel(module)
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
