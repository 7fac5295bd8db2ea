"""What the channels of a convolution see in one picture: a grid of small images per site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.model import Model
from interpose.errors import SiteNotFound
from interpose.models.loading import as_model
from interpose.render import colours, escape, png
from interpose.render.html import image
from interpose.render.labelled import Labelled
from interpose.results.result import Result
from interpose.sites.tree import Filter

_CONSTANT = (160, 160, 160)
_GAP = (255, 255, 255)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """The maps of one site: ``values`` is [channel, height, width], ``channels`` their numbers."""

    site: str
    channels: tuple[int, ...]
    values: Tensor
    columns: int

    def pixels(self, *, zoom: int = 1) -> Tensor:
        """RGB bytes [height, width, 3]: each channel over its own range, one-pixel gaps.

        Args:
            zoom: how many pixels high and wide each element is.
        """
        maps = self.values.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
        count, height, width = maps.shape
        columns = min(self.columns, count)
        lines = -(-count // columns)
        canvas = torch.tensor(_GAP, dtype=torch.uint8).repeat(
            lines * (height + 1) - 1, columns * (width + 1) - 1, 1
        )
        palette = torch.tensor(colours.table(colours.sequential), dtype=torch.uint8)
        for place, values in enumerate(maps):
            top, left = place // columns * (height + 1), place % columns * (width + 1)
            low, high = values.min(), values.max()
            if bool(torch.isfinite(high - low)) and bool(high > low):
                tile = palette[((values - low) / (high - low) * 255).round().long()]
            else:
                tile = torch.tensor(_CONSTANT, dtype=torch.uint8)
            canvas[top : top + height, left : left + width] = tile
        return canvas


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class FeatureMaps(Result):
    """Feature maps by site: pictures in a notebook, and as PNG or HTML on disk."""

    grids: tuple[Grid, ...]

    def __getitem__(self, site: str) -> Grid:
        for grid in self.grids:
            if grid.site == site:
                return grid
        there = ", ".join(repr(grid.site) for grid in self.grids)
        raise SiteNotFound(f"no feature maps of {site!r}. There are: {there}.")

    @property
    def title(self) -> str:
        """How many sites there are."""
        return f"Feature maps of {len(self.grids)} sites"

    def records(self) -> Iterator[dict[str, Any]]:
        """Every channel as a dictionary: its value is its mean."""
        for grid in self.grids:
            for channel, values in zip(grid.channels, grid.values):
                ends = {"minimum": float(values.min()), "maximum": float(values.max())}
                yield {"site": grid.site, "channel": channel, "value": float(values.mean()), **ends}

    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return ("site", "channels", "height", "width")

    def cells(self) -> list[tuple[str, ...]]:
        """One row per site."""
        return [(grid.site, *map(str, grid.values.shape)) for grid in self.grids]

    def png(
        self,
        title: str | None = None,  # noqa: ARG002 (as all results take it)
        *,
        site: str | None = None,
        zoom: int = 1,
    ) -> bytes:
        """The grid of one site, or all one above the other, as the bytes of a PNG file.

        Args:
            title: nothing is written on it.
            site: which; None for all.
            zoom: how many pixels high and wide each element is.
        """
        chosen = self.grids if site is None else (self[site],)
        return png.encode(_stacked([grid.pixels(zoom=zoom) for grid in chosen]).numpy())

    def view(self) -> Labelled:
        """Nothing: feature maps are pixels."""
        raise ValueError("feature maps are pixels: save them as .png or .html.")

    def html_body(self) -> str:
        """All grids as pictures in the page, small maps enlarged."""
        parts = []
        for grid in self.grids:
            count, height, width = grid.values.shape
            zoom = max(1, 48 // width)
            columns = min(grid.columns, count)
            picture = image(
                self.png(site=grid.site, zoom=zoom),
                width=columns * (width * zoom + 1) - 1,
                alt=f"feature maps of {grid.site}",
            )
            channels = "1 channel" if count == 1 else f"{count} channels"
            caption = f"<b>{escape.html(grid.site)}</b>: {channels} of {height} x {width}"
            parts.append(f"<div><p>{caption}</p>{picture}</div>")
        return "".join(parts)


def feature_maps(
    model: Model | nn.Module,
    inputs: Any,
    site: Filter,
    *,
    example: int = 0,
    channels: Sequence[int] | None = None,
    columns: int = 8,
) -> FeatureMaps:
    """Pictures of what each channel of a convolutional layer makes of one example.

    Example:
        ``ip.feature_maps(model, images, ["conv1", "conv2"]).save("maps.png")``

    Args:
        model: the model, run once without gradients in the mode (train or eval) it is in.
        inputs: what it takes: a tensor, a tuple of arguments, or a dictionary of keywords.
        site: where; the values must be [batch, channel, height, width].
        example: which element of the batch to show.
        channels: which channels; None for all.
        columns: how many maps stand side by side.
    """
    if columns < 1:
        raise ValueError(f"columns is how many maps stand side by side, at least 1; got {columns}.")
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}

    def cut(value: Tensor) -> Tensor:
        if value.ndim != 4:
            return value
        _must_be_there("example", [example], value.shape[0])
        _must_be_there("channel", channels or (), value.shape[1])
        return value[[example]]

    with torch.no_grad():
        _, cache = as_model(model).run_with_cache(*args, names_filter=site, keep=cut, **kwargs)
    flat = {name: tuple(value.shape) for name, value in cache.items() if value.ndim != 4}
    if flat:
        raise ValueError(_not_maps(flat, [name for name in cache if name not in flat]))
    grids = []
    for name, value in cache.items():
        wanted = tuple(range(value.shape[1])) if channels is None else tuple(channels)
        maps = value[0, list(wanted)].to("cpu", torch.float32)
        grids.append(Grid(site=name, channels=wanted, values=maps, columns=columns))
    return FeatureMaps(tuple(grids))


def _must_be_there(word: str, asked: Sequence[int], count: int) -> None:
    for one in asked:
        if not -count <= one < count:
            raise IndexError(f"{word} {one} is not there: there are {word}s 0 to {count - 1}.")


def _not_maps(flat: Mapping[str, tuple[int, ...]], maps: Sequence[str]) -> str:
    site, shape = next(iter(flat.items()))
    hint = "name a convolution, a pooling or an activation after one   (list them: model.sites)"
    if maps:
        hint = f"of the sites asked for, these have maps: {', '.join(map(repr, maps))}"
    need = "feature maps need values of shape [batch, channel, height, width]"
    return f"{need}; {site!r} is {shape}.\n  {hint}"


def _stacked(pictures: Sequence[Tensor]) -> Tensor:
    """Pictures one above the other, filled up with white on the right, four lines apart."""
    width = max(picture.shape[1] for picture in pictures)
    lines: list[Tensor] = []
    for picture in pictures:
        if lines:
            lines.append(torch.full((4, width, 3), 255, dtype=torch.uint8))
        wide = torch.full((picture.shape[0], width, 3), 255, dtype=torch.uint8)
        wide[:, : picture.shape[1]] = picture
        lines.append(wide)
    return torch.cat(lines)
