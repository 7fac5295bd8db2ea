"""What `interpose steer` can be told, beside the options of all commands."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

_LINES = "A text; @FILE has one in each line. May be said again."


def _texts(about: str) -> Any:
    return typer.Option(metavar="TEXT|@FILE", help=f"{about} {_LINES}")


Positive = Annotated[list[str] | None, _texts("What to steer towards.")]
Negative = Annotated[list[str] | None, _texts("What to steer away from.")]
VectorFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A vector that was saved: .safetensors, .json or .gguf."),
]
By = Annotated[
    Literal["means", "pca", "pca_diff", "probe"],
    typer.Option(help="How a direction is made of the texts."),
]
SiteName = Annotated[str, typer.Option(metavar="SITE", help="The kind of site.")]
Texts = Annotated[list[str] | None, _texts("Prompts to continue, or questions.")]
Wish = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN", help="Wanted after --texts: one for all or one for each."),
]
Other = Annotated[list[str] | None, _texts("What steering should leave alone; goes with --answer.")]
Strength = Annotated[
    list[str] | None,
    typer.Option(metavar="X,X,...", help="How strongly; several to compare."),
]
How = Annotated[
    Literal["add", "add_keeping_norm", "project_out"],
    typer.Option(help="What is done with the vector."),
]
Phase = Annotated[
    Literal["prompt", "generated"] | None, typer.Option(help="Steer only this part of the text.")
]
MostDamage = Annotated[
    float, typer.Option(metavar="NATS", help="How much loss a choice may cost on --other.")
]
Length = Annotated[int, typer.Option(metavar="N", help="How many tokens are written.")]
Save = Annotated[
    str | None, typer.Option(metavar="FILE", help="Keep the vector: .safetensors, .json or .gguf.")
]


def lines_of(given: list[str] | None) -> list[str]:
    """Texts, and those of files: one in each line, empty lines left out."""
    from pathlib import Path

    found: list[str] = []
    for one in given or []:
        if one.startswith("@"):
            text = Path(one[1:]).read_text("utf-8")
            found += [line for line in text.splitlines() if line.strip()]
        else:
            found.append(one)
    return found


def strengths_of(given: list[str] | None) -> list[float] | None:
    """The numbers of ``--strength``."""
    if not given:
        return None
    try:
        return [float(part) for text in given for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--strength takes numbers, such as --strength 0.5,1,2; got {','.join(given)!r}."
        ) from None
