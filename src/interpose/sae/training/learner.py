"""One autoencoder in training: a step, and all that its next step depends on, as tensors and numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interpose.precision import wide
from interpose.sae.crosscoder import CrossCoder
from interpose.sae.relu import GatedSAE, JumpReLUSAE, StandardSAE
from interpose.sae.sae import SAE
from interpose.sae.training.dead import Dead, resample
from interpose.sae.training.losses import losses
from interpose.sae.training.recipe import SAERecipe
from interpose.sae.training.starting import begun, scale_of, start
from interpose.sae.training.window import Window

_STEER = 0.01
"""By which share the cost of firing moves in a step at most, towards as many latents as are wanted."""


class Learner:
    """An autoencoder in training: it is trained in place, in float32, whatever its vectors are computed in.

    Args:
        sae: what is trained.
        recipe: how.
        steps: how many steps there will be.
        dtype: what a step is computed in; with fewer than 32 bits, on a copy of the weights.
        seed: of what is drawn.
    """

    def __init__(
        self, sae: SAE, recipe: SAERecipe, *, steps: int, dtype: torch.dtype, seed: int
    ) -> None:
        self.sae, self.recipe, self.steps, self.dtype, self.seed = sae, recipe, steps, dtype, seed
        keeps = recipe.keep_norms
        free = sae.by_norm or isinstance(sae, CrossCoder)
        self._keeps = not free if keeps is None else keeps
        self.scales: tuple[float, float] | None = None  # until there is a batch
        self.vectors = 0

    def begin(self, x: Tensor, y: Tensor, batch_size: int) -> None:
        """Make ready for the first batch.

        Args:
            x: its vectors.
            y: what the output should be.
            batch_size: how many vectors batches have.
        """
        sae, scaled = self.sae, self.recipe.scale and self.sae.normalize == "none"
        if scaled and not sae.TIED:
            self.scales = scale_of(x), scale_of(y)
        else:
            self.scales = 1.0, 1.0
        trained = begun(sae)
        if trained and self.scales != (1.0, 1.0):
            sae.fold_scale(*(1 / one for one in self.scales))
        self._make(batch_size)
        if not trained:
            start(
                sae,
                x.to(sae.W_dec) * self.scales[0],
                y.to(sae.W_dec) * self.scales[1],
                self.recipe.centre,
            )
        self.norms = sae.W_dec.detach().norm(dim=-1, keepdim=True)
        self._sync()

    def _make(self, batch_size: int) -> None:
        """All that a step needs beside the weights."""
        sae = self.sae.train()
        if not sae.TIED:  # gradients of the encoder come latent by latent
            sae.W_enc.data = sae.W_enc.data.T.contiguous().T
        self.dead = Dead(sae, self.recipe.counts_dead_after(batch_size * self.steps))
        self.cost = torch.tensor(_cost(sae, self.recipe), device=sae.W_dec.device)
        self.window = Window(sae.W_dec)
        self.optimizer = torch.optim.Adam(
            sae.parameters(), lr=0.0, betas=self.recipe.betas, fused=True
        )
        self._worker = (
            sae if self.dtype == torch.float32 else in_dtype(copy.deepcopy(sae), self.dtype)
        )

    def step(self, x: Tensor, y: Tensor, number: int) -> None:
        """Learn from a batch.

        Args:
            x: its vectors.
            y: what the output should be.
            number: of the step, counted from zero.
        """
        assert self.scales is not None
        recipe = self.recipe
        same = y is x and self.scales[0] == self.scales[1]
        x = (wide(x) * self.scales[0]).to(self.dtype)
        y = x if same else (wide(y) * self.scales[1]).to(self.dtype)
        with torch.enable_grad():
            found = losses(
                self._worker,
                x,
                y,
                recipe=recipe,
                cost=self.cost * recipe.risen(number, self.steps),
                dead=self.dead.known,
            )
            found.loss.backward()
        self._learn(recipe.rate(number, self.steps, self.sae.d_sae))
        self.window.add(found)
        self.vectors += len(x)
        self.dead.step(found.fired, len(x), number)
        if recipe.l0 is not None:
            self._steer(found.fired.sum() / len(x))
        every = recipe.resample
        if every and (number + 1) % every == 0 and 2 * (number + 1) <= self.steps:
            left = found.wanted.float() - found.out.float()
            given = self.sae.normalised(x.float())[0]
            given = given - self.sae.b_dec if self.sae.subtract_bias else given
            errors = left.square().sum(-1)
            resample(
                self.sae, self.optimizer, self.dead, given, errors, left, seed=self.seed, step=number
            )  # fmt: skip
            self._sync()

    @torch.no_grad()
    def _learn(self, rate: float) -> None:
        sae = self.sae
        if self._worker is not sae:
            for mine, theirs in zip(sae.parameters(), self._worker.parameters()):
                mine.grad = None if theirs.grad is None else theirs.grad.to(mine.dtype)
                theirs.grad = None
        rows = sae.W_dec
        if self._keeps and rows.grad is not None:
            along = torch.linalg.vecdot(rows.grad, rows)[:, None] / self.norms.square()
            rows.grad.addcmul_(rows.detach(), along, value=-1)
        if self.recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(sae.parameters(), self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._keeps:
            rows.mul_(self.norms / rows.norm(dim=-1, keepdim=True))
        if isinstance(sae, JumpReLUSAE):
            sae.threshold.clamp_(min=0)
        self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        """Give the copy that computes the weights that were learnt, and take the threshold that it has found."""
        if self._worker is self.sae:
            return
        for mine, theirs in zip(self.sae.parameters(), self._worker.parameters()):
            theirs.copy_(mine)
        for kept, found in zip(self.sae.buffers(), self._worker.buffers()):
            kept.copy_(found)

    def _steer(self, now: Tensor) -> None:
        """Make firing dearer where more latents fire than are wanted, cheaper where fewer do."""
        wanted = self.recipe.l0
        assert wanted is not None
        far = ((now / wanted).clamp(min=1e-3).log()).clamp(-1, 1)
        self.cost = self.cost * (far * _STEER).exp()

    def record(self) -> dict[str, float]:
        """What is said of the steps since it was last said; the next begin anew."""
        found = {
            **self.window.numbers(),
            "dead": float(self.dead.share),
            "sparsity": float(self.cost),
        }
        self.window.clear()
        return found

    def end(self) -> None:
        """Hand the autoencoder over: for vectors as they are."""
        for parameter in self.sae.parameters():
            parameter.grad = None
        if self.scales is None:
            return
        if self.scales != (1.0, 1.0):
            self.sae.fold_scale(*self.scales)
        if not self.sae.TIED:
            self.sae.W_enc.data = self.sae.W_enc.data.contiguous()
        self.scales = None
        self.sae.eval()

    # What the next step depends on.

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and numbers."""
        tensors = {f"weights.{name}": one.detach() for name, one in self.sae.state_dict().items()}
        for name, parameter in self.sae.named_parameters():
            for key, kept in self.optimizer.state[parameter].items():
                tensors[f"adam.{name}.{key}"] = kept
        tensors |= {"norms": self.norms, "since": self.dead.since, "cost": self.cost}
        if self.dead.known is not None:
            tensors["dead"] = self.dead.known
        sums, counts = self.window.state()
        tensors |= {f"window.{name}": one for name, one in sums.items()}
        assert self.scales is not None
        scales = [one.hex() for one in self.scales]
        return tensors, {"scales": scales, "vectors": self.vectors, "window": counts}

    @torch.no_grad()
    def restore(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], batch_size: int
    ) -> None:
        """Go on where `state` was asked for.

        Args:
            tensors: by name.
            numbers: the others.
            batch_size: how many vectors batches have.
        """
        first, second = (float.fromhex(one) for one in numbers["scales"])
        self.scales, self.vectors = (first, second), int(numbers["vectors"])
        for name, one in self.sae.state_dict().items():
            one.copy_(tensors[f"weights.{name}"])
        self._make(batch_size)
        for name, parameter in self.sae.named_parameters():
            start = f"adam.{name}."
            self.optimizer.state[parameter] = {
                key.removeprefix(start): _like(one, parameter)
                for key, one in tensors.items()
                if key.startswith(start)
            }
        sums = {
            name.removeprefix("window."): one
            for name, one in tensors.items()
            if name.startswith("window.")
        }
        self.window.restore(sums, numbers["window"])
        device = self.sae.W_dec.device
        self.norms, self.dead.since, self.cost = (
            tensors[name].to(device) for name in ("norms", "since", "cost")
        )
        self.dead.known = tensors["dead"].to(device) if "dead" in tensors else None
        self._sync()


def _like(kept: Tensor, parameter: Tensor) -> Tensor:
    """What an optimiser remembers of a parameter, laid out in memory as that is."""
    if not kept.ndim:
        return kept.to(parameter.device)
    return torch.empty_like(parameter).copy_(kept)


def in_dtype(sae: SAE, dtype: torch.dtype) -> SAE:
    """An autoencoder whose parameters have a dtype; what it counts in more bits stays."""
    for parameter in sae.parameters():
        parameter.data = parameter.data.to(dtype)
    return sae


def _cost(sae: SAE, recipe: SAERecipe) -> float:
    if not isinstance(sae, (StandardSAE, GatedSAE, JumpReLUSAE)):
        if recipe.l0 is not None or recipe.sparsity:
            raise ValueError(
                f"{sae!r} says itself how many latents fire: l0 and sparsity are of others."
            )
        return 0.0
    if recipe.sparsity is not None and not math.isfinite(recipe.sparsity):
        raise ValueError(f"sparsity is a finite number; got {recipe.sparsity}.")
    if recipe.sparsity is None:
        return 1e-3 * sae.d_in if isinstance(sae, JumpReLUSAE) else 0.08 * sae.d_in**0.5
    if recipe.l0 is not None and recipe.sparsity == 0:
        raise ValueError("with l0, sparsity is where the cost begins: above zero.")
    return recipe.sparsity
