"""`ip.train_sae`: autoencoders trained on the vectors of a store, of a live model, or of a tensor."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.activations import ActivationBatch, ActivationBatches
from interpose.errors import EditShapeError, Unsupported
from interpose.models.loading import best_device
from interpose.progress import Progress, ShowProgress
from interpose.sae.sae import SAE
from interpose.sae.training import checkpoints
from interpose.sae.training.learner import Learner, in_dtype
from interpose.sae.training.recipe import SAERecipe
from interpose.sae.training.result import SAETraining
from interpose.sae.training.sources import (
    BATCH,
    batches_of,
    found_in,
    known_site,
    vectors_of,
    wanted,
)

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
    where = torch.device(device) if device is not None else best_device()
    before = [checkpoints.fingerprint(one) for one in saes]
    for one in saes:
        in_dtype(one.to(where), torch.float32).requires_grad_()
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
    learners = [
        Learner(one, how, steps=steps, dtype=dtype, seed=seed + number)
        for number, (one, how) in enumerate(zip(saes, recipes))
    ]
    training = Training(
        learners,
        asked,
        batches,
        steps=steps,
        batch_size=getattr(batches, "batch_size", batch_size or BATCH),
        device=where,
        say_every=say_every or max(1, steps // 100),
        keep_every=keep_every or max(1, steps // 10),
        watch=watch,
        patience=patience,
        folder=None if folder is None else Path(folder),
        run={
            "saes": before,
            "recipes": [one.data for one in recipes],
            "sites": [[repr(name) for name in names] for names in asked],
            "steps": steps,
            "batch_size": getattr(batches, "batch_size", batch_size or BATCH),
            "seed": seed,
            "dtype": str(dtype).removeprefix("torch."),
            "source": _of(source),
        },
    )
    return training.run(progress)


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


def _of(source: Any) -> str:
    """What tells stores apart."""
    manifest = getattr(source, "manifest", None)
    return hashlib.sha256(manifest().encode()).hexdigest()[:32] if callable(manifest) else ""


class Training:
    """A training on its way: batches go to each learner in turn."""

    def __init__(
        self,
        learners: Sequence[Learner],
        asked: Sequence[Sequence[Any]],
        batches: ActivationBatches,
        *,
        steps: int,
        batch_size: int,
        device: torch.device,
        say_every: int,
        keep_every: int,
        watch: Callable[[dict[str, Any]], Any] | None,
        patience: int | None,
        folder: Path | None,
        run: Mapping[str, Any],
    ) -> None:
        self.learners, self.asked, self.batches = learners, asked, batches
        self.steps, self.batch_size, self.device = steps, batch_size, device
        self.say_every, self.keep_every = say_every, keep_every
        self.watch, self.patience = watch, patience
        self.folder, self.run_of = folder, run
        self.done = 0
        self.history: list[dict[str, Any]] = []
        self.ended = ""

    def run(self, progress: ShowProgress) -> SAETraining:
        """To the end."""
        finished = self._resumed()
        if finished:
            return self._result()
        try:
            with Progress(progress, self.steps, "step", keeps=True) as shown:
                shown.done = self.done
                while self.done < self.steps and not self.ended:
                    try:
                        batch = next(self.batches)
                    except StopIteration:
                        self._ran_out()
                        break
                    self._step(batch)
                    self._say(shown)
                    if self.done % self.keep_every == 0 and self.done < self.steps:
                        self._keep([one.state() for one in self.learners], finished=False)
                    shown.step()
        finally:
            for learner in self.learners:
                learner.end()
        if shown.ended is None:
            self._save()
        return shown.whole(self._result())

    def _ran_out(self) -> None:
        self.ended = f"the source had {self.done} batches"
        if not self.done:
            raise ValueError("the source has no vectors.")
        warnings.warn(
            f"the training ends after {self.done} of {self.steps} steps: {self.ended}. Make it with epochs=None, which "
            f"never ends, or say steps={self.done}, so that the learning rate falls in time.",
            stacklevel=4,
        )

    def _step(self, batch: ActivationBatch) -> None:
        made: dict[tuple[str, ...], Tensor] = {}
        for learner, asked in zip(self.learners, self.asked):
            sae = learner.sae
            names = [found_in(batch, name) for name in asked]
            into, out = (names[:1], names[1:]) if sae.is_transcoder else (names, names)
            for key in (tuple(into), tuple(out)):
                if key not in made:
                    made[key] = vectors_of(batch, key, self.device)
            x, y = made[tuple(into)], made[tuple(out)]
            if learner.scales is None:
                _must_fit(sae, x, y, names)
                _note(sae, names)
                learner.begin(x, y, self.batch_size)
            learner.step(x, y, self.done)
        self.done += 1

    def _say(self, shown: Progress) -> None:
        if self.done % self.say_every and self.done < self.steps:
            return
        for number, learner in enumerate(self.learners):
            rate = learner.recipe.rate(self.done - 1, self.steps, learner.sae.d_sae)
            record = {
                "sae": number,
                "step": self.done,
                "vectors": learner.vectors,
                **learner.record(),
                "learning_rate": rate,
            }
            self.history.append(record)
            if not all(map(_finite, (record["loss"], record["mse"]))):
                raise FloatingPointError(
                    f"the loss of {learner.sae!r} is {record['loss']} after step {self.done}: a smaller learning_rate "
                    "may help, or most_norm=10 where single vectors are very long."
                )
            if self.watch is not None and self.watch(dict(record)) is False:
                self.ended = "watch said so"
        last = self.history[-1]
        shown.note(
            f"loss {last['loss']:.3g}, explained {last['explained_variance']:.3f}, L0 {last['l0']:.1f}, "
            f"dead {last['dead']:.1%}"
        )
        if self.patience is not None and self._stands_still(self.patience):
            self.ended = f"no better in {self.patience} records"

    def _stands_still(self, patience: int) -> bool:
        """Whether no autoencoder explains more than before."""
        for number in range(len(self.learners)):
            said = [one["explained_variance"] for one in self.history if one["sae"] == number]
            if len(said) <= patience or max(said[-patience:]) > max(said[:-patience]) + 0.001:
                return False
        return True

    # In a folder.

    def _resumed(self) -> bool:
        """Go on where the last call was; whether that was the end."""
        if self.folder is None:
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        found = checkpoints.read(self.folder, self.run_of)
        if found is None:
            return False
        about, tensors = found
        self.done, self.history, self.ended = about["done"], about["history"], about["ended"]
        if about["finished"]:
            for learner, mine in zip(self.learners, tensors):
                learner.sae.load_state_dict(mine)
                learner.sae.eval()
            return True
        for learner, mine, numbers in zip(self.learners, tensors, about["numbers"]):
            learner.restore(mine, numbers, self.batch_size)
        self.batches.load_state_dict(about["source"])
        return False

    def _keep(self, states: list[Any], *, finished: bool) -> None:
        if self.folder is None:
            return
        about = {
            "run": self.run_of,
            "done": self.done,
            "finished": finished,
            "source": self.batches.state_dict(),
            "history": self.history,
            "ended": self.ended,
        }
        checkpoints.write(self.folder, about, states)

    def _save(self) -> None:
        """The autoencoders, and how it went."""
        if self.folder is None:
            return
        for number, learner in enumerate(self.learners):
            there = self.folder if len(self.learners) == 1 else self.folder / str(number)
            try:
                learner.sae.save(there)
            except Unsupported as error:
                warnings.warn(
                    f"{learner.sae!r} is in {checkpoints.NAME} alone: {error}", stacklevel=4
                )
        self._result().save(self.folder / "training.json")
        self._keep([(one.sae.state_dict(), {}) for one in self.learners], finished=True)

    def _result(self) -> SAETraining:
        saes = tuple(learner.sae for learner in self.learners)
        found = SAETraining(
            history=self.history,
            trained=[repr(one) for one in saes],
            protocol={
                "steps": self.done,
                "batch_size": self.batch_size,
                **({"ended": self.ended} if self.ended else {}),
                "seed": self.run_of["seed"],
                "dtype": self.run_of["dtype"],
                "recipes": self.run_of["recipes"],
            },
        )
        object.__setattr__(found, "saes", saes)
        return found


def _finite(number: float) -> bool:
    return abs(number) < float("inf")


def _must_fit(sae: SAE, x: Tensor, y: Tensor, names: Sequence[str]) -> None:
    for there, word in ((x.shape[-1], "d_in"), (y.shape[-1], "d_out")):
        if there != getattr(sae, word):
            raise EditShapeError(
                f"{sae!r} has {word} {getattr(sae, word)}, and the vectors of {', '.join(map(repr, names))} have "
                f"{there} features."
            )


def _note(sae: SAE, names: Sequence[str]) -> None:
    """Have an autoencoder say which sites it is of, so that it can be attached without saying it again."""
    if sae.architecture != "crosscoder" and names != ["values"]:
        sae.about["hook_name"] = names[0]
        if sae.is_transcoder:
            sae.about["hook_name_out"] = names[1]
