"""`Result`: what everything that measures returns can do; it prints, shows, saves and loads itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

from torch import Tensor

from interpose.errors import FileError
from interpose.files.schema import Field, Instance, Kind, MapOf, Record, kind_of
from interpose.files.schema import shown as held
from interpose.files.writing import write_whole
from interpose.render import escape, png
from interpose.render.frame import csv_text, data_frame
from interpose.render.html import html_table, page
from interpose.render.labelled import Labelled
from interpose.render.svg import picture
from interpose.render.text import table
from interpose.results import loading
from interpose.results.data import plain, read, shaped

_HELD = MapOf(Instance(object, "anything"))
_SCREEN = 39  # lines that a result takes in a terminal, at most


class Result:
    """What everything that measures returns can do.

    ```python
    result.top(3)                   # the strongest entries, as dictionaries; records(): all of them
    result.to_pandas()
    result.save("x.html")           # or .svg, .png, .csv, .json, .safetensors
    ip.load_result("x.json")        # the same again, to the last bit
    ```
    """

    __slots__ = ()

    VERSION: ClassVar[int] = 2
    """Of what `to_dict` writes."""
    FORMER: ClassVar[tuple[str, ...]] = ()
    """What older files call this kind of result."""
    SAID: ClassVar[tuple[str, ...]] = ()
    """What it writes beside its parts, which follows from them."""

    if TYPE_CHECKING:

        @property
        def title(self) -> str:
            """What was done, in a line."""
            raise NotImplementedError

    # Numbers.

    def records(self) -> Iterator[dict[str, Any]]:
        """Every entry as a dictionary."""
        raise NotImplementedError

    @property
    def ranked(self) -> str:
        """Which number of a record says how strong it is."""
        return "value"

    def top(self, k: int = 10) -> list[dict[str, Any]]:
        """The strongest entries, up or down, the strongest first."""
        strong = [record for record in self.records() if _is_number(record.get(self.ranked))]
        return sorted(strong, key=lambda record: -abs(record[self.ranked]))[:k]

    def to_pandas(self) -> Any:
        """A pandas data frame with a row for each record."""
        return data_frame(self.records())

    def to_csv(self) -> str:
        """The records as lines of a table; no spreadsheet takes a text of them for a formula."""
        return csv_text(self.records())

    # Data.

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """All it is made of: the annotation of each part, by its name."""
        known = get_type_hints(cls)
        return {one.name: known[one.name] for one in _fields(cls) if one.init}

    def to_dict(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Itself as data that JSON takes, every number included.

        Args:
            tensors: where tensors go, to be written beside it; None to write their numbers out.
        """
        said = {name: getattr(self, name) for name in self.SAID}
        parts = {n: plain(getattr(self, n), hint, tensors) for n, hint in self.hints().items()}
        return {
            "format": f"interpose.{type(self).__name__}",
            "version": self.VERSION,
            **said,
            **parts,
        }

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        source: str = "this data",
    ) -> Self:
        """What `to_dict` wrote, also in an older version.

        Args:
            data: the data.
            tensors: those that were written beside it.
            source: what errors call it.
        """
        name = cls.__name__
        words = dict(data) if isinstance(data, Mapping) else {}
        form, version = words.pop("format", None), words.pop("version", None)
        if form not in (f"interpose.{name}", *cls.FORMER):
            said = f" Its format is {form!r}; ip.load_result reads every kind." if form else ""
            raise FileError(f"{source} is not what {name}.to_dict writes.{said}")
        if type(version) is not int or not 1 <= version <= cls.VERSION:
            raise FileError(
                f"{source} is a {name} of version {version!r}, and this interpose reads versions 1 to {cls.VERSION}."
            )
        try:
            kept = tensors or {}
            inner = partial(loading.result_of, tensors=kept, source=source)
            words = {key: read(part, kept, inner) for key, part in words.items()}
            if version < cls.VERSION:
                words = cls.brought_up(words)
            made = cls(**cls.checked(words, Field(source)))
        except FileError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            raise FileError(f"{source} cannot be read as a {name}: {error}") from error
        try:
            repr(made), made.html()
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise FileError(
                f"{source} holds a {name} whose parts do not fit together, so that it cannot be shown: "
                f"{type(error).__name__} {held(str(error), 200)}."
            ) from error
        return made

    @classmethod
    def brought_up(cls, words: dict[str, Any]) -> dict[str, Any]:
        """The parts that a file of an older version has, as they are now.

        Args:
            words: the parts, by name.
        """
        return words

    @classmethod
    def checked(cls, words: dict[str, Any], field: Field) -> dict[str, Any]:
        """The parts that a file has, each of the kind that its annotation says.

        Args:
            words: the parts, by name.
            field: what errors call the file.
        """
        hints, kinds = cls.hints(), cls.kinds()
        none = dataclasses.MISSING
        record = Record(
            {
                name: kinds.get(name) or (_HELD if hint == dict[str, Any] else kind_of(hint))
                for name, hint in hints.items()
            },
            [
                one.name
                for one in _fields(cls)
                if (one.default, one.default_factory) != (none, none)
            ],
        )
        given = {name: part for name, part in words.items() if name not in cls.SAID}
        return {n: shaped(part, hints[n]) for n, part in record(given, field).items()}

    @classmethod
    def kinds(cls) -> dict[str, Kind]:
        """What a file may hold in parts whose annotations do not say it."""
        return {}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote as ``.json`` or ``.safetensors``, as `ip.load_result` reads it."""
        found = loading.load_result(path)
        if not isinstance(found, cls):
            raise FileError(f"{str(path)!r} holds a {type(found).__name__}, not a {cls.__name__}.")
        return found

    # Pictures.

    def lines(self) -> list[str]:
        """What is said below the title."""
        return []

    def names(self) -> Sequence[str]:
        """The names of the columns of its table."""
        return list(next(self.records(), {}))

    def cells(self) -> Sequence[Sequence[str]]:
        """The rows of its table, as they are printed."""
        return [list(map(shown, record.values())) for record in self.records()]

    def html_cells(self) -> Sequence[Sequence[str]]:
        """The rows as they are shown on a page; as they are printed unless it can do better."""
        return self.cells()

    def text_body(self, high: int) -> str:
        """What is printed below the title and its lines.

        Args:
            high: how many lines there are for it.
        """
        return table(self.names(), self.cells(), most=high - 2)

    def html_body(self) -> str:
        """What is shown on a page below the title and its lines."""
        return html_table(self.names(), self.html_cells())

    def view(self) -> Labelled:
        """The numbers with their labels, as a picture shows them."""
        raise ValueError(
            f"there is nothing to draw of a {type(self).__name__}: save it as .html, .csv, .json or .safetensors."
        )

    def __repr__(self) -> str:
        head = [self.title, *(f"  {line}" for line in self.lines())]
        lines = [*head, *self.text_body(_SCREEN - len(head)).splitlines()]
        lines = lines if len(lines) <= _SCREEN else [*lines[: _SCREEN - 1], "..."]
        return escape.terminal("\n".join(lines), lines=True)

    def html(self) -> str:
        """What it shows as HTML that loads nothing: how it was made, the numbers, and what they are evidence for."""
        return f'<div style="font-size:14px"><p><b>{escape.html(self.title)}</b></p>{self._below()}</div>'

    def _below(self) -> str:
        """What is shown below the title."""
        about = "<br>".join(map(escape.html, self.lines()))
        shows = escape.html(getattr(self, "evidence", ""))
        parts = (
            f"<p>{about}</p>" if about else "",
            f'<p class="note">{shows}</p>' if shows else "",
        )
        return self.html_body().join(parts)

    def _repr_html_(self) -> str:
        return self.html()

    def svg(self, title: str | None = None) -> str:
        """The numbers as a picture for papers and pages, with a title of your own or none ("")."""
        return picture(self.view(), title=self.title if title is None else title)

    def png(self, title: str | None = None) -> bytes:
        """The same picture as pixels, the bytes of a PNG file."""
        return png.picture(self.view(), self.title if title is None else title)

    # Files.

    def save(self, path: str | Path) -> Path:
        """Write it, and return where it is: the ending says as what.

        ``.html`` is a page, ``.svg`` and ``.png`` are pictures, ``.csv`` has the records; ``.json`` and
        ``.safetensors`` have all of it, for `ip.load_result`.
        """
        writers: dict[str, Callable[[], str | bytes]] = {
            ".html": lambda: page(self.title, self._below()),
            ".svg": self.svg,
            ".png": self.png,
            ".csv": self.to_csv,
            ".json": lambda: json.dumps(self.to_dict(), allow_nan=False),
            ".safetensors": lambda: loading.packed(self),
        }
        if (kind := Path(path).suffix) not in writers:
            raise ValueError(f"save writes {', '.join(writers)}; got {str(path)!r}.")
        return write_whole(path, writers[kind]())


def _fields(kind: type[Result]) -> tuple[Any, ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def shown(value: Any) -> str:
    """A value as a table or a sentence has it: numbers in four digits, yes and no, lists with commas."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    return ", ".join(map(shown, value)) if isinstance(value, (list, tuple)) else str(value)


def number(value: float | Tensor) -> str:
    """A number in four digits at most: ``0.1235``, ``12.35``, ``1.23e-07``."""
    value = float(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value
