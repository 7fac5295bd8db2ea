"""`interpose sae`: train autoencoders on stores, and measure what they keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interpose.cli.options import (
    Device,
    Dtype,
    Wanted,
    give,
    is_terminal,
    load_model,
    numbers,
    several,
    told,
)

if TYPE_CHECKING:
    from interpose.sae.sae import SAE
    from interpose.store.store import Store

saes = typer.Typer(
    help="Train, measure and look into sparse autoencoders.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder.")]
SAEPath = Annotated[str, typer.Argument(metavar="SAE", help="The autoencoder's folder, or pocket.")]
Site = Annotated[
    str | None, typer.Option(metavar="SITE", help="Which site; by default the only one there is.")
]
Out = Annotated[str | None, typer.Option(metavar="SITE", help="Which site a transcoder writes.")]
First = Annotated[
    bool,
    typer.Option("--without-first", help="Leave out the first position of each row."),
]
_SAME = {"seed": 0, "dtype": "float32", "steps": 10_000}


@saes.command("train")
@told
def sae_train(
    wanted: Wanted,
    store: StorePath,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where the autoencoder goes.")],
    latents: Annotated[int, typer.Option(metavar="N", help="How many latents it has.")],
    k: Annotated[
        float | None, typer.Option(metavar="K", help="How many fire; of the kinds with topk.")
    ] = None,
    architecture: Annotated[
        Literal[
            "topk", "batchtopk", "matryoshka_batchtopk", "abstopk", "standard", "jumprelu", "gated"
        ],
        typer.Option(help="Which kind."),
    ] = "topk",
    widths: Annotated[
        list[str] | None, several("first latents that decode by themselves, of Matryoshka")
    ] = None,
    site: Site = None,
    site_out: Out = None,
    steps: Annotated[int, typer.Option(metavar="N", help="From how many batches.")] = 10_000,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Vectors in a batch; 4096 by default.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(metavar="X", help="Of Adam.")] = None,
    sparsity: Annotated[
        float | None, typer.Option(metavar="X", help="What firing costs, where k does not say it.")
    ] = None,
    l0: Annotated[
        float | None, typer.Option("--l0", metavar="N", help="How many should fire, instead.")
    ] = None,
    without_first: First = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order.")] = 0,
    step_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="What steps are computed in.")
    ] = "float32",
    device: Device = None,
) -> Iterator[str]:
    """Train an autoencoder on the vectors of a store.

    interpose sae train activations sae --latents 1024 --k 16 --without-first

    Ended, it goes on when the same command is given again; done, it does nothing.
    """
    yield from _trained(wanted, **{name: one for name, one in locals().items() if name != "wanted"})


def _trained(
    wanted: Wanted,
    *,
    store: str,
    folder: str,
    latents: int,
    k: float | None,
    architecture: str,
    widths: list[str] | None,
    site: str | None,
    site_out: str | None,
    without_first: bool,
    step_dtype: str,
    device: str | None,
    **given: Any,
) -> Iterator[str]:
    """What `sae_train` prints."""
    from interpose.store.store import open_store

    if ("topk" in architecture) != (k is not None):
        raise ValueError("--k says how many latents fire, of the kinds with topk and of no others.")
    opened = open_store(store)
    options: dict[str, Any] = {
        "k": int(k) if k is not None and architecture in ("topk", "abstopk") else k,
        "widths": numbers("widths", widths),
        "d_out": None if site_out is None else _width(opened, site_out),
    }
    options = {name: one for name, one in options.items() if one is not None}
    sizes = [_width(opened, site), latents]
    recipe = {name: given.pop(name) for name in ("learning_rate", "sparsity", "l0")}
    recipe = {name: one for name, one in recipe.items() if one is not None}
    words: dict[str, Any] = {"out": site_out, **given, "dtype": step_dtype, "device": device}
    words = {name: one for name, one in words.items() if one not in (None, _SAME.get(name))}
    words["folder"] = folder
    kind = _kind(architecture)
    if wanted.python:
        made = [*sizes, *options.items()]
        yield _script(store, kind.__name__, made, site, words, recipe, without_first)
        return
    import torch

    import interpose as ip

    if "dtype" in words:
        words["dtype"] = getattr(torch, step_dtype)
    found = ip.train_sae(
        opened,
        kind(*sizes, **options),
        site,
        recipe=ip.SAERecipe(**recipe),
        pos=slice(1, None) if without_first else None,
        progress=is_terminal(),
        **words,
    )
    yield from give(found, wanted)


def _kind(architecture: str) -> type[SAE]:
    from interpose.sae.files.weights import KINDS

    return KINDS[architecture]


def _width(store: Store, site: str | None) -> int:
    if site is None and len(store.sites) != 1:
        raise ValueError(f"site=... is needed: this store has {', '.join(store.sites)}.")
    size = 1
    for one in store.sites[store.site(site) if site else next(iter(store.sites))].shape:
        size *= one
    return size


def _script(
    store: str,
    kind: str,
    given: list[Any],
    site: str | None,
    words: dict[str, Any],
    recipe: dict[str, Any],
    without_first: bool,
) -> str:
    """The same as a script."""
    made = ", ".join(
        f"{one[0]}={one[1]!r}" if isinstance(one, tuple) else repr(one) for one in given
    )
    parts = ["store", f"ip.{kind}({made})"] + ([repr(site)] if site else [])
    parts += [
        f"{name}=torch.{one}" if name == "dtype" else f"{name}={one!r}"
        for name, one in words.items()
    ]
    parts += ["pos=slice(1, None)"] if without_first else []
    if recipe:
        parts.append(
            f"recipe=ip.SAERecipe({', '.join(f'{n}={one!r}' for n, one in recipe.items())})"
        )
    torch = "import torch\n" if "dtype" in words else ""
    return (
        f"{torch}import interpose as ip\n\nstore = ip.open_store({store!r})\n"
        f"found = ip.train_sae({', '.join(parts)})\nprint(found)"
    )


@saes.command("eval")
@told
def sae_eval(
    wanted: Wanted,
    sae: SAEPath,
    store: StorePath,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also how much worse this model gets: its losses."),
    ] = None,
    site: Site = None,
    site_out: Out = None,
    without_first: First = False,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Rows that run together; without a model, vectors."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> Iterator[str]:
    """Measure what an autoencoder keeps of the vectors of a store, and of what a model does with them.

    interpose sae eval pocket activations --model pocket
    """
    words: dict[str, Any] = {"out": site_out, "batch_size": batch_size}
    words = {name: one for name, one in words.items() if one is not None}
    if wanted.python:
        parts = ["store", "sae"] + ([repr(site)] if site else [])
        parts += [f"{name}={one!r}" for name, one in words.items()]
        parts += ["pos=slice(1, None)"] if without_first else []
        parts += ["model=model"] if model else []
        loads = ""
        if model:
            from interpose.cli.options import script

            loads = script(model, device, dtype, "").partition("\n\n")[2].strip() + "\n"
        head = "import torch\nimport" if model and dtype else "import"
        yield (
            f"{head} interpose as ip\n\nstore = ip.open_store({store!r})\n"
            f"sae = ip.SAE.from_pretrained({sae!r})\n{loads}print(ip.evaluate_sae({', '.join(parts)}))"
        )
        return
    import interpose as ip

    loaded = None if model is None else load_model(model, device, dtype)
    found = ip.evaluate_sae(
        ip.open_store(store),
        ip.SAE.from_pretrained(sae, device=device if loaded is None else loaded.device),
        site,
        model=loaded,
        pos=slice(1, None) if without_first else None,
        progress=is_terminal(),
        **words,
    )
    yield from give(found, wanted)


@saes.command("features")
@told
def sae_features(
    wanted: Wanted,
    sae: SAEPath,
    store: StorePath,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The model that the store is of: a name or folder.")
    ],
    neuron: Annotated[list[str] | None, several("latents; by default all")] = None,
    pages: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write an index, and a page for each latent."),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What latents are called, CSV or JSON, for the pages."),
    ] = None,
    site: Site = None,
    without_first: First = False,
    device: Device = None,
    dtype: Dtype = None,
) -> Iterator[str]:
    """Find what the latents of an autoencoder respond to in a store, and which logits they raise.

    interpose sae features pocket activations --model pocket --pages pages
    """
    chosen = numbers("neuron", neuron)
    words: dict[str, Any] = {"site": site, "neuron": chosen, "skip_first": without_first or None}
    words = {name: one for name, one in words.items() if one is not None}
    if wanted.python:
        from interpose.cli.options import script

        said = "".join(f", {name}={one!r}" for name, one in words.items())
        call = (
            f"sae = ip.SAE.from_pretrained({sae!r})\nstore = ip.open_store({store!r})\n"
            f"found = ip.features(model, store, sae=sae{said})\nprint(found)"
        )
        if pages:
            given = f", concepts=ip.Concepts.read({names!r})" if names else ""
            call += f"\nfound.save_pages({pages!r}{given})"
        yield script(model, device, dtype, call)
        return
    import interpose as ip

    opened = ip.open_store(store)
    loaded = load_model(model, device, dtype)
    found = ip.features(
        loaded,
        opened,
        sae=ip.SAE.from_pretrained(sae, device=loaded.device),
        progress=is_terminal(),
        **words,
    )
    if pages:
        concepts = None if names is None else ip.Concepts.read(names)
        index = found.save_pages(pages, concepts=concepts)
        yield f"the pages: {index.resolve()}"
    yield from give(found, wanted)
