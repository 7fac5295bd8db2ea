"""`interpose size`: how much room and time a harvest takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import typer

from interpose.cli.options import Shown, Wanted, give

_SAME = {"site": "resid_post", "tokens": 100_000_000, "dtype": "bfloat16", "gpus": 1}


def size(
    wanted: Wanted,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder or a name; by default common shapes."),
    ] = None,
    site: Annotated[
        str, typer.Option(metavar="SITE", help="Which kind of site, such as z.")
    ] = "resid_post",
    tokens: Annotated[
        int, typer.Option(metavar="N", help="How many tokens the texts have.")
    ] = 100_000_000,
    store_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "int8"],
        typer.Option(help="Of the vectors on the disk."),
    ] = "bfloat16",
    speed: Annotated[
        float | None, typer.Option(metavar="N", help="Tokens a second of a GPU, if measured.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(metavar="N", help="Else its TFLOP/s; 400 by default.")
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="How many GPUs.")] = 1,
    disk: Annotated[
        float | None, typer.Option(metavar="GB/S", help="What the disk writes, if it is a bound.")
    ] = None,
) -> Iterator[str]:
    """Tell how much room and time a harvest takes.

    interpose size meta-llama/Llama-3.1-8B --tokens 1000000000 --gpus 8
    """
    options = {"site": site, "tokens": tokens, "dtype": store_dtype, "speed": speed}
    options |= {"tflops": tflops, "gpus": gpus, "disk": disk}
    given = {n: one for n, one in options.items() if one is not None and _SAME.get(n) != one}
    if wanted.python:
        said = [repr(model)] if model is not None else []
        said += [f"{name}={value!r}" for name, value in given.items()]
        yield f"import interpose as ip\n\nprint(ip.harvest_sizes({', '.join(said)}))\n"
        return
    from interpose.render.html import page
    from interpose.store.sizes import harvest_sizes

    found = harvest_sizes(model, **given)  # type: ignore[arg-type]
    shown = Shown(
        text=repr(found),
        data=found.data,
        records=found.data,
        page=page(found.title, found._repr_html_()),
    )
    yield from give(shown, wanted)
