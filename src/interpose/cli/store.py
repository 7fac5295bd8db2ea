"""`interpose harvest` and `interpose store`: fill stores of activations, look at them, hand them on."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

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

if TYPE_CHECKING:
    from interpose.store.store import Store

stores = typer.Typer(
    help="Look at stores of activations, check them, export and import them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder.")]
StoreSites = Annotated[
    list[str] | None,
    typer.Option("--site", metavar="SITE,...", help="Only these sites; by default all."),
]


def harvest(
    wanted: Wanted,
    model: ModelName,
    texts: Annotated[
        str,
        typer.Argument(
            metavar="TEXTS", help="A .txt file (a text a line), a .jsonl file, or a saved data set."
        ),
    ],
    site: Annotated[
        str, typer.Option(metavar="SITE,...", help="Which sites, such as resid_post or z,post.")
    ],
    store: Annotated[str, typer.Option(metavar="FOLDER", help="The folder to fill.")],
    layer: Annotated[list[str] | None, several("layers")] = None,
    pos: Annotated[list[str] | None, several("positions of each text")] = None,
    store_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "int8"] | None,
        typer.Option(help="Of the vectors on the disk; by default as the model makes them."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="How many tokens a row has; a longer text is cut into rows.")
    ] = None,
    column: Annotated[
        str, typer.Option(metavar="FIELD", help="Which field of records is the text.")
    ] = "text",
    bos: Annotated[
        bool | None,
        typer.Option("--bos/--no-bos", help="Begin texts with BOS; by default as the model does."),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="How many tokens run together.")
    ] = None,
    segment_texts: Annotated[
        int | None, typer.Option(metavar="N", help="How many texts are committed at a time.")
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="K/N", help="Which of how many parts of the work, from 0/N on.")
    ] = "0/1",
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="This process, or a cluster.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="How many processes hold the model, with ray.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> Iterator[str]:
    """Write the values of sites at every token of texts to a store.

    interpose harvest pocket texts.txt --site resid_post --layer 3 --store activations

    Ended, it goes on when the same command is given again; done, it does nothing.
    """
    given = _given(locals(), site, layer)
    if wanted.python:
        words = ", ".join(f"{name}={value!r}" for name, value in given.items())
        yield script(model, device, dtype, f"print(ip.harvest(model, {texts!r}, {words}))\n")
        return
    from interpose.store.harvest import begin

    begun = begin(load_model(model, device, dtype), texts, given.pop("site"), **_without(given))
    if begun.left is not None:
        typer.echo(f"{store}: {begun.left}", err=True)
    filled = begun.fill(engine=engine, workers=workers, progress=is_terminal())
    yield from give(_shown(filled), wanted)


def _given(options: dict[str, Any], site: str, layer: list[str] | None) -> dict[str, Any]:
    """The arguments of the library that flags say, without those that say nothing."""
    layers = numbers("layer", layer)
    sites: Any = site.split(",")
    if layers is not None:
        sites = [(one, number) for one in sites for number in layers]
    found = {
        "site": sites[0] if len(sites) == 1 else sites,
        "store": options["store"],
        "pos": numbers("pos", options["pos"]),
        "dtype": options["store_dtype"],
        "prepend_bos": options["bos"],
        "part": _part(options["part"]),
    }
    for name in ("length", "column", "batch_tokens", "segment_texts", "engine", "workers"):
        found[name] = options[name]
    same = {"column": "text", "part": (0, 1), "engine": "local"}
    return {name: one for name, one in found.items() if one is not None and same.get(name) != one}


def _without(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "workers"}


def _part(said: str) -> tuple[int, int]:
    number, _, count = said.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise ValueError(f"--part is a number and how many there are, such as 0/4; got {said!r}.")
    return int(number), int(count)


@stores.command("ls")
@told
def store_ls(
    wanted: Wanted,
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Where to look, however deep; by default here.")
    ] = ".",
) -> Iterator[str]:
    """List the stores in a folder."""
    if wanted.python:
        yield f"import interpose as ip\n\nprint(ip.list_stores({folder!r}))\n"
        return
    from interpose.render.html import page
    from interpose.store.listing import list_stores

    found = list_stores(folder)
    shown = Shown(
        text=repr(found),
        data=list(found.stores),
        records=found.stores,
        page=page(f"Stores in {folder}", found._repr_html_()),
    )
    yield from give(shown, wanted)


@stores.command("info")
@told
def store_info(wanted: Wanted, store: StorePath) -> Iterator[str]:
    """Show what a store holds, and what it was made of."""
    if wanted.python:
        yield f"import interpose as ip\n\nprint(ip.open_store({store!r}).info())\n"
        return
    from interpose.store.store import open_store

    yield from give(_shown(open_store(store), info=True), wanted)


@stores.command("verify")
@told
def store_verify(
    wanted: Wanted,
    store: StorePath,
    drop_damaged: Annotated[
        bool,
        typer.Option("--drop-damaged", help="Take back damaged segments, to be harvested anew."),
    ] = False,
) -> Generator[str, None, bool]:
    """Compare every file with what was committed.

    The exit status is 1 if one differs.
    """
    if wanted.python:
        last = "store.drop_damaged()" if drop_damaged else "store.verify()"
        yield f"import interpose as ip\n\nstore = ip.open_store({store!r})\n{last}\n"
        return True
    from interpose.render.html import html_table, page
    from interpose.store.store import open_store

    opened = open_store(store)
    found = opened.damaged()
    gone = opened.drop_damaged() if drop_damaged and found else []
    count = sum(len(segment.commit.files) for segment in opened.segments)
    title = f"{count:,} files of {store!r} are as they were committed."
    if found:
        title = f"{len(found)} files of {store!r} are damaged."
    if gone:
        title += f" Segments {', '.join(map(str, gone))} are taken back: harvest again."
    records = [{"file": file, "damage": said} for file, said in found.items()] or [
        {"file": store, "damage": ""}
    ]
    rows = [(file, said) for file, said in found.items()]
    shown = Shown(
        text="\n  ".join([title, *found.values()]) if found else title,
        data={"files": count, "damaged": found, "dropped": gone},
        records=records,
        page=page(title, html_table(("file", "damage"), rows, title=title)),
    )
    yield from give(shown, wanted)
    return not found


@stores.command("export")
@told
def store_export(
    wanted: Wanted,
    store: StorePath,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder.")],
    format: Annotated[  # noqa: A002 - the library's word
        Literal["npy", "parquet", "dataset"],
        typer.Option(help="Arrays of numpy, tables without values, or a data set."),
    ],
    site: StoreSites = None,
) -> Iterator[str]:
    """Write a store for other programs, to a new folder."""
    sites = None if site is None else [one for part in site for one in part.split(",")]
    if wanted.python:
        only = "" if sites is None else f", site={sites!r}"
        opened = f"ip.open_store({store!r})"
        yield f"import interpose as ip\n\nprint({opened}.export({folder!r}, format={format!r}{only}))\n"
        return
    from interpose.store.store import open_store

    made = open_store(store).export(folder, format=format, site=sites)
    files = [{"file": one.name, "bytes": one.stat().st_size} for one in sorted(made.iterdir())]
    yield from give(_listed(str(made), files), wanted)


@stores.command("import")
@told
def store_import(
    wanted: Wanted,
    path: Annotated[
        str, typer.Argument(metavar="CACHED", help="A run of mi-crow, or a data set of SAELens.")
    ],
    store: Annotated[str, typer.Option(metavar="FOLDER", help="The folder to fill.")],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that made them.")
    ] = None,
    texts: Annotated[
        str | None, typer.Option(metavar="TEXTS", help="The texts that were run, as for harvest.")
    ] = None,
    keep_padding: Annotated[
        bool, typer.Option("--keep-padding", help="Keep values that may be padding.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> Iterator[str]:
    """Make a store of what another tool has cached."""
    if wanted.python:
        given = {"store": store, "texts": texts, "keep_padding": keep_padding or None}
        words = ", ".join(f"{name}={one!r}" for name, one in given.items() if one is not None)
        call = f"print(ip.import_activations({path!r}, {words}"
        if model is None:
            yield f"import interpose as ip\n\n{call}))\n"
        else:
            yield script(model, device, dtype, f"{call}, model=model))\n")
        return
    from interpose.store.foreign.importing import import_activations

    loaded = None if model is None else load_model(model, device, dtype)
    made = import_activations(
        path, store=store, model=loaded, texts=texts, keep_padding=keep_padding, progress=is_terminal()
    )  # fmt: skip
    yield from give(_shown(made), wanted)


def _listed(title: str, records: list[dict[str, Any]]) -> Shown:
    from interpose.render.html import html_table, page

    rows = [[str(one) for one in record.values()] for record in records]
    shown = html_table(list(records[0]), rows, title=title)
    return Shown(text=title, data=records, records=records, page=page(title, shown))


def _shown(store: Store, *, info: bool = False) -> Shown:
    from interpose.render.html import page

    said = store.info()
    records = [
        {"site": name, "vectors": store.vectors, "shape": "x".join(map(str, site.shape)), "dtype": site.dtype}
        for name, site in store.sites.items()
    ]  # fmt: skip
    return Shown(
        text=repr(said) if info else repr(store),
        data=said.data,
        records=records,
        page=page(f"The store {store.path.name}", store._repr_html_()),
    )
