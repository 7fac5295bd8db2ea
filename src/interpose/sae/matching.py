"""Whether an autoencoder fits a model: which of its sites it was trained on, and whether it is that model at all."""

from __future__ import annotations

import re
import warnings
from typing import Any

from interpose.engine.model import Model
from interpose.errors import EditShapeError, InterposeError, SiteNotFound
from interpose.sae.sae import SAE
from interpose.sites.tree import Site


def site_of(model: Model, sae: SAE, asked: Any, word: str, argument: str) -> Site:
    """The site of a model that an autoencoder reads or writes.

    Args:
        model: the model.
        sae: the autoencoder.
        asked: the site that was asked for; None for what the autoencoder says of itself.
        word: what the autoencoder calls it: ``hook_name`` or ``hook_name_out``.
        argument: what it is given as.
    """
    names = [asked] if asked is not None else said(sae, word)
    if not names:
        raise ValueError(f"{sae!r} does not say which site it is of: give {argument}=...")
    missing: Exception | None = None
    for name in names:
        try:
            found = model.select(name)
        except InterposeError as error:
            missing = missing or error
            continue
        if len(found) != 1 or found[0][0].part is not None:
            raise ValueError(
                f"{argument} is one whole site; {name!r} is {len(found)} sites, or a part."
            )
        whole = found[0][0]
        meant = model.tree.meaning(whole.canonical)  # of a module's path: hf_hook_name
        return whole if meant is None else model.tree.site(meant)
    if asked is not None:
        assert missing is not None
        raise missing
    raise SiteNotFound(
        f"{sae!r} says that it is of {names[0]!r}, and {model.tree.label} has no such site: it is of another model, or "
        f"the site has another name here. Say {argument}=...\n  {missing}"
    ) from missing


def said(sae: SAE, word: str) -> list[str]:
    """The names that an autoencoder has for its site, the best first."""
    found = []
    for key in (word, f"hf_{word}"):
        name = sae.about.get(key)
        if isinstance(name, str) and name:
            found.append(name)
    if word == "hook_name" and not found and isinstance(sae.about.get("hook_layer"), int):
        found.append(f"blocks.{sae.about['hook_layer']}.hook_resid_post")
    return found


def check_width(model: Model, site: Site, width: int, sae: SAE) -> None:
    """Refuse an autoencoder whose vectors are of another size than a site's, where that is known beforehand."""
    shape = model.sites[site.name].shape
    cfg = getattr(model, "cfg", None)
    there = None if shape is None else shape[-1]
    if site.axes[-2:] == ("head", "d_head"):
        there = None if shape is None else shape[-1] * shape[-2]
    elif shape is None and site.axes[-1:] == ("d_model",):
        there = getattr(cfg, "d_model", None)
    if there is not None and there != width:
        raise EditShapeError(
            f"{sae!r} is of vectors of {width} features, and {site.name!r} has {there}: it is of another site, or of "
            "another model."
        )


def beware_of_another_model(model: Model, sae: SAE) -> None:
    """Warn if an autoencoder says that it is of another model than this one seems to be."""
    theirs = sae.about.get("model_name")
    ours = getattr(getattr(model.module, "config", None), "_name_or_path", None)
    if not (isinstance(theirs, str) and theirs and isinstance(ours, str) and ours):
        return
    if _plain(theirs) not in _plain(ours) and _plain(ours) not in _plain(theirs):
        warnings.warn(
            f"{sae!r} says that it is of {theirs!r}, and this model is {ours!r}: its latents may mean nothing here.",
            stacklevel=4,
        )


_SAME = {"gpt2small": "gpt2"}


def _plain(name: str) -> str:
    """A model's name without who published it, and without what is spelt in several ways."""
    plain = re.sub(r"[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].lower())
    return _SAME.get(plain, plain)
