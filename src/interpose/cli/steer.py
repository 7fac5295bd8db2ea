"""`interpose steer`: a steering vector from texts or a file, found a place and a strength for, and seen at work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interpose.cli.options import (
    Device,
    Dtype,
    ModelName,
    Wanted,
    give,
    is_terminal,
    load_model,
    numbers,
    script,
    several,
    told,
)

if TYPE_CHECKING:
    from interpose.steering.vector import SteeringVector

_TEXTS = "TEXT|@FILE"
_LINES = "A text; @FILE has one in each line. May be said again."


def _texts(about: str) -> Any:
    return typer.Option(metavar=_TEXTS, help=f"{about} {_LINES}")


@told
def steer(
    wanted: Wanted,
    model: ModelName,
    positive: Annotated[list[str] | None, _texts("What to steer towards.")] = None,
    negative: Annotated[list[str] | None, _texts("What to steer away from.")] = None,
    vector: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A vector that was saved: .safetensors, .json or .gguf."),
    ] = None,
    by: Annotated[
        Literal["means", "pca", "pca_diff", "probe"],
        typer.Option(help="How a direction is made of the texts."),
    ] = "means",
    site: Annotated[str, typer.Option(metavar="SITE", help="The kind of site.")] = "resid_post",
    texts: Annotated[list[str] | None, _texts("Prompts to continue, or questions.")] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN", help="Wanted after --texts: one for all or one for each."),
    ] = None,
    other: Annotated[
        list[str] | None, _texts("What steering should leave alone; goes with --answer.")
    ] = None,
    layer: Annotated[list[str] | None, several("layers")] = None,
    strength: Annotated[
        list[str] | None, typer.Option(metavar="X,X,...", help="How strongly; several to compare.")
    ] = None,
    how: Annotated[
        Literal["add", "add_keeping_norm", "project_out"],
        typer.Option(help="What is done with the vector."),
    ] = "add",
    phase: Annotated[
        Literal["prompt", "generated"] | None,
        typer.Option(help="Steer only this part of the text."),
    ] = None,
    most_damage: Annotated[
        float, typer.Option(metavar="NATS", help="How much loss a choice may cost on --other.")
    ] = 0.1,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="How long texts become.")] = 30,
    save: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep the vector: .safetensors, .json or .gguf."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> Iterator[str]:
    """Make a steering vector, and see it at work.

    From texts alone, or from a file, the vector itself is shown; with --texts, what the model writes with and without
    it at --layer and --strength; with --answer and --other besides, every layer and strength by effect and damage:

    interpose steer pocket --positive "I love it" --negative "I hate it" --texts "The film was" --layer 4 --strength 2
    """
    from interpose.steering.side_by_side import side_by_side
    from interpose.steering.steer import steer as search

    _check(positive, negative, vector, texts, answer, other, save, how)
    strengths = _strengths(strength)
    layers = numbers("layer", layer)
    words = {"phase": phase} if phase else {}
    if wanted.python:
        said = {"positive": _lines(positive), "negative": _lines(negative), "by": by, "site": site}
        yield script(model, device, dtype, _python(vector, said, _lines(texts), answer, _lines(other), {
            "layer": layers, "strength": strengths, "how": how, "words": words, "most": most_damage,
            "new": max_new_tokens, "save": save,
        }))  # fmt: skip
        return
    there = load_model(model, device, dtype)
    found = _vector(there, vector, _lines(positive), _lines(negative), by=by, site=site)
    found.must_be_of(there)
    if save is not None:
        kept = found.save(save).resolve()
        if "-" not in dict(wanted.files()).values():
            yield f"the vector: {kept}"
    if texts is None:
        yield from give(found, wanted)
        return
    if answer is not None:
        options: dict[str, Any] = {} if strengths is None else {"strength": strengths}
        curve = search(
            there,
            found,
            _lines(texts),
            answer=answer[0] if len(answer) == 1 else answer,
            other=_lines(other),
            layer=layers,
            how=how,
            where=words,
            most_damage=most_damage,
            progress=is_terminal(),
            **options,
        )
        yield from give(curve, wanted)
        return
    edits = {
        name: getattr(found, how)(**given, layer=layers, **words)
        for name, given in _named(strengths, how)
    }
    yield from give(
        side_by_side(there, _lines(texts), edits, max_new_tokens=max_new_tokens), wanted
    )


def _check(
    positive: Any,
    negative: Any,
    vector: Any,
    texts: Any,
    answer: Any,
    other: Any,
    save: Any,
    how: str,
) -> None:
    """Refuse what does not go together, before a model is loaded."""
    if (vector is None) == (positive is None and negative is None):
        raise ValueError(
            "give --positive and --negative to make a vector, or --vector FILE to use one."
        )
    if vector is None and (positive is None or negative is None):
        raise ValueError(
            "--positive and --negative go together: a vector leads from the one to the other."
        )
    if (answer is None) != (other is None):
        raise ValueError(
            "--answer and --other go together: effect is measured on the one, damage on the other."
        )
    if answer is not None and texts is None:
        raise ValueError("--answer goes with --texts: the questions it is the answer to.")
    if answer is not None and how == "project_out":
        raise ValueError("--how project_out has no strengths to compare: leave --answer out.")
    if save is not None and Path(save).suffix not in (".safetensors", ".json", ".gguf"):
        raise ValueError(f"--save writes .safetensors, .json or .gguf; got {save!r}.")


def _lines(given: list[str] | None) -> list[str]:
    """Texts, and those of files: one in each line, empty lines left out."""
    found: list[str] = []
    for one in given or []:
        if one.startswith("@"):
            found += [
                line for line in Path(one[1:]).read_text("utf-8").splitlines() if line.strip()
            ]
        else:
            found.append(one)
    return found


def _strengths(given: list[str] | None) -> list[float] | None:
    if not given:
        return None
    try:
        return [float(part) for text in given for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--strength takes numbers, such as --strength 0.5,1,2; got {','.join(given)!r}."
        ) from None


def _named(strengths: list[float] | None, how: str) -> list[tuple[str, dict[str, float]]]:
    if how == "project_out":
        return [("without it", {})]
    return [(f"strength {one:g}", {"strength": one}) for one in strengths or [1.0]]


def _vector(
    model: Any, file: str | None, positive: list[str], negative: list[str], *, by: str, site: str
) -> SteeringVector:
    from interpose.steering.finding import steering_vector
    from interpose.steering.vector import SteeringVector

    if file is not None:
        return SteeringVector.load(file)
    return steering_vector(model, positive, negative, by=by, site=site, progress=is_terminal())


def _python(
    file: str | None,
    said: dict[str, Any],
    texts: list[str],
    answer: list[str] | None,
    other: list[str],
    options: dict[str, Any],
) -> str:
    """The lines of a script that does the same, after the model is loaded."""
    lines = [f"vector = ip.SteeringVector.load({file!r})"]
    if file is None:
        words = f"by={said['by']!r}, site={said['site']!r}"
        lines = [
            f"positive = {said['positive']!r}",
            f"negative = {said['negative']!r}",
            f"vector = ip.steering_vector(model, positive, negative, {words})",
        ]
    if options["save"] is not None:
        lines.append(f"vector.save({options['save']!r})")
    if not texts:
        return "\n".join([*lines, "print(vector)"])
    lines.append(f"texts = {texts!r}")
    if answer is not None:
        lines.append(f"other = {other!r}")
        given = "" if options["strength"] is None else f", strength={options['strength']}"
        given += f", layer={options['layer']}, how={options['how']!r}, where={options['words']!r}"
        given += f", most_damage={options['most']}"
        lines.append(
            f"print(ip.steer(model, vector, texts, answer={answer!r}, other=other{given}))"
        )
        return "\n".join(lines)
    inner = "".join(f", {name}={value!r}" for name, value in options["words"].items())
    edits = [
        f"    {name!r}: vector.{options['how']}({''.join(f'{value}, ' for value in given.values())}"
        f"layer={options['layer']}{inner}),"
        for name, given in _named(options["strength"], options["how"])
    ]
    shown = f"ip.side_by_side(model, texts, edits, max_new_tokens={options['new']})"
    return "\n".join([*lines, "edits = {", *edits, "}", f"print({shown})"])
