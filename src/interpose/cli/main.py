"""`interpose`: look into a model from the command line. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated

import typer

from interpose.cli.options import (
    Device,
    Dtype,
    ModelName,
    Shown,
    Wanted,
    give,
    is_terminal,
    load_model,
    numbers,
    script,
    several,
    told,
)
from interpose.cli.sae import saes
from interpose.cli.size import size
from interpose.cli.steer import steer
from interpose.cli.store import harvest, stores
from interpose.cli.sweep_options import (
    Align,
    Answer,
    Clean,
    Corrupt,
    Count,
    EditName,
    Instead,
    Over,
    Patch,
    Plan,
    SaveAs,
    Sites,
    SweptModel,
)

app = typer.Typer(
    help="Look inside neural networks while they run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for checked and failed, 2 for a mistake."""
    try:
        app(None if arguments is None else list(arguments), prog_name="interpose")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"interpose {version('interpose')}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_version, help="Show the version, and exit."
        ),
    ] = False,
) -> None:
    del version  # its callback has shown it


@app.command()
@told
def demo(
    wanted: Wanted,
    clean: Annotated[str | None, typer.Option(metavar="TEXT", help="A prompt of your own.")] = None,
    corrupt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="One of the same number of tokens, with another answer."),
    ] = None,
) -> Iterator[str]:
    """Find where the pocket model keeps a fact.

    The findings are printed, and written as a page: demo.html, or where --html says.
    """
    from interpose.cli import demo

    if (clean is None) != (corrupt is None):
        raise ValueError(
            "--clean and --corrupt go together: two prompts of the same number of tokens."
        )
    if wanted.html is None and not wanted.python:
        wanted = replace(wanted, html="demo.html")
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    yield from demo.demo(
        clean or demo.CLEAN, corrupt or demo.CORRUPT, wanted=wanted, coloured=coloured
    )


@app.command()
@told
def check(
    wanted: Wanted,
    model: ModelName,
    layer: Annotated[list[str] | None, several("layers; by default 3 of them")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> Generator[str, None, bool]:
    """Prove the promises on a model.

    The exit status is 1 if a promise does not hold.
    """
    layers = numbers("layer", layer)
    if wanted.python:
        asked = "" if layers is None else f"layer={layers}"
        yield script(model, device, dtype, f"print(model.check({asked}))")
        return True
    report = load_model(model, device, dtype).check(layer=layers)
    yield from give(report, wanted)
    return report.passed


@app.command()
@told
def sites(
    wanted: Wanted,
    model: ModelName,
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="Only names that match, such as 'blocks.0.**'."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> Iterator[str]:
    """List what can be hooked in a model.

    interpose sites pocket 'blocks.0.attn.*'
    """
    if wanted.python:
        asked = "" if pattern is None else f".select({pattern!r})"
        yield script(model, device, dtype, f"print(model.sites{asked})")
        return
    from interpose.render.html import page

    there = load_model(model, device, dtype).sites
    chosen = there if pattern is None else there.select(pattern)
    found = {
        name: {"kind": site.kind, "axes": list(site.axes), "about": site.about}
        for name, site in chosen.items()
    }
    shown = Shown(
        text=repr(chosen),
        data=found,
        records=[
            {"site": name, "kind": site.kind, "axes": ", ".join(site.axes), "about": site.about}
            for name, site in chosen.items()
        ],
        page=page(f"The sites of {model}", chosen._repr_html_()),
    )
    yield from give(shown, wanted)


@app.command()
@told
def run(
    wanted: Wanted,
    experiment: Annotated[str, typer.Argument(metavar="FILE", help="The experiment's file.")],
    device: Device = None,
) -> Iterator[str]:
    """Run an experiment from a file that interpose sweep --save wrote."""
    from interpose.experiments.experiment import Experiment

    loaded = Experiment.load(experiment)
    if wanted.python:
        yield loaded.to_python(experiment).rstrip("\n")
        return
    yield from give(loaded.run(device=device, progress=is_terminal()), wanted)


app.command()(told(harvest))
app.command()(told(size))
app.add_typer(stores, name="store")
app.add_typer(saes, name="sae")


@app.command()
@told
def sweep(
    wanted: Wanted,
    model: SweptModel = "pocket",
    clean: Clean = None,
    corrupt: Corrupt = None,
    answer: Answer = None,
    instead: Instead = None,
    site: Sites = "resid_pre",
    over: Over = "layer,pos",
    patch: Patch = None,
    edit: EditName = None,
    layer: Annotated[list[str] | None, several("layers")] = None,
    head: Annotated[list[str] | None, several("heads")] = None,
    neuron: Annotated[list[str] | None, several("neurons")] = None,
    pos: Annotated[list[str] | None, several("positions")] = None,
    align: Align = None,
    plan: Plan = None,
    save: SaveAs = None,
    count: Count = False,
    device: Device = None,
    dtype: Dtype = None,
) -> Iterator[str]:
    """Measure a model at one change after another.

    By default the values of the run on --clean are put into the run on --corrupt, at one layer and position after
    another, and what is measured is the logit of --answer, or its lead over --instead:

    interpose sweep --clean "The Eiffel Tower is in" --corrupt "The Trevi Fountain is in" --answer " Paris"
    """
    from interpose.cli import sweep

    if count:
        yield from sweep.count()
        return
    chosen = {"layer": layer, "head": head, "neuron": neuron, "pos": pos}
    experiment = sweep.as_experiment(
        model=model,
        clean=clean,
        corrupt=corrupt,
        answer=answer,
        instead=instead,
        dtype=dtype,
        site=site.split(","),
        over=over.split(","),
        edit=edit,
        words={
            "patch": patch,
            "plan": plan,
            "align": align,
            **{name: numbers(name, given) for name, given in chosen.items()},
        },
    )
    if wanted.python:
        yield experiment.to_python().rstrip("\n")
        return
    yield from give(experiment.run(device=device, progress=is_terminal()), wanted)
    if save is not None:
        experiment.save(save)
        if "-" not in dict(wanted.files()).values():
            yield f"the experiment: {save}  (again: interpose run {save})"


app.command()(steer)


if __name__ == "__main__":
    sys.exit(main())
