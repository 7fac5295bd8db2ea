"""An autoencoder in a model: its latents, what it makes of them and what it leaves out are sites, as any others.

Each is a lens on the value at the autoencoder's site. Read, it is computed from that value; edited, the value is moved
by what the edit changes and by nothing else:

    x + (decode(edited) - decode(codes))

and where no code changed it is ``x`` itself, to the last bit. So there is nothing to switch on: attached and not
edited, an autoencoder changes nothing. Without its error (`Attached.replace`) the model goes on with what the
autoencoder makes of its latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from interpose.edits.basic import zero
from interpose.edits.edit import Edit
from interpose.engine.model import Model
from interpose.errors import AmbiguousSite, EditShapeError, GradientError, Unsupported
from interpose.models.reach.lenses import Switches
from interpose.sae.given import Given
from interpose.sae.matching import beware_of_another_model, check_width, site_of
from interpose.sae.sae import SAE
from interpose.sites.lens import Lens
from interpose.sites.tree import ModuleTree, Site
from interpose.taps import values

ABOUT = {
    "latents": "how strongly each latent of the autoencoder fires",
    "pre": "what each latent is given, before it is decided which of them fire",
    "recons": "what the autoencoder makes of its latents; an edit leaves the error in place",
    "error": "what the autoencoder leaves out of the value at its site",
}
"""The sites that an autoencoder brings, each with what it is."""


class Attached:
    """An autoencoder at a site of a model. A ``with`` block with it ends in `detach`.

    ```python
    there = sae.attach(model, ("resid_post", 3))
    _, cache = model.run_with_cache(text, names_filter=there.latents)
    model.run_with_hooks(text, hooks=[ip.scale(there.latents, 3.0, neuron=17)])
    model.run_with_hooks(text, hooks=[there.replace()])
    ```

    Attributes:
        sae: the autoencoder.
        site: the canonical name of what it writes.
        given: the canonical name of what it reads: the same, but in a transcoder.
        latents: the name of the site of its latents; ``pre``, ``recons`` and ``error`` are the others'.
    """

    def __init__(self, sae: SAE, model: Model, site: str, given: str, name: str) -> None:
        self.sae, self.model, self.site, self.given, self.name = sae, model, site, given, name
        self.names = [f"{site}.{name}.{part}" for part in ABOUT]
        self.latents, self.pre, self.recons, self.error = self.names
        self._made: dict[str, Site] = {}
        self._of: Site | None = None

    def sites(self, tree: ModuleTree) -> dict[str, Site]:
        """Its sites in a model as it is now, by canonical name."""
        base = tree.site(self.site)
        if self._of is not base:
            self._of, self._made = base, self._sites(base, tree.site(self.given))
        return self._made

    def _sites(self, base: Site, given: Site) -> dict[str, Site]:
        source = None if given.canonical == base.canonical else Given(given)
        heads = base.axes[-2:] == ("head", "d_head")
        axes = base.axes[: -2 if heads else -1]
        last = (*base.axes[-2:],) if heads else base.axes[-1:]
        made = {}
        for part, about in ABOUT.items():
            name = f"{self.site}.{self.name}.{part}"
            lens = Lens_(self, part, base.lens, source, heads)
            each = [one for one in (base.switch, source) if one is not None]
            made[name] = replace(
                base,
                name=name,
                canonical=name,
                stem=name,
                path=name,
                kind=part,
                axes=(*axes, *(("latent",) if part in ("latents", "pre") else last))
                if axes
                else (),
                lens=lens,
                switch=each[0] if len(each) == 1 else Switches(tuple(each)) if each else None,
                primary=False,
                part=None,
                aliases=(),
                about=about,
            )
        return made

    def replace(self) -> Edit:
        """The edit that lets the model go on with what the autoencoder makes of its latents, and without the rest."""
        return zero(self.error)

    def detach(self) -> None:
        """Take its sites away again."""
        offered = self.model.tree.offered
        if isinstance(offered, Offered) and self in offered.those:
            left = [one for one in offered.those if one is not self]
            self.model.tree.offered = Offered(self.model.tree, left) if left else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        where = self.site if self.given == self.site else f"{self.given} -> {self.site}"
        return f"{self.sae!r} at {where}: its latents are {self.latents!r}"


def attach(
    sae: SAE, model: Model, site: Any = None, *, out: Any = None, name: str = "sae"
) -> Attached:
    """Make an autoencoder's latents sites of a model, which goes on as before.

    Args:
        sae: the autoencoder; it is not copied, so that what changes in it changes there.
        model: the model.
        site: what it reads; by default what it was trained on, as far as it says so.
        out: what it writes, of a transcoder.
        name: what its sites are called after: ``blocks.3.hook_resid_post.sae.latents``, or ``sae.latents`` for short.
    """
    if not name.isidentifier():
        raise ValueError(f"name is a word such as 'sae'; got {name!r}.")
    given = site_of(model, sae, site, "hook_name", "site")
    there = site_of(model, sae, out, "hook_name_out", "out") if sae.is_transcoder else given
    if out is not None and not sae.is_transcoder:
        raise TypeError(f"{sae!r} writes what it reads: out= is for transcoders.")
    if sae.architecture == "crosscoder":
        raise Unsupported(
            "a crosscoder reads several sites at once, and cannot be attached to one."
        )
    check_width(model, given, sae.d_in, sae)
    check_width(model, there, sae.d_out, sae)
    attached = Attached(sae, model, there.canonical, given.canonical, name)
    offered = model.tree.offered
    those = list(offered.those) if isinstance(offered, Offered) else []
    if any(one.latents == attached.latents for one in those):
        raise ValueError(
            f"there is an autoencoder called {name!r} at {there.canonical!r} already: detach it, or give another name."
        )
    beware_of_another_model(model, sae)
    model.tree.offered = Offered(model.tree, [*those, attached])
    return attached


class Offered(Mapping[str, Site]):
    """The sites of the autoencoders in a model, by canonical name, or by a short one (``sae.latents``)."""

    def __init__(self, tree: ModuleTree, those: list[Attached]) -> None:
        self._tree = tree
        self.those = those
        self._of = {name: one for one in those for name in one.names}

    def __getitem__(self, name: str) -> Site:
        found: Site | None = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """The site that a name means; an error where a short one means several."""
        stem, mark, call = name.partition("#")
        if stem.rpartition(".")[2] not in ABOUT or (mark and not call.isdigit()):
            return default
        found = stem if stem in self else next(iter(self._ending(stem)), None)
        if found is None:
            return default
        site = self._of[found].sites(self._tree)[found]
        if mark:
            tail = replace(site.tail, call=int(call))
            site = replace(site, canonical=f"{site.canonical}#{call}", tail=tail)
        return site if site.name == name else replace(site, name=name)

    def _ending(self, short: str) -> list[str]:
        """The name that a short one means, if it means one."""
        names = (
            [name for name in self._of if name.endswith(f".{short}")]
            if short.count(".") == 1
            else []
        )
        if len(names) > 1:
            there = ", ".join(map(repr, names[:4]))
            raise AmbiguousSite(f"{short!r} is of {len(names)} autoencoders: {there}. Say which.")
        return names

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(
            self._of
        )  # without looking for their sites: the model may be about to find its own

    def __len__(self) -> int:
        return len(self._of)


@dataclass(slots=True)
class Written:
    """What was written into an autoencoder's sites at one value: it cannot be seen in the value itself."""

    version: int
    latents: Tensor
    pre: Tensor | None
    x: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Lens_:
    """One site of an autoencoder, shown in the value at the site that it is attached to."""

    of: Attached
    part: str
    inner: Lens | None
    source: Given | None
    heads: bool

    @property
    def needs_call(self) -> bool:
        """As the lens inside."""
        return self.inner is not None and self.inner.needs_call

    @property
    def in_place(self) -> bool:
        """As the lens inside."""
        return self.inner is not None and self.inner.in_place

    def read(self, raw: Tensor, call: Any) -> Tensor:
        """The site's value: what was written into it before, else what follows from the value."""
        whole = self._whole(raw, call)
        sae, known = self.of.sae, self._known(raw)
        x = self._given(whole) if known is None else known.x
        if self.part == "pre":
            return sae.pre(x) if known is None or known.pre is None else known.pre
        latents = sae.encode(x) if known is None else known.latents
        if self.part == "latents":
            return latents
        recons = self._shaped(sae.decode(latents, x).to(whole), whole)
        return recons if self.part == "recons" else whole - recons

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor | None:
        """The value moved by what that changes."""
        whole = self._whole(raw, call)
        sae, known = self.of.sae, self._known(raw)
        x = self._given(whole) if known is None else known.x
        latents = sae.encode(x) if known is None else known.latents
        pre = None if known is None else known.pre
        if self.part in ("latents", "pre"):
            if self.part == "pre" and known is not None and pre is None and value.requires_grad:
                raise GradientError(
                    f"{self.of.pre!r} comes before {self.of.latents!r}: ask for its gradient first, or alone."
                )
            now = value if self.part == "latents" else sae.activated(value)
            pre = value if self.part == "pre" else None
            added = sae.moved(now - latents, x)
            changed = (now != latents).any(-1, keepdim=True).to(whole.device)
            new = _moved(self._flat(whole), self._flat(whole).to(added) + added, changed)
            latents = now
        else:
            recons = self._shaped(sae.decode(latents, x).to(whole), whole)
            was = recons if self.part == "recons" else whole - recons
            made_of = whole + (value - recons) if self.part == "recons" else recons + value
            new = self._flat(_moved(whole, made_of, value != was))
        new = self._shaped(new, whole)
        made = values.settled(new, raw) if self.inner is None else self.inner.write(raw, new, call)
        kept = raw if made is None else made
        state = {
            **getattr(raw, "_autoencoders", {}),
            self.of: Written(_version(kept), latents, pre, x),
        }
        kept._autoencoders = state  # type: ignore[attr-defined]
        return made

    def _known(self, raw: Tensor) -> Written | None:
        found: Written | None = getattr(raw, "_autoencoders", {}).get(self.of)
        return found if found is not None and found.version == _version(raw) else None

    def _whole(self, raw: Tensor, call: Any) -> Tensor:
        return raw if self.inner is None else self.inner.read(raw, call)

    def _given(self, whole: Tensor) -> Tensor:
        sae = self.of.sae
        found = whole if self.source is None else self.source.value
        flat = self._flat(found) if found.shape[-1] != sae.d_in else found
        if flat.shape[-1] != sae.d_in or self._flat(whole).shape[-1] != sae.d_out:
            raise EditShapeError(
                f"{sae!r} is attached to {self.of.site!r}, which is {tuple(whole.shape)}, and reads "
                f"{self.of.given!r}, {tuple(found.shape)}: it is of another site, or of another model."
            )
        return flat

    def _flat(self, value: Tensor) -> Tensor:
        """With heads side by side."""
        return value.flatten(-2) if self.heads else value

    def _shaped(self, flat: Tensor, like: Tensor) -> Tensor:
        return flat.reshape(like.shape) if self.heads else flat


def _moved(whole: Tensor, new: Tensor, changed: Tensor) -> Tensor:
    """The new value where something changed, else the old one to the last bit, with the gradients of the new one."""
    new = new.to(whole)
    if new.requires_grad:
        step = new - whole
        whole = whole - (step.detach() - step)
    return torch.where(changed, new, whole)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
