"""`interpose steer`: a steering vector from texts or a file, found a place and a strength for, and seen at work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from interpose.cli.steer_options import (
    By,
    How,
    Length,
    MostDamage,
    Negative,
    Other,
    Phase,
    Positive,
    Save,
    SiteName,
    Strength,
    Texts,
    VectorFile,
    Wish,
    lines_of,
    strengths_of,
)

if TYPE_CHECKING:
    from interpose.results.result import Result
    from interpose.steering.vector import SteeringVector


@told
def steer(
    wanted: Wanted,
    model: ModelName,
    positive: Positive = None,
    negative: Negative = None,
    vector: VectorFile = None,
    by: By = "means",
    site: SiteName = "resid_post",
    texts: Texts = None,
    answer: Wish = None,
    other: Other = None,
    layer: Annotated[list[str] | None, several("layers")] = None,
    strength: Strength = None,
    how: How = "add",
    phase: Phase = None,
    most_damage: MostDamage = 0.1,
    max_new_tokens: Length = 30,
    save: Save = None,
    device: Device = None,
    dtype: Dtype = None,
) -> Iterator[str]:
    """Make a steering vector, and see it at work.

    From texts alone, or from a file, the vector itself is shown; with --texts, what the model writes with and without
    it at --layer and --strength; with --answer and --other besides, every layer and strength by effect and damage:

    interpose steer pocket --positive "I love it" --negative "I hate it" --texts "The film was" --layer 4 --strength 2
    """
    asked = _Asked(
        positive=lines_of(positive),
        negative=lines_of(negative),
        file=vector,
        by=by,
        site=site,
        texts=lines_of(texts),
        answer=answer,
        other=lines_of(other),
        layer=numbers("layer", layer),
        strength=strengths_of(strength),
        how=how,
        words={"phase": phase} if phase else {},
        most_damage=most_damage,
        length=max_new_tokens,
        save=save,
    )
    asked.check()
    if wanted.python:
        yield script(model, device, dtype, asked.python())
        return
    there = load_model(model, device, dtype)
    found = asked.vector(there)
    found.must_be_of(there)
    if save is not None:
        kept = found.save(save).resolve()
        if "-" not in dict(wanted.files()).values():
            yield f"the vector: {kept}"
    yield from give(asked.result(there, found), wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What was asked for."""

    positive: list[str]
    negative: list[str]
    file: str | None
    by: str
    site: str
    texts: list[str]
    answer: list[str] | None
    other: list[str]
    layer: list[int] | None
    strength: list[float] | None
    how: str
    words: dict[str, Any]
    most_damage: float
    length: int
    save: str | None

    def check(self) -> None:
        """Refuse what does not go together, before a model is loaded."""
        made = bool(self.positive or self.negative)
        if made == (self.file is not None):
            raise ValueError(
                "give --positive and --negative to make a vector, or --vector FILE to use one."
            )
        if made and not (self.positive and self.negative):
            raise ValueError(
                "--positive and --negative go together: a vector leads from the one to the other."
            )
        if (self.answer is None) != (not self.other):
            raise ValueError(
                "--answer and --other go together: effect is measured on the one, damage on the other."
            )
        if self.answer is not None and not self.texts:
            raise ValueError("--answer goes with --texts: the questions it is the answer to.")
        if self.answer is not None and self.how == "project_out":
            raise ValueError("--how project_out has no strengths to compare: leave --answer out.")
        if self.save is not None and Path(self.save).suffix not in (
            ".safetensors",
            ".json",
            ".gguf",
        ):
            raise ValueError(f"--save writes .safetensors, .json or .gguf; got {self.save!r}.")

    def vector(self, model: Any) -> SteeringVector:
        """The vector, made or read."""
        from interpose.steering.finding import steering_vector
        from interpose.steering.vector import SteeringVector

        if self.file is not None:
            return SteeringVector.load(self.file)
        return steering_vector(
            model,
            self.positive,
            self.negative,
            by=self.by,
            site=self.site,
            progress=is_terminal(),
        )

    def result(self, model: Any, vector: SteeringVector) -> Result:
        """The vector itself, texts with and without it, or the curve of its layers and strengths."""
        from interpose.steering.side_by_side import side_by_side
        from interpose.steering.steer import steer as search

        if not self.texts:
            return vector
        if self.answer is None:
            edits = {
                name: getattr(vector, self.how)(**given, layer=self.layer, **self.words)
                for name, given in self.named()
            }
            return side_by_side(model, self.texts, edits, max_new_tokens=self.length)
        strengths: dict[str, Any] = {} if self.strength is None else {"strength": self.strength}
        return search(
            model,
            vector,
            self.texts,
            answer=self.single_answer(),
            other=self.other,
            layer=self.layer,
            how=self.how,
            where=self.words,
            most_damage=self.most_damage,
            progress=is_terminal(),
            **strengths,
        )

    def single_answer(self) -> Any:
        """One answer for all texts, or one for each."""
        answers = self.answer or []
        return answers[0] if len(answers) == 1 else answers

    def named(self) -> list[tuple[str, dict[str, float]]]:
        """What is put beside the text as it is: a name, and the words of the edit."""
        if self.how == "project_out":
            return [("without it", {})]
        return [(f"strength {one:g}", {"strength": one}) for one in self.strength or [1.0]]

    def python(self) -> str:
        """The lines of a script that does the same, after the model is loaded."""
        lines = [f"vector = ip.SteeringVector.load({self.file!r})"]
        if self.file is None:
            lines = [
                f"positive = {self.positive!r}",
                f"negative = {self.negative!r}",
                "vector = ip.steering_vector(",
                f"    model, positive, negative, by={self.by!r}, site={self.site!r}, progress=False",
                ")",
            ]
        if self.save is not None:
            lines.append(f"print('the vector:', vector.save({self.save!r}).resolve())")
        if not self.texts:
            return "\n".join([*lines, "print(vector)"])
        lines.append(f"texts = {self.texts!r}")
        if self.answer is not None:
            lines.append(f"other = {self.other!r}")
            given = {"answer": self.single_answer(), "layer": self.layer, "strength": self.strength}
            given |= {"how": self.how, "where": self.words or None, "most_damage": self.most_damage}
            said = "".join(f", {name}={x!r}" for name, x in given.items() if x is not None)
            lines.append(
                f"curve = ip.steer(model, vector, texts, other=other{said}, progress=False)"
            )
            return "\n".join([*lines, "print(curve)"])
        inner = f"layer={self.layer}" + "".join(f", {n}={x!r}" for n, x in self.words.items())
        edits = [
            f"    {name!r}: vector.{self.how}({''.join(f'{x}, ' for x in given.values())}{inner}),"
            for name, given in self.named()
        ]
        shown = f"ip.side_by_side(model, texts, edits, max_new_tokens={self.length})"
        return "\n".join([*lines, "edits = {", *edits, "}", f"print({shown})"])
