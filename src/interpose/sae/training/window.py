"""What is said of a training: numbers over the vectors since it was last said, each by its definition."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from interpose.sae.training.losses import Losses


class Window:
    """Sums over batches, kept on the device: nothing waits for it until they are asked for."""

    def __init__(self, like: Tensor) -> None:
        self._wide = torch.float32 if like.device.type == "mps" else torch.float64
        self._like = like
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.vectors = self.steps = 0
        self._sums: dict[str, Tensor] = {}
        self._shift: Tensor | None = None

    def add(self, found: Losses) -> None:
        """One more batch."""
        wanted, out = found.wanted, found.out
        if self._shift is None:
            self._shift = wanted.float().mean(0)  # so that squares of little are added, not of much
        moved = wanted.float() - self._shift
        more = {
            "loss": found.loss.detach().to(self._wide),
            "error": (out.float() - wanted.float()).square().sum(dtype=self._wide),
            "sum": moved.sum(0, dtype=self._wide),
            "squares": moved.square().sum(dtype=self._wide),
            "firing": found.fired.sum().to(self._wide),
        }
        self._sums = {name: one + self._sums.get(name, 0) for name, one in more.items()}
        self.vectors += len(wanted)
        self.steps += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What it has so far, as tensors and numbers."""
        kept = dict(self._sums)
        if self._shift is not None:
            kept["shift"] = self._shift
        return kept, {"vectors": self.vectors, "steps": self.steps}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Go on where `state` was asked for."""
        self._sums = {name: one.to(self._like.device) for name, one in tensors.items()}
        self._shift = self._sums.pop("shift", None)
        self.vectors, self.steps = int(numbers["vectors"]), int(numbers["steps"])

    def numbers(self) -> dict[str, float]:
        """Loss (a mean over steps), squared error, explained variance and latents that fire (over vectors)."""
        sums = {name: one.cpu().double() for name, one in self._sums.items()}
        variance = float(sums["squares"] - sums["sum"].square().sum() / self.vectors)
        error = float(sums["error"])
        return {
            "loss": float(sums["loss"]) / self.steps,
            "mse": error / self.vectors,
            "explained_variance": 1 - error / variance if variance > 0 else float("nan"),
            "l0": float(sums["firing"]) / self.vectors,
        }
