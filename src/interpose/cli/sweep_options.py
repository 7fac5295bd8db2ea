"""What `interpose sweep` can be told, beside the options of all commands."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

SweptModel = Annotated[
    str, typer.Option(metavar="MODEL", help="A folder, a name on a hub, or pocket.")
]
Clean = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="A text. For several: --clean TEXT --clean TEXT."),
]
Corrupt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="To compare with: one for each --clean, of the same number of tokens."
    ),
]
Answer = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN", help="Whose logit is measured; one for all texts or for each."),
]
Instead = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN", help="Measure the lead of the answer over this."),
]
Sites = Annotated[
    str,
    typer.Option(metavar="SITE,...", help="Where: such as resid_pre, z or attn_out,mlp_out."),
]
Over = Annotated[
    str,
    typer.Option(metavar="AXIS,...", help="What to go through: site, layer, head, neuron, pos."),
]
Patch = Annotated[
    Literal["clean", "corrupt"] | None,
    typer.Option(help="Whose values go into the other run; by default clean."),
]
EditName = Annotated[
    str | None,
    typer.Option(metavar="EDIT", help="Do this instead of patching, such as zero."),
]
Align = Annotated[
    Literal["end"] | None, typer.Option(help="Let pairs of other lengths end together.")
]
Plan = Annotated[
    Literal["wavefront", "batches", "one per cell"] | None,
    typer.Option(help="Insist on one; by default the cheapest that is proven."),
]
SaveAs = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the experiment, for interpose run.")
]
Count = Annotated[
    bool,
    typer.Option("--count", help="Count what a sweep computes, on a tiny model, and stop."),
]
