"""`SAETraining`: what a training of autoencoders did, step by step, and the autoencoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from interpose.results.result import Result
from interpose.sae.sae import SAE

SAID_OF = ("loss", "mse", "explained_variance", "l0", "dead", "sparsity")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SAETraining(Result):
    """How a training of autoencoders went.

    ```python
    found = ip.train_sae(store, ip.TopKSAE(192, 1024, k=16), ("resid_post", 3), steps=2000)
    found.sae                       # the autoencoder, for vectors as they are
    found.last["explained_variance"]
    found.save("training.html")
    ```

    Attributes:
        history: what was said along the way, a dictionary for each autoencoder and time, over the vectors since the
            last: ``step`` (how many were done), ``vectors``, ``loss`` (all that was made small), ``mse`` (the squared
            error, summed over features, in the units of the training), ``explained_variance`` (1 - error over
            variance around the mean), ``l0`` (how many latents fire at a vector), ``dead`` (the share of latents
            that have not fired for long), ``sparsity`` (what firing costs) and ``learning_rate``.
        trained: the autoencoders, as they print.
        protocol: how they were trained.
        saes: the autoencoders; none of a training that was loaded from a file.
    """

    history: list[dict[str, Any]]
    trained: list[str]
    protocol: dict[str, Any]
    saes: tuple[SAE, ...] = field(default=(), init=False)

    @property
    def sae(self) -> SAE:
        """The only autoencoder."""
        if len(self.saes) != 1:
            raise ValueError(
                f"there are {len(self.saes)} autoencoders here: saes has them all."
                if self.saes
                else "a file has how a training went; the autoencoders are where they were saved: "
                "ip.SAE.from_pretrained(folder)."
            )
        return self.saes[0]

    def of(self, number: int) -> list[dict[str, Any]]:
        """The history of one of the autoencoders."""
        return [one for one in self.history if one["sae"] == number]

    @property
    def last(self) -> dict[str, Any]:
        """What was said in the end, of the only autoencoder."""
        if len(self.trained) != 1:
            raise ValueError(f"there are {len(self.trained)} autoencoders: say of(number)[-1].")
        return self.of(0)[-1]

    @property
    def title(self) -> str:
        """What was trained."""
        what = self.trained[0] if len(self.trained) == 1 else f"{len(self.trained)} autoencoders"
        return f"Training of {what}"

    def lines(self) -> list[str]:
        """How."""
        shown = {
            name: one for name, one in self.protocol.items() if not isinstance(one, (dict, list))
        }
        return [", ".join(f"{name.replace('_', ' ')} {one}" for name, one in shown.items())]

    def records(self) -> Iterator[dict[str, Any]]:
        """What was said along the way; the explained variance is the value of each."""
        for one in self.history:
            said = {
                "value" if key == "explained_variance" else key: part for key, part in one.items()
            }
            name = {} if len(self.trained) == 1 else {"trained": self.trained[said["sae"]]}
            yield {**name, **{key: part for key, part in said.items() if key != "sae"}}

    def names(self) -> list[str]:
        """The columns, the explained variance by its name."""
        words = next(self.records(), {})
        return ["explained variance" if name == "value" else name for name in words]
