"""`interpose`: look into a model from the command line. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from interpose.errors import InterposeError

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 2
    try:
        status: int = given.run(given)
    except (InterposeError, *_MISTAKES) as error:
        sys.stderr.write(f"interpose {given.command}: {error}\n")
        return 2
    return status


_MISTAKES = (OSError, ValueError, LookupError, AttributeError, ModuleNotFoundError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="interpose", description="Look inside neural networks while they run."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser("demo", help="find where the pocket model keeps a fact")
    demo.set_defaults(run=_demo)
    demo.add_argument("--clean", help="a prompt of your own")
    demo.add_argument("--corrupt", help="a prompt of as many tokens with another answer")
    demo.add_argument("--out", default="demo.html", help="the page to write (default: demo.html)")
    check = commands.add_parser("check", help="prove the promises on a model")
    check.set_defaults(run=_check)
    check.add_argument("--layers", type=int, nargs="+", help="which blocks (default: 3 of them)")
    sites = commands.add_parser("sites", help="list what can be hooked in a model")
    sites.set_defaults(run=_sites)
    for command in (check, sites):
        command.add_argument("model", help="a folder, or a name on a hub")
        command.add_argument("--device", help="such as cuda:0 (default: the accelerator, if any)")
        command.add_argument("--dtype", help="such as bfloat16 (default: as saved)")
        command.add_argument("--json", action="store_true", help="print JSON")
    sites.add_argument("pattern", nargs="?", help="only names that match, such as 'blocks.0.**'")
    run = commands.add_parser("run", help="run an experiment from its file")
    run.set_defaults(run=_run)
    run.add_argument("experiment", help="what ip.Experiment.save wrote")
    run.add_argument("--python", action="store_true", help="print a script that does the same")
    run.add_argument("--html", help="also write the result as a page")
    run.add_argument("--json", help="also write the numbers")
    run.add_argument("--device", help="such as cuda:0 (default: the accelerator, if any)")
    _add_sweep(commands.add_parser("sweep", help="change a model at one place after another"))
    return parser


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    sweep.set_defaults(run=_sweep)
    sweep.add_argument("--model", default="pocket", help="a folder, or a name on a hub")
    sweep.add_argument("--clean", nargs="+", metavar="TEXT", help="one text or several")
    sweep.add_argument("--corrupt", nargs="+", metavar="TEXT", help="of as many tokens each")
    sweep.add_argument("--site", default="resid_pre", help="such as resid_pre, z, attn_out,mlp_out")
    sweep.add_argument("--over", default="layer,pos", help="of site, layer, head, neuron, pos")
    sweep.add_argument(
        "--answer", nargs="+", metavar="TOKEN", help="one for all texts, or one each"
    )
    sweep.add_argument("--instead", nargs="+", metavar="TOKEN", help="measure the lead over this")
    sweep.add_argument("--edit", help="do this instead of patching, such as zero")
    sweep.add_argument(
        "--patch",
        choices=("clean", "corrupt"),
        help="whose values go into the other run (default: clean)",
    )
    sweep.add_argument("--plan", choices=("wavefront", "batches", "one per cell"))
    sweep.add_argument("--align", choices=("end",), help="let pairs of other lengths end together")
    for name in ("layer", "head", "neuron", "pos"):
        sweep.add_argument(f"--{name}", type=int, nargs="+", help="only these")
    sweep.add_argument("--device", help="such as cuda:0 (default: the accelerator, if any)")
    sweep.add_argument("--dtype", help="such as bfloat16 (default: as saved)")
    sweep.add_argument("--html", help="also write the result as a page")
    sweep.add_argument("--json", help="also write the numbers")
    sweep.add_argument("--save", help="also write the experiment, for interpose run")
    sweep.add_argument(
        "--count", action="store_true", help="count what a sweep computes, on a tiny random model"
    )


def _load(given: argparse.Namespace) -> TransformerModel:
    import torch

    import interpose as ip

    dtype = None if given.dtype is None else getattr(torch, given.dtype, None)
    if given.dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {given.dtype!r}; try float32, bfloat16 or float16.")
    return ip.load(given.model, device=given.device, dtype=dtype)


def _demo(given: argparse.Namespace) -> int:
    from interpose.cli import demo

    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if (given.clean is None) != (given.corrupt is None):
        raise ValueError("--clean and --corrupt go together: two prompts of as many tokens.")
    prompts = (demo.CLEAN, demo.CORRUPT) if given.clean is None else (given.clean, given.corrupt)
    for part in demo.demo(*prompts, out=given.out, coloured=coloured):
        _print(part)
    return 0


def _check(given: argparse.Namespace) -> int:
    report = _load(given).check(layer=given.layers)
    _print(json.dumps(report.to_dict(), indent=2) if given.json else repr(report))
    return 0 if report.passed else 1


def _sites(given: argparse.Namespace) -> int:
    sites = _load(given).sites
    chosen = sites if given.pattern is None else sites.select(given.pattern)
    if given.json:
        found = {
            name: {"kind": site.kind, "axes": list(site.axes), "about": site.about}
            for name, site in chosen.items()
        }
        _print(json.dumps(found, indent=2))
    else:
        _print(repr(chosen))
    return 0


def _run(given: argparse.Namespace) -> int:
    from interpose.cli import run

    for part in run.run(
        given.experiment,
        python=given.python,
        html=given.html,
        device=given.device,
        json=given.json,
    ):
        _print(part)
    return 0


def _sweep(given: argparse.Namespace) -> int:
    from interpose.cli import sweep

    for part in sweep.sweep(given):
        _print(part)
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
