"""`Sae`: an autoencoder as a hook of a layer. Concepts that are touched change it, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from interpose.dialects.mi_crow.hooks.controller import Controller
from interpose.dialects.mi_crow.hooks.detector import Detector
from interpose.dialects.mi_crow.hooks.hook import HookType
from interpose.dialects.mi_crow.hooks.tensors import main_tensor
from interpose.dialects.mi_crow.mechanistic.sae.concepts import (
    AutoencoderConcepts,
    ConceptDictionary,
)
from interpose.errors import FileError
from interpose.files.reading import read_torch
from interpose.files.writing import replacing
from interpose.sae.sae import SAE

if TYPE_CHECKING:
    from interpose.dialects.mi_crow.mechanistic.sae.train import SaeTrainer, SaeTrainingConfig


class Sae(Controller, Detector):
    """An autoencoder that is registered on a layer: `TopKSae` or `L1Sae`.

    With nothing manipulated the layer's value stays as it is. A manipulated concept moves it by what that changes,
    and what the autoencoder cannot express stays.

    Attributes:
        engine: the `ip.SAE` that computes.
        concepts: names, texts and manipulations of its latents.
    """

    _spoils = False

    def __init__(
        self, engine: SAE, hook_id: str | None, device: str | torch.device, store: Any
    ) -> None:
        Controller.__init__(self, HookType.FORWARD, hook_id)
        self.store = store
        self.metadata: dict[str, Any] = {}
        self.tensor_metadata: dict[str, Tensor] = {}
        self.engine = engine.to(device).eval()
        self.concepts = AutoencoderConcepts(self)

    @property
    def n_latents(self) -> int:
        """How many latents there are."""
        return self.engine.d_sae

    @property
    def n_inputs(self) -> int:
        """How many features a vector has."""
        return self.engine.d_in

    @property
    def trainer(self) -> SaeTrainer:
        """What trains it."""
        from interpose.dialects.mi_crow.mechanistic.sae.train import SaeTrainer

        return SaeTrainer(self)

    def configure(self, config: SaeTrainingConfig) -> None:
        """Take from what it is trained with what belongs to it."""

    # What it computes.

    def encode(self, x: Tensor) -> Tensor:
        """How strongly each latent fires, [..., latent], mostly zeros; with what is manipulated."""
        return self.concepts.manipulated(self.engine.encode(x))

    def decode(self, latents: Tensor) -> Tensor:
        """The vectors [..., n_inputs] that latents stand for."""
        return self.engine.decode(latents)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors through few latents; with what is manipulated."""
        return self.engine.decode(self.encode(x), x).to(x.dtype)

    __call__ = forward

    # As a hook.

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: ARG002
        """Keep which latents fire: ``tensor_metadata["neurons"]`` [..., latent], as found, before manipulations."""
        x = main_tensor(output)
        if x is None:
            raise TypeError("there is no tensor here that the autoencoder could read.")
        with torch.no_grad():
            latents = self.engine.encode(x)
        self.tensor_metadata["neurons"] = latents
        self.metadata["neurons_shape"] = tuple(latents.shape)

    def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Tensor | None:  # noqa: ARG002
        """The value moved by what is manipulated; None if nothing is."""
        x = main_tensor(output)
        if x is None or not self.concepts.get_manipulation_config():
            return None
        latents = self.engine.encode(x)
        change = self.concepts.manipulated(latents) - latents
        moved: Tensor = torch.where(
            (change != 0).any(-1, keepdim=True), x + self.engine.moved(change, x).to(x), x
        )
        return moved

    # Files.

    def attach_dictionary(self, dictionary: ConceptDictionary) -> None:
        """Give its latents the names of a dictionary."""
        self.concepts.dictionary = dictionary

    def _options(self) -> dict[str, Any]:
        return {}

    def save(self, name: str | Path, path: str | Path | None = None) -> Path:
        """Write it to a file that `load` reads.

        Args:
            name: of the file; ``.pt`` is added where there is no ending.
            path: its folder; by default the one that ``name`` says, or this one.
        """
        file = Path(name) if path is None else Path(path) / name
        file = file if file.suffix else file.with_suffix(".pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {key: value.cpu() for key, value in self.engine.state_dict().items()}
        about = {
            "kind": type(self).__name__,
            "n_latents": self.n_latents,
            "n_inputs": self.n_inputs,
            "options": self._options(),
            "layer_signature": self.layer_signature,
            "manipulations": self.concepts.get_manipulation_config(),
        }
        with replacing(file) as unfinished:
            torch.save({"sae_state_dict": state, "metadata": about}, unfinished)
        return file

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> Self:
        """What `save` or a training wrote. Nothing in the file is run.

        Args:
            path: of the file.
            device: where to put it.
        """
        saved = read_torch(path)
        try:
            about = saved["metadata"]
            made = _kind(cls, about["kind"])(
                int(about["n_latents"]), int(about["n_inputs"]), device=device, **about["options"]
            )
            made.engine.load_state_dict(saved["sae_state_dict"])
            made.layer_signature = about["layer_signature"]
            for unit, how in about["manipulations"].items():
                made.concepts.manipulate_concept(unit, how["scale"], how["bias"])
        except Exception as error:
            if isinstance(error, FileError):
                raise
            raise FileError(
                f"{str(path)!r} is not what {cls.__name__}.save writes: {error}"
            ) from error
        assert isinstance(made, cls)
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n_inputs} -> {self.n_latents} latents)"


def _kind(asked: type[Sae], name: Any) -> Any:
    """The class that a file is of."""
    from interpose.dialects.mi_crow.mechanistic.sae import modules

    found = {one.__name__: one for one in (modules.TopKSae, modules.L1Sae)}.get(name)
    if found is None or not issubclass(found, asked):
        raise FileError(f"the file has a {name!r}, not a {asked.__name__}.")
    return found
