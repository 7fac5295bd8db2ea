"""`ip.harvest_sizes`: how much room and time a harvest takes, by the numbers of a config alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from interpose.errors import Unsupported
from interpose.models.loading import skeleton
from interpose.names import kinds
from interpose.render.html import html_table
from interpose.render.text import human_bytes, table
from interpose.store.records import StoredSite

TOKENS = 100_000_000
TFLOPS = 400.0
"""What a GPU does, about: 7e9 weights at 31,700 tokens a second, measured on an H200 in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of a model that a harvest's size follows from.

    Attributes:
        name: what it is called.
        n_layers: how many blocks it has.
        d_model: the width of the residual stream.
        weights: how many numbers each token is multiplied with, which are the weights but for the embeddings.
        d_heads: the width of all heads together.
        d_mlp: how many neurons an MLP has.
    """

    name: str
    n_layers: int
    d_model: int
    weights: int
    d_heads: int
    d_mlp: int | None = None

    def width(self, kind: str) -> int:
        """How many numbers a site of a kind has for each token."""
        kind = kind.removeprefix("hook_")
        if kind in ("z", "q"):
            return self.d_heads
        if kind in ("pre", "post", "pre_linear") and self.d_mlp is not None:
            return self.d_mlp
        if kind.startswith("resid_") or kind in _OF_STREAM:
            return self.d_model
        there = "a kind of site" if kind in kinds() else "no kind of site"
        raise Unsupported(
            f"{kind!r} is {there} whose width a config tells. Give one of resid_pre, resid_mid, resid_post, attn_out, "
            "mlp_out, z, q" + (", pre, post." if self.d_mlp is not None else ".")
        )


_OF_STREAM = ("attn_out", "mlp_out", "attn_in", "mlp_in", "normalized", "embed")
COMMON = (
    Shape(name="124M", n_layers=12, d_model=768, weights=85_000_000, d_heads=768, d_mlp=3072),
    Shape(name="1B", n_layers=16, d_model=2048, weights=973_000_000, d_heads=2048, d_mlp=8192),
    Shape(name="8B", n_layers=32, d_model=4096, weights=6_980_000_000, d_heads=4096, d_mlp=14336),
    Shape(name="70B", n_layers=80, d_model=8192, weights=68_450_000_000, d_heads=8192, d_mlp=28672),
    Shape(
        name="405B", n_layers=126, d_model=16384, weights=401_600_000_000, d_heads=16384, d_mlp=53248
    ),
)  # fmt: skip
"""Shapes that are common: GPT-2 small, and Llama 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestSize:
    """What harvesting one kind of site takes.

    Attributes:
        model: which model.
        layers: of how many layers the site is kept.
        width: how many numbers it has for each token.
        token_bytes: how many bytes a token takes on disk.
        nbytes: how many all tokens take.
        hours: how long it takes.
        bound: what that is bound by: ``compute`` or ``disk``.
    """

    model: str
    layers: int
    width: int
    token_bytes: int
    nbytes: int
    hours: float
    bound: str


class HarvestSizes:
    """Sizes of harvests: it prints as a table.

    Attributes:
        sizes: one for each number of layers of each model.
        title: what they are of, in words.
    """

    def __init__(self, sizes: Iterable[HarvestSize], title: str) -> None:
        self.sizes = list(sizes)
        self.title = title

    @property
    def data(self) -> list[dict[str, Any]]:
        """As plain data."""
        return [asdict(one) for one in self.sizes]

    def _rows(self) -> list[list[str]]:
        return [
            [
                one.model,
                str(one.layers),
                f"{one.width:,}",
                human_bytes(one.token_bytes),
                human_bytes(one.nbytes),
                _time(one.hours),
                one.bound,
            ]
            for one in self.sizes
        ]

    def __repr__(self) -> str:
        return table(_HEAD, self._rows(), title=self.title)

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows(), title=self.title)


_HEAD = ("model", "layers", "width", "a token", "in all", "time", "bound by")


def harvest_sizes(
    model: str | None = None,
    site: str = "resid_post",
    *,
    tokens: int = TOKENS,
    dtype: str = "bfloat16",
    speed: float | None = None,
    tflops: float = TFLOPS,
    gpus: int = 1,
    disk: float | None = None,
) -> HarvestSizes:
    """How much room and time a harvest takes: of one layer, and of all. No weights are loaded.

    ```python
    print(ip.harvest_sizes())             # of models of common shapes
    print(ip.harvest_sizes("pocket", tokens=1_000_000, speed=20_000))
    ```

    Args:
        model: a folder, a name on a hub, ``pocket``; None for some of common shapes.
        site: which kind of site.
        tokens: how many tokens the texts have.
        dtype: of what is stored.
        speed: how many tokens a second one GPU runs, if you have measured it.
        tflops: else how many million million operations a GPU does in a second; a token takes two for each weight.
        gpus: how many of them.
        disk: how many GB a second can be written; None if that is no bound.
    """
    if tokens < 1 or gpus < 1 or min(speed or 1, tflops, disk or 1) <= 0:
        raise ValueError("tokens, gpus, speed, tflops and disk are more than 0.")
    found = []
    for shape in COMMON if model is None else [shape_of(model)]:
        each = speed or tflops * 1e12 / (2 * shape.weights)
        width = shape.width(site)
        one = StoredSite(shape=(width,), dtype=_dtype(dtype), made=dtype).nbytes
        for layers in (1, shape.n_layers):
            stored = layers * one + _TOKEN
            rates = {"compute": gpus * each}
            if disk is not None:
                rates["disk"] = disk * 1e9 / stored
            bound = min(rates, key=rates.__getitem__)
            found.append(
                HarvestSize(
                    model=shape.name,
                    layers=layers,
                    width=width,
                    token_bytes=stored,
                    nbytes=stored * tokens,
                    hours=tokens / rates[bound] / 3600,
                    bound=bound,
                )
            )
    by = f"{speed:,.0f} tokens/s" if speed else f"{tflops:g} TFLOP/s"
    written = "" if disk is None else f", {disk:g} GB/s to disk"
    title = f"{tokens:,} tokens of {site}, {dtype}; {gpus} x {by}{written}"
    return HarvestSizes(found, title)


_TOKEN = 4
"""The token itself is stored, too."""


def shape_of(name: str) -> Shape:
    """The shape of a model that is saved somewhere, by its config and a copy of it without weights."""
    module = skeleton(name)
    text: Any = module.config
    text = text.get_text_config() if hasattr(text, "get_text_config") else text
    d_model, heads = text.hidden_size, getattr(text, "num_attention_heads", 0)
    tables = {
        id(one.weight)
        for one in (module.get_input_embeddings(), module.get_output_embeddings())
        if one
    }
    weights = sum(p.numel() for p in module.parameters() if id(p) not in tables)
    return Shape(
        name=name.rstrip("/").rpartition("/")[2],
        n_layers=text.num_hidden_layers,
        d_model=d_model,
        weights=weights,
        d_heads=heads * (getattr(text, "head_dim", None) or (d_model // heads if heads else 0)),
        d_mlp=_mlp(text),
    )  # fmt: skip


def _mlp(text: Any) -> int | None:
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if isinstance(found := getattr(text, name, None), int):
            return found
    return 4 * int(text.hidden_size) if hasattr(text, "n_inner") else None  # as GPT-2 has it


def _dtype(name: str) -> str:
    there = ("float32", "bfloat16", "float16", "int8")
    if name not in there:
        raise ValueError(f"dtype is one of {', '.join(there)}; got {name!r}.")
    return name


def _time(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.1f} s"
    return f"{hours * 60:.1f} min" if hours < 1 else f"{hours:,.1f} h"
