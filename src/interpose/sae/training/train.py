"""`ip.train_sae`: autoencoders trained on the vectors of a store, of a live model, or of a tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from interpose.activations import Activations
from interpose.errors import Unsupported
from interpose.models.loading import best_device
from interpose.progress import ShowProgress
from interpose.sae.sae import SAE
from interpose.sae.training import checkpoints
from interpose.sae.training.ahead import Ahead
from interpose.sae.training.learner import Learner, in_dtype
from interpose.sae.training.loop import Training
from interpose.sae.training.recipe import SAERecipe
from interpose.sae.training.result import SAETraining
from interpose.sae.training.sources import BATCH, batches_of, known_site, wanted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def train_sae(
    source: Any,
    sae: SAE | Sequence[SAE],
    site: Any = None,
    *,
    out: Any = None,
    steps: int = 10_000,
    batch_size: int | None = None,
    recipe: SAERecipe | Sequence[SAERecipe] | None = None,
    pos: slice | None = None,
    most_norm: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    folder: str | Path | None = None,
    keep_every: int | None = None,
    say_every: int | None = None,
    watch: Callable[[dict[str, Any]], Any] | None = None,
    patience: int | None = None,
    progress: ShowProgress = True,
) -> SAETraining:
    """Train an autoencoder, a transcoder or a crosscoder, or several on the same vectors.

    ```python
    store = ip.harvest(model, texts, ("resid_post", 3), store="activations")
    found = ip.train_sae(store, ip.TopKSAE(192, 1024, k=16), steps=2000, pos=slice(1, None))
    found.sae.attach(model)

    live = ip.stream(model, texts, ("resid_post", 3), epochs=None)
    ip.train_sae(live, [ip.TopKSAE(192, 1024, k=k) for k in (8, 16, 32)], steps=2000)
    ```

    Autoencoders are trained in place. They learn on vectors that are multiplied by a number (`SAERecipe.scale`), and
    are handed over for vectors as they are, in eval mode, also when the training ends early.

    Args:
        source: where vectors are from: a store, batches of one or of a live model (``store.batches(...)``,
            ``ip.stream(...)``), or a tensor [..., d_in].
        sae: the autoencoder, as its class makes it or trained before; or several, which share the reading.
        site: which site it is of, one for all; by default the one that the autoencoder says, or that the source has.
        out: which site a transcoder writes.
        steps: how many batches it learns from.
        batch_size: how many vectors a batch has, 4096 by default; batches have theirs.
        recipe: how, one for all or one for each.
        pos: which positions of a store's rows: ``slice(1, None)`` leaves out the first of each.
        most_norm: as in `Store.batches`.
        seed: of the order of a store's vectors, and of what is drawn.
        dtype: what steps are computed in; weights are learnt in float32.
        device: where; by default the accelerator, if there is one. The autoencoder is moved there.
        folder: where checkpoints go, and the autoencoders in the end (in folders 0, 1, ... if there are several). The
            same call goes on where the last one was, also when that was killed.
        keep_every: after how many steps a checkpoint is written; by default ten times in all.
        say_every: after how many steps numbers are said; by default a hundred times in all.
        watch: a function of what is said, as a dictionary; it ends the training by returning False.
        patience: end the training when the explained variance has not risen by 0.001 in so many records, of none of
            the autoencoders.
        progress: as in `ip.sweep`.
    """
    saes = [sae] if isinstance(sae, SAE) else list(sae)
    recipes = _for_each(recipe, len(saes))
    _must_be_possible(saes, steps, dtype, batch_size)
    before = [checkpoints.fingerprint(one) for one in saes]
    where = torch.device(device) if device is not None else best_device()
    saes = [in_dtype(one.to(where), torch.float32).requires_grad_() for one in saes]
    asked = [[known_site(source, name) for name in wanted(one, site, out)] for one in saes]
    needed = list(dict.fromkeys(name for names in asked for name in names if name is not None))
    batches = batches_of(
        source,
        needed or None,
        batch_size=batch_size,
        seed=seed,
        epochs=None,
        pos=pos,
        most_norm=most_norm,
    )
    size = getattr(batches, "batch_size", batch_size or BATCH)
    _tell(saes, source, getattr(batches, "pos", None))
    if where.type == "cuda" and isinstance(source, Activations):
        batches = Ahead(batches, pinned=True)
    learners = [
        Learner(one, how, steps=steps, dtype=dtype, seed=seed + number)
        for number, (one, how) in enumerate(zip(saes, recipes))
    ]
    run = {
        "saes": before,
        "recipes": [one.data for one in recipes],
        "sites": [[repr(name) for name in names] for names in asked],
        "source": _of(source),
    } | {"steps": steps, "batch_size": size, "seed": seed, "dtype": _word(dtype)}
    return Training(
        learners,
        asked,
        batches,
        run=run,
        device=where,
        folder=None if folder is None else Path(folder),
        say_every=say_every or max(1, steps // 100),
        keep_every=keep_every or max(1, steps // 10),
        watch=watch,
        patience=patience,
    ).run(progress)


def _for_each(recipe: Any, count: int) -> list[SAERecipe]:
    if recipe is None or isinstance(recipe, SAERecipe):
        return [recipe or SAERecipe()] * count
    recipes = list(recipe)
    if len(recipes) != count:
        raise ValueError(
            f"there are {count} autoencoders and {len(recipes)} recipes: give one, or one for each."
        )
    return recipes


def _must_be_possible(
    saes: Sequence[Any], steps: int, dtype: torch.dtype, batch_size: int | None
) -> None:
    if wrong := next((one for one in saes if not isinstance(one, SAE)), None):
        raise TypeError(
            f"sae is an autoencoder such as ip.TopKSAE(192, 1024, k=16), or several; got {wrong!r}."
        )
    if not saes or len({id(one) for one in saes}) < len(saes):
        raise ValueError("give at least one autoencoder, and none twice.")
    if steps < 1 or (batch_size or 1) < 1:
        raise ValueError(f"steps and batch_size are 1 or more; got {steps} and {batch_size}.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is one of {', '.join(map(str, DTYPES))}; got {dtype}.")
    if torch.is_inference_mode_enabled():
        raise Unsupported(
            "nothing is trained inside torch.inference_mode(): call this outside of it."
        )


def _tell(saes: Sequence[SAE], source: Any, pos: slice | None) -> None:
    """Have autoencoders say of which model and of which positions they are, in SAELens's words."""
    name = getattr(getattr(getattr(source, "about", None), "model", None), "name", None)
    for sae in saes:
        if pos is not None:
            ends = [pos.start, pos.stop]
            sae.about["seqpos_slice"] = ends if pos.step is None else [*ends, pos.step]
        if isinstance(name, str) and name:
            sae.about.setdefault("model_name", name)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of(source: Any) -> str:
    """What tells stores apart."""
    manifest = getattr(source, "manifest", None)
    return hashlib.sha256(manifest().encode()).hexdigest()[:32] if callable(manifest) else ""
