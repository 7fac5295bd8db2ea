"""A training of autoencoders on its way: batches go to each in turn, and now and then it says how far it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.activations import ActivationBatch, ActivationBatches
from interpose.errors import EditShapeError, Unsupported
from interpose.progress import Progress, ShowProgress
from interpose.sae.sae import SAE
from interpose.sae.training import checkpoints
from interpose.sae.training.ahead import Ahead
from interpose.sae.training.learner import Learner
from interpose.sae.training.result import SAETraining
from interpose.sae.training.sources import found_in, vectors_of


class Training:
    """A training on its way: batches go to each learner in turn."""

    def __init__(
        self,
        learners: Sequence[Learner],
        asked: Sequence[Sequence[Any]],
        batches: ActivationBatches,
        *,
        device: torch.device,
        say_every: int,
        keep_every: int,
        watch: Callable[[dict[str, Any]], Any] | None,
        patience: int | None,
        folder: Path | None,
        run: Mapping[str, Any],
    ) -> None:
        self.learners, self.asked, self.batches = learners, asked, batches
        self.steps, self.batch_size, self.device = run["steps"], run["batch_size"], device
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
            with Progress(
                progress, self.steps, "step", note=lambda _: self._last_said(), keeps=True
            ) as shown:
                shown.done = self.done
                while self.done < self.steps and not self.ended:
                    try:
                        batch = next(self.batches)
                    except StopIteration:
                        self._ran_out()
                        break
                    self._step(batch)
                    self._say()
                    if self.done % self.keep_every == 0 and self.done < self.steps:
                        self._keep([one.state() for one in self.learners], finished=False)
                    shown.step()
        finally:
            if isinstance(self.batches, Ahead):
                self.batches.close()
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

    def _say(self) -> None:
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
        if self.patience is not None and self._stands_still(self.patience):
            self.ended = f"no better in {self.patience} records"

    def _last_said(self) -> str:
        """Beside a bar."""
        if not self.history:
            return ""
        last = self.history[-1]
        return (
            f"loss {last['loss']:.3g}, explained {last['explained_variance']:.3f}, L0 {last['l0']:.1f}, "
            f"dead {last['dead']:.1%}"
        )

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
