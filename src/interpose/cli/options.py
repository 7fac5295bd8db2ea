"""What commands have in common: their options, what becomes of a result, and how mistakes are told."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from interpose.errors import InterposeError
from interpose.files.writing import write_whole
from interpose.render.frame import csv_text

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

FILE = "FILE"
_KINDS = ("json", "csv", "html")
_HELD, _FAILED, _MISTAKEN, _INTERRUPTED = 0, 1, 2, 130

Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="Such as cuda:0; by default the accelerator, if any."),
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="Such as bfloat16; by default as it was saved.")
]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a name on a hub, or pocket.")
]


def several(what: str) -> Any:
    """An option for numbers: ``--layer 0,3,6`` or ``--layer 0 --layer 3``."""
    return typer.Option(metavar="N,N,...", help=f"Only these {what}; -1 is the last.")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to become of a result: where each kind of file goes, or the script that makes it."""

    json: str | None
    csv: str | None
    html: str | None
    python: bool

    def __post_init__(self) -> None:
        """Refuse at once what could not be written at the end."""
        for kind, path in self.files():
            folder = Path(path).resolve().parent
            if path != "-" and (Path(path).suffix != f".{kind}" or not folder.is_dir()):
                raise ValueError(
                    f"--{kind} cannot write to {path!r}: give a name that ends in .{kind}, in a folder that is there, "
                    "or - to print it."
                )
        if sum(path == "-" for _, path in self.files()) > 1:
            raise ValueError("only one of --json, --csv and --html can be printed with -.")

    def files(self) -> Iterator[tuple[str, str]]:
        """The kinds of files that are asked for, and where they go."""
        for kind in _KINDS:
            if (path := getattr(self, kind)) is not None:
                yield kind, path


class Saved(Protocol):
    """A result: it prints itself, and its file's ending says as what it is saved."""

    def save(self, path: str | Path, /) -> Path:
        """Write it, and return where it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Shown:
    """What a command found that is not a result of the library's: as text, data, records and a page."""

    text: str
    data: Any
    records: Iterable[Mapping[str, Any]]
    page: str

    def __repr__(self) -> str:
        return self.text

    def save(self, path: str | Path) -> Path:
        """Write it, and return where it is."""
        writers: dict[str, Callable[[], str]] = {
            ".json": lambda: dumps(self.data, indent=1),
            ".csv": lambda: csv_text(self.records),
            ".html": lambda: self.page,
        }
        return write_whole(path, writers[Path(path).suffix]())


def give(result: Saved, wanted: Wanted) -> Iterator[str]:
    """What to print of a result; what is printed as a file is printed alone."""
    printed = next((kind for kind, path in wanted.files() if path == "-"), None)
    if printed is None:
        yield repr(result)
    for kind, path in wanted.files():
        if kind == printed:
            with tempfile.TemporaryDirectory() as folder:
                text = result.save(Path(folder) / f"result.{kind}").read_text("utf-8")
            yield text.rstrip("\n")
        else:
            where = result.save(path).resolve()
            if printed is None:
                yield f"{_NAMES[kind]}: {where}"


_NAMES = {"json": "the numbers", "csv": "the table", "html": "the page"}


def _common(
    json: Annotated[
        str | None, typer.Option(metavar=FILE, help="Write all of it as JSON; - prints that alone.")
    ] = None,
    csv: Annotated[
        str | None, typer.Option(metavar=FILE, help="Write a table as CSV; - prints that alone.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar=FILE, help="Write a page; - prints that alone.")
    ] = None,
    python: Annotated[
        bool, typer.Option("--python", help="Print a Python script that does the same, and stop.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="After a mistake, show where in the code it was found.")
    ] = False,
) -> None:
    """The options that commands share: they are written here and nowhere else."""


COMMON = tuple(inspect.signature(_common, eval_str=True).parameters.values())


def told(command: Callable[..., Iterator[str]]) -> Callable[..., None]:
    """A command that prints what it yields, has the common options, and speaks of its mistakes as of flags.

    What it returns at the end, if anything, is whether what it checked held. Its first parameter is what is `Wanted`.
    """
    own = inspect.signature(command, eval_str=True)
    _, *mine = own.parameters.values()
    name = command.__name__.replace("_", " ")

    @functools.wraps(command)
    def run(**given: Any) -> None:
        common = {option.name: given.pop(option.name) for option in COMMON}
        debug = common.pop("debug")
        try:
            held = _printed(command(Wanted(**common), **given))
        except KeyboardInterrupt as ended:
            said = " ".join(["ended.", *getattr(ended, "__notes__", ())])
            typer.echo(f"interpose {name}: {_as_command(said)}", err=True)
            raise typer.Exit(_INTERRUPTED) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            typer.echo(f"interpose {name}: {_message(error, own)}", err=True)
            raise typer.Exit(_MISTAKEN) from None
        raise typer.Exit(_HELD if held in (None, True) else _FAILED)

    parameters = [*mine, *COMMON]
    run.__signature__ = own.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _printed(parts: Iterator[str]) -> Any:
    while True:
        try:
            typer.echo(next(parts))
        except StopIteration as end:
            return end.value


def _message(error: Exception, command: inspect.Signature) -> str:
    """A mistake in the words of the command line: ``align='end'`` is ``--align end``."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if not isinstance(error, _FORESEEN):
        text = f"{type(error).__name__}: {text}. This was not foreseen; --debug shows where it happened."
    there = {*command.parameters, *(option.name for option in COMMON)}

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("'\"[]").replace(", ", ",")
        return f"--{name} {value or '...'}" if name in there else match[0]

    text = re.sub(r"\b([a-z_]+)=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\.{3}|[\w.-]*\w)", flag, text)
    return _as_command(text).replace("model.sites", "interpose sites MODEL")


def _as_command(text: str) -> str:
    """What is said of a call of the library, said of the command."""
    for said, command in _COMMANDS.items():
        text = text.replace(said, command)
    return text


_COMMANDS = {
    "same ip.harvest(...)": "same command",
    "store.drop_damaged()": "interpose store verify FOLDER --drop-damaged",
    "ip.harvest(..., --store ...)": "interpose harvest MODEL TEXTS --store FOLDER",
    "ip.harvest(..., store=...)": "interpose harvest MODEL TEXTS --store FOLDER",
}


_FORESEEN = (
    InterposeError,
    OSError,
    ValueError,
    LookupError,
    AttributeError,
    ModuleNotFoundError,
    TypeError,
)


def numbers(flag: str, given: list[str] | None) -> list[int] | None:
    """The numbers of an option that takes several."""
    if not given:
        return None
    try:
        return [int(part) for text in given for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{flag} takes numbers, such as --{flag} 0,3,6; got {','.join(given)!r}."
        ) from None


def is_terminal() -> bool:
    """Whether somebody is watching, so that progress is shown."""
    return sys.stderr.isatty()


def load_model(model: str, device: str | None, dtype: str | None) -> TransformerModel:
    """The model, where and in what it is asked for."""
    import torch

    import interpose as ip

    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise ValueError(f"no dtype {dtype!r}; try float32, bfloat16 or float16.")
    return ip.load(model, device=device, dtype=kind)


def script(model: str, device: str | None, dtype: str | None, last: str) -> str:
    """A script that loads a model and does one thing."""
    options = "" if device is None else f", device={device!r}"
    options += "" if dtype is None else f", dtype=torch.{dtype}"
    torch = "" if dtype is None else "import torch\n"
    return f"{torch}import interpose as ip\n\nmodel = ip.load({model!r}{options})\n{last}"
