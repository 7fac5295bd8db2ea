"""`SaeTrainer`: trains an autoencoder on a run of a store, as `ip.train_sae` does, and says so in mi-crow's words."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from interpose.dialects.mi_crow.store.harvested import HarvestedRun
from interpose.dialects.mi_crow.store.store_dataloader import StoreDataloader
from interpose.files.writing import write_whole
from interpose.sae.training.recipe import SAERecipe
from interpose.sae.training.train import train_sae

if TYPE_CHECKING:
    from interpose.dialects.mi_crow.mechanistic.sae.sae import Sae

HISTORY = {
    "loss": "loss",
    "recon_mse": "mse",
    "r2": "explained_variance",
    "l0": "l0",
    "l1": "sparsity",
}
"""What a history has, and what interpose calls it."""


@dataclass
class SaeTrainingConfig:
    """How an autoencoder is trained.

    Attributes:
        epochs: how often all vectors come.
        batch_size: how many vectors a step has.
        lr: the learning rate.
        l1_lambda: what firing costs in an `L1Sae`; 0 for the default of `ip.SAERecipe`.
        device: where to train; by default the accelerator, if there is one.
        dtype: what steps are computed in; weights are learnt in float32.
        max_batches_per_epoch: how many batches an epoch has at most.
        clip_grad: the norm that all gradients together may have; None for any.
        seed: of the order.
        verbose: show a bar.
    """

    epochs: int = 1
    batch_size: int = 1024
    lr: float = 1e-3
    l1_lambda: float = 0.0
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    max_batches_per_epoch: int | None = None
    clip_grad: float | None = 1.0
    seed: int = 0
    verbose: bool = False


class SaeTrainer:
    """Trains an autoencoder.

    Args:
        sae: the autoencoder.
    """

    def __init__(self, sae: Sae) -> None:
        self.sae = sae

    def train(
        self,
        store: Any,
        run_id: str,
        layer_signature: str | int,
        config: SaeTrainingConfig | None = None,
        training_run_id: str | None = None,
    ) -> dict[str, Any]:
        """Train it on the activations of a run, without padding, in an order that the seed decides.

        Args:
            store: where the run is, and where the training is kept.
            run_id: the run whose activations these are.
            layer_signature: which layer of it.
            config: how.
            training_run_id: what to keep the training under; made up unless given.

        Returns:
            ``history``: ``loss``, ``recon_mse`` (squared error, summed over features), ``r2`` (explained variance),
            ``l0`` (how many latents fire), ``l1`` (what firing costs) and ``dead_features_pct`` (in percent), a number
            for each epoch; the same again by their names; ``training_run_id``.
        """
        config = config or SaeTrainingConfig()
        self.sae.configure(config)
        source, count = _vectors(store, run_id, layer_signature, config)
        each = -(-count // config.batch_size)
        each = min(each, config.max_batches_per_epoch or each)
        found = train_sae(
            source,
            self.sae.engine,
            steps=each * config.epochs,
            batch_size=None if not isinstance(source, torch.Tensor) else config.batch_size,
            recipe=SAERecipe(
                learning_rate=config.lr, clip=config.clip_grad, sparsity=config.l1_lambda or None
            ),
            seed=config.seed,
            dtype=config.dtype or torch.float32,
            device=config.device,
            say_every=each,
            progress=config.verbose,
        )
        said = found.of(0)
        history: dict[str, Any] = {
            name: [one[own] for one in said] for name, own in HISTORY.items()
        }
        history["dead_features_pct"] = [100 * one["dead"] for one in said]
        name = training_run_id or f"training_{secrets.token_hex(6)}"
        self._keep(store, name, history, {"run_id": run_id, "layer": str(layer_signature)}, config)
        return {**history, "history": history, "training_run_id": name, "wandb_url": None}

    def _keep(
        self,
        store: Any,
        name: str,
        history: dict[str, Any],
        source: dict[str, str],
        config: SaeTrainingConfig,
    ) -> None:
        """Write the autoencoder, its history and how it was made."""
        folder = store.run_path(name)
        folder.mkdir(parents=True, exist_ok=True)
        self.sae.save(folder / "model.pt")
        write_whole(folder / "history.json", json.dumps(history))
        about = {
            "training_run_id": name,
            "activations": source,
            "sae": repr(self.sae),
            "config": {key: str(value) for key, value in asdict(config).items()},
        }
        write_whole(folder / "meta.json", json.dumps(about))


def _vectors(
    store: Any, run_id: str, layer: str | int, config: SaeTrainingConfig
) -> tuple[Any, int]:
    """Where vectors are from, and how many there are."""
    run = HarvestedRun.of(store.run_path(run_id))
    if run is None:
        whole = torch.cat(list(StoreDataloader(store, run_id, layer)))
        return whole, len(whole)
    site = run.site_of(str(layer))
    batches = run.store.batches(site, batch_size=config.batch_size, seed=config.seed, epochs=None)
    return batches, run.store.vectors
