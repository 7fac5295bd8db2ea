"""`SteeringVector`: a direction for each layer, with how it was made, and the edits that steer with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

import interpose as ip
from interpose.errors import EditShapeError, Unsupported
from interpose.results.result import number, shown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SteeringVector(ip.Result):
    """Directions at one kind of site, one for each of some layers. Nothing in it is tied to a model's object.

    ```python
    honest = ip.steering_vector(model, positive, negative)
    with model.hooks([honest.add(2.0, layer=4, phase="generated")]):
        model.generate(text)
    honest.save("honest.safetensors")       # ip.SteeringVector.load; honest.save("honest.gguf") for llama.cpp
    ```

    What its methods return are ordinary edits: they are saved, combined and written as Python as any others.

    Attributes:
        site: the kind of site, such as ``resid_post``.
        layers: which layers there are.
        directions: [layer, unit].
        head: of a site with heads, which; None for others.
        by: how it was made: ``means``, ``pca``, ``pca_diff``, ``probe``, or ``given``.
        model_type: of what kind of model it is, in transformers' words: ``gpt2``. Empty if that is not known.
        norms: how long the values were that it was made of, on average, [layer]; NaN where that is not known.
        separation: how far the two kinds of examples are apart along each direction, in their standard deviations,
            [layer]; NaN where there were none.
        protocol: how it was made.
    """

    site: str
    layers: list[int]
    directions: Tensor
    head: int | None = None
    by: str = "given"
    model_type: str = ""
    norms: Tensor = field(default_factory=lambda: torch.empty(0))
    separation: Tensor = field(default_factory=lambda: torch.empty(0))
    protocol: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.layers)
        if self.directions.ndim != 2 or len(self.directions) != count or not count:
            raise EditShapeError(
                f"directions are [layer, unit], of {count} layers; got {tuple(self.directions.shape)}."
            )
        if len(set(self.layers)) != count or min(self.layers) < 0:
            raise ValueError(f"layers are counted from 0, each once; got {self.layers}.")
        for name in ("norms", "separation"):
            given = getattr(self, name)
            if given.numel() == 0:
                object.__setattr__(self, name, torch.full((count,), torch.nan))
            elif tuple(given.shape) != (count,):
                raise ValueError(f"{name} are [layer], {count} of them; got {tuple(given.shape)}.")

    # What there is.

    def __getitem__(self, layer: int) -> Tensor:
        return self.directions[self._place(layer)]

    def _place(self, layer: int) -> int:
        if layer not in self.layers:
            raise KeyError(f"no direction of layer {layer!r}; there are those of {self.layers}.")
        return self.layers.index(layer)

    @property
    def title(self) -> str:
        """What it is, and where."""
        head = "" if self.head is None else f", head {self.head}"
        return f"Steering vector at {self.site}, {len(self.layers)} layers{head}, by {self.by}"

    def lines(self) -> list[str]:
        """How it was made."""
        of = f"of a {self.model_type} model, " if self.model_type else ""
        said = [f"{name.replace('_', ' ')} {shown(value)}" for name, value in self.protocol.items()]
        return [f"{of}{self.directions.shape[1]} units", *(["; ".join(said)] if said else [])]

    def records(self) -> Iterator[dict[str, Any]]:
        """Each layer as a dictionary: the direction's length, that of values, how far it sets examples apart."""
        columns = (self.directions.float().norm(dim=-1), self.norms, self.separation)
        for layer, *rest in zip(self.layers, *(column.tolist() for column in columns)):
            yield {"layer": layer, **dict(zip(("value", "norm_of_values", "separation"), rest))}

    def names(self) -> list[str]:
        """The names of the columns of its table."""
        return ["layer", "length", "length of values", "separation"]

    def cells(self) -> list[list[str]]:
        """The rows of its table, as they are printed."""
        return [
            [str(one["layer"]), *("-" if x != x else number(x) for x in list(one.values())[1:])]
            for one in self.records()
        ]

    # Others made of it.

    @classmethod
    def of(
        cls, direction: Any, *, site: str = "resid_post", layer: int | None = None, **about: Any
    ) -> Self:
        """One of directions that are known: ``ip.SteeringVector.of(probe.direction, layer=4)``.

        Args:
            direction: [units], or by layer: ``{3: direction, 4: other}``.
            site: the kind of site.
            layer: of a single direction.
            **about: other attributes.
        """
        by_layer: dict[Any, Any] = (
            dict(direction) if isinstance(direction, Mapping) else {layer: direction}
        )
        if any(not isinstance(number, int) for number in by_layer):
            raise ValueError(
                "say of which layer the direction is: layer=..., or {layer: direction}."
            )
        rows = [torch.as_tensor(one).detach().cpu() for one in by_layer.values()]
        if any(row.ndim != 1 or len(row) != len(rows[0]) for row in rows):
            raise EditShapeError(
                f"a direction is [units], in all layers as many; got {[tuple(row.shape) for row in rows]}."
            )
        return cls(site=site, layers=list(by_layer), directions=torch.stack(rows), **about)

    @classmethod
    def of_latent(cls, sae: Any, latent: int, *, layer: int, site: str = "resid_post") -> Self:
        """The decoder row of a latent: what an autoencoder adds when that latent fires with a strength of one.

        Args:
            sae: an `ip.SAE`.
            latent: which latent.
            layer: of the site that the autoencoder writes to.
            site: the kind of that site.
        """
        if not 0 <= latent < sae.d_sae:
            raise IndexError(f"{sae!r} has latents 0 to {sae.d_sae - 1}; got {latent}.")
        said = {"latent": latent, "autoencoder": repr(sae)}
        return cls.of(sae.rows[latent], site=site, layer=layer, by="decoder row", protocol=said)

    def only(self, *layer: int) -> Self:
        """The same for some of its layers."""
        places = [self._place(one) for one in layer]
        parts = {
            name: getattr(self, name)[places] for name in ("directions", "norms", "separation")
        }
        return replace(self, layers=list(layer), **parts)

    def unit(self) -> Self:
        """The same with directions of length one."""
        sizes = self.directions.norm(dim=-1, keepdim=True)
        if not bool((sizes > 0).all()):
            raise ValueError("a direction of length 0 points nowhere.")
        return self._with(self.directions / sizes, "made of length one")

    def without(self, other: SteeringVector) -> Self:
        """What of it is at right angles to another, layer by layer."""
        self._must_match(other)
        along = other.unit().directions.to(self.directions)
        dots = (self.directions * along).sum(-1, keepdim=True)
        return self._with(self.directions - dots * along, "without what is along another")

    def _with(self, directions: Tensor, how: str) -> Self:
        was = self.protocol.get("then")
        protocol = {**self.protocol, "then": how if was is None else f"{was}, {how}"}
        return replace(self, directions=directions, separation=torch.empty(0), protocol=protocol)

    def _must_match(self, other: SteeringVector) -> None:
        mine = (self.site, self.layers, self.head, self.directions.shape[1])
        theirs = (other.site, other.layers, other.head, other.directions.shape[1])
        if mine != theirs:
            raise ValueError(
                f"these are of different places: {_place(*mine)}, and {_place(*theirs)}. Take those that both have: "
                ".only(layer, ...)."
            )
        if self.model_type and other.model_type and self.model_type != other.model_type:
            raise ValueError(
                f"these are of different models: {self.model_type!r} and {other.model_type!r}."
            )

    def __add__(self, other: SteeringVector) -> Self:
        if not isinstance(other, SteeringVector):
            return NotImplemented
        self._must_match(other)
        return self._with(self.directions + other.directions.to(self.directions), "another added")

    def __sub__(self, other: SteeringVector) -> Self:
        return self + -other if isinstance(other, SteeringVector) else NotImplemented

    def __mul__(self, by: float) -> Self:
        if not isinstance(by, (int, float)):
            return NotImplemented
        return self._with(self.directions * by, f"times {number(by)}")

    __rmul__ = __mul__

    def __truediv__(self, by: float) -> Self:
        return self * (1 / by) if isinstance(by, (int, float)) else NotImplemented

    def __neg__(self) -> Self:
        return self * -1.0

    # Edits.

    def add(self, strength: Any = 1.0, *, layer: Any = None, **where: Any) -> ip.add:
        """The edit that adds it.

        Args:
            strength: how many times; a number, or one for each row.
            layer: at which of its layers; by default all of them at once.
            **where: other words of edits: ``pos``, ``rows``, ``phase="generated"``, ``when``.
        """
        return ip.add(strength=strength, **self._words(layer, where, "value"))

    def add_keeping_norm(
        self, strength: Any = 1.0, *, layer: Any = None, **where: Any
    ) -> ip.add_keeping_norm:
        """The edit that adds it and gives values their lengths back: see `add`."""
        return ip.add_keeping_norm(strength=strength, **self._words(layer, where, "value"))

    def scale(self, by: float, *, layer: Any = None, **where: Any) -> ip.project_out:
        """The edit that multiplies values along it, and leaves what is at right angles: see `add`."""
        return ip.project_out(strength=1.0 - by, **self._words(layer, where, "direction"))

    def project_out(self, *, layer: Any = None, **where: Any) -> ip.project_out:
        """The edit that takes out what is along it: see `add`."""
        return ip.project_out(**self._words(layer, where, "direction"))

    def project_cap(
        self,
        low: float | None = None,
        high: float | None = None,
        *,
        layer: Any = None,
        **where: Any,
    ) -> ip.project_cap:
        """The edit that keeps the coordinate along it within bounds: see `add`."""
        words = self._words(layer, where, "direction")
        return ip.project_cap(low=low, high=high, **words)

    def fires(
        self, *, layer: int, above: float | None = None, below: float | None = None
    ) -> ip.when:
        """The condition that the coordinate along it, at one of its layers, is beyond a bound: for ``when=``."""
        unit = self.only(layer).unit().directions[0]
        where: dict[str, Any] = {"site": self.site, "layer": layer, "head": self.head}
        return ip.when(unit, above=above, below=below, **where)

    def remove_from(self, model: ip.TransformerModel, layer: int) -> ip.project_out:
        """The edit that takes one of its directions out of all that writes to the stream, embeddings included.

        No part of the stream has a component along it then, in any layer. `ip.written` writes it into the weights.

        Args:
            model: whose stream.
            layer: which of its directions.
        """
        self.must_be_of(model)
        kinds = {"embed", "pos_embed", "attn_out", "mlp_out"}
        sites = [name for name, site in model.sites.items() if site.kind in kinds]
        return ip.project_out(sites, self[layer])

    def _words(self, layer: Any, where: dict[str, Any], name: str) -> dict[str, Any]:
        """Site, layer and direction of an edit."""
        chosen = (
            self.layers if layer is None else [layer] if isinstance(layer, int) else list(layer)
        )
        if unknown := {"site", "head", "strength"} & set(where):
            raise TypeError(f"{unknown.pop()} is the vector's own; got {sorted(where)}.")
        if not all(bool(torch.isfinite(self[number]).all()) for number in chosen):
            raise ValueError("the directions have NaN or infinity among their numbers.")
        if len(chosen) == 1:
            value: Any = self[chosen[0]]
        else:
            value = {(self.site, number): self[number] for number in chosen}
        head = {} if self.head is None else {"head": self.head}
        words = {"site": self.site, "layer": chosen[0] if len(chosen) == 1 else chosen}
        return {**words, **head, **where, name: value}

    def must_be_of(self, model: ip.TransformerModel) -> None:
        """Refuse a model that it cannot be of: another kind of model, other sites, layers or widths.

        Args:
            model: the model.
        """
        theirs = model_type_of(model)
        if self.model_type and theirs and self.model_type != theirs:
            raise Unsupported(
                f"this vector is of a {self.model_type!r} model, and this one is {theirs!r}. If they are the same all "
                "the same: dataclasses.replace(vector, model_type='')."
            )
        found = model.select(ip.at(self.site, layer=self.layers))
        shape = model.sites[found[0][0].name].shape
        wide = shape[-1] if shape is not None else model.cfg.d_model
        if self.head is None and len(found[0][0].axes) > 3:
            raise ValueError(f"{self.site!r} has heads: say which, head=...")
        if wide is not None and wide != self.directions.shape[1]:
            raise EditShapeError(
                f"this vector has {self.directions.shape[1]} units, and {found[0][0].name!r} has {wide}: it is of "
                "another site, or of another model."
            )

    # Files.

    def save(self, path: str | Path) -> Path:
        """Write it: as `ip.Result.save` does, or with the ending ``.gguf`` as a control vector of llama.cpp."""
        if Path(path).suffix != ".gguf":
            return ip.Result.save(self, path)
        from interpose.steering.gguf import save_control_vector

        return save_control_vector(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote, or a control vector of llama.cpp (``.gguf``)."""
        if Path(path).suffix != ".gguf":
            return super(SteeringVector, cls).load(path)
        from interpose.steering.gguf import load_control_vector

        made: Self = load_control_vector(cls, path)
        return made


def model_type_of(model: Any) -> str:
    """What kind of model this is, in transformers' words; empty if it does not say."""
    config: Any = getattr(model.module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "model_type", "") or getattr(text, "model_type", "")
    return found if isinstance(found, str) else ""


def _place(site: str, layers: Sequence[int], head: int | None, units: int) -> str:
    of = "" if head is None else f", head {head}"
    return f"{site}{of} of layers {list(layers)} with {units} units"
