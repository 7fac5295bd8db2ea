"""The tuned lens: the logit lens with a trained translation of each layer's stream into the last layer's terms.

Early layers write in directions that the unembedding does not read yet. So each layer gets an affine map, which begins
as the identity and is trained until what is read through it is as close as possible to what the model says in the end:

    minimise over A, b:  KL( model's prediction, unembed(final norm(stream + stream A + b)) )

The model is frozen, and its streams are collected once for all layers. The last layer needs no map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import batches_to_read
from interpose.progress import ShowProgress, tracked
from interpose.results.loading import load_result

if TYPE_CHECKING:
    from interpose.methods.logit_lens import LogitLens

_EVIDENCE = (
    "Evidence for what an affine map can tell of the model's prediction from a layer's stream. Not evidence that the "
    "model uses it there: the map is trained, and may find by itself what later layers compute in another way."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TunedLens(ip.Result):
    """An affine map for each layer.

    ```python
    lens = ip.TunedLens.fit(model, texts, steps=200)
    lens(model, "The Eiffel Tower is in", answer=" Paris")  # as ip.logit_lens
    lens.save("lens.safetensors")
    lens = ip.TunedLens.load("lens.safetensors", model)
    ```

    Attributes:
        matrices: what is added to the identity, [layer, d_model, d_model]; a stream is a row on its left.
        offsets: what is added, [layer, d_model].
        kl: the divergence at each step of the training, [step, layer].
        shape: of the model: its layers, width and vocabulary.
        protocol: how it was trained.
    """

    matrices: Tensor
    offsets: Tensor
    kl: Tensor
    shape: dict[str, int]
    protocol: dict[str, Any]

    @staticmethod
    def fit(
        model: ip.TransformerModel,
        texts: Any,
        *,
        steps: int = 250,
        learning_rate: float = 1e-3,
        batch_size: int = 16,
        seed: int = 0,
        prepend_bos: bool | None = None,
        progress: ShowProgress = True,
    ) -> TunedLens:
        """Train the maps, all layers at once; the model is not changed.

        Args:
            model: a causal language model.
            texts: several texts, or tokens [batch, pos]; as varied as those it will be used on. Or a store
                (`ip.open_store`) with ``resid_post`` of every layer: what the model says is computed of the last.
            steps: how many batches are trained on; each is one forward pass and one unembedding for each layer.
            learning_rate: of Adam, at first; it falls to zero in a straight line.
            batch_size: how many texts are in a batch, at most; those of one batch have one length.
            seed: of the order of the batches.
            prepend_bos: as in ``to_tokens``, for texts.
            progress: as in `ip.sweep`.
        """
        if steps < 1:
            raise ValueError(f"steps is how many batches are trained on, at least 1; got {steps}.")
        if torch.is_inference_mode_enabled():
            raise ip.Unsupported(
                "nothing is trained inside torch.inference_mode(): call this outside of it."
            )
        found = batches_to_read(
            model, texts, batch_size=batch_size, prepend_bos=prepend_bos, runs=True
        )
        shape, device = _shape(model), found[0].clean.device
        layers, width = shape["layers"], shape["width"]
        maps = [
            torch.zeros(layers, *size, device=device).requires_grad_()
            for size in ((width, width), (width,))
        ]
        optimizer = torch.optim.Adam(maps, lr=learning_rate)
        draw = torch.Generator().manual_seed(seed)
        # Each token counts the same, whatever the length of its text: a step takes the mean over a batch's tokens.
        sizes = torch.tensor([float(batch.clean.numel()) for batch in found], device="cpu")
        history = []
        for step in tracked(range(steps), progress, "step", lambda _: 1):
            batch = found[int(sizes.multinomial(1, generator=draw))]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1 - step / steps)
            history.append(_gradients(model, batch, maps))
            optimizer.step()
        return TunedLens(
            matrices=maps[0].detach(),
            offsets=maps[1].detach(),
            kl=torch.stack(history),
            shape=shape,
            protocol={
                "steps": steps,
                "texts": found[0].total,
                "learning_rate": learning_rate,
                "batch_size": batch_size,
                "seed": seed,
            },
        )

    def translate(self, stream: Tensor, layer: int) -> Tensor:
        """A layer's stream, [..., d_model], as the last layer would have it."""
        return _translated(stream, self.matrices[layer], self.offsets[layer])

    def __call__(self, model: ip.TransformerModel, texts: Any, **options: Any) -> LogitLens:
        """What `ip.logit_lens` shows, read through these maps; ``options`` are its own."""
        _must_fit(self, model)
        if options.get("site", "resid_post") != "resid_post":
            raise ValueError("a tuned lens is trained for resid_post, and translates nothing else.")
        found = ip.logit_lens(model, texts, through=self.translate, **options)
        return dataclasses.replace(found, title="Tuned lens at resid_post", evidence=_EVIDENCE)

    @property
    def title(self) -> str:
        """How it was trained."""
        said = ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in self.protocol.items()
        )
        return f"Tuned lens: {said}; KL at the beginning and at the end"

    def records(self) -> Iterator[dict[str, Any]]:
        """Every layer as a dictionary: its divergence at first, and in the end as its value."""
        few = max(1, len(self.kl) // 10)
        ends = (self.kl[:few].mean(0).tolist(), self.kl[-few:].mean(0).tolist())
        for layer, (first, last) in enumerate(zip(*ends)):
            yield {"layer": layer, "first": first, "value": last}

    @classmethod
    def load(cls, path: str | Path, model: ip.TransformerModel | None = None) -> TunedLens:
        """What `save` wrote, for a model of the same shape, on its device.

        Args:
            path: where it is.
            model: the model that it will be used on.
        """
        found = load_result(path)
        if not isinstance(found, TunedLens):
            raise ip.FileError(f"{str(path)!r} holds a {type(found).__name__}, not a TunedLens.")
        if model is None:
            return found
        _must_fit(found, model)
        maps = {name: getattr(found, name).to(model.device) for name in ("matrices", "offsets")}
        return dataclasses.replace(found, **maps)


def _must_fit(lens: TunedLens, model: ip.TransformerModel) -> None:
    other = _shape(model)
    if other != lens.shape:
        said, there = (
            ", ".join(f"{name} {number}" for name, number in shape.items())
            for shape in (lens.shape, other)
        )
        raise ValueError(f"this lens was trained for a model with {said}; this one has {there}.")


def _shape(model: ip.TransformerModel) -> dict[str, int]:
    width, vocabulary = model.W_U.shape
    return {"layers": len(model.blocks), "width": int(width), "vocabulary": int(vocabulary)}


def _translated(stream: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    wide = stream.float()
    return (wide + wide @ matrix + offset).to(stream.dtype)


def _gradients(model: ip.TransformerModel, batch: ip.Batch, maps: list[Tensor]) -> Tensor:
    """Put the gradients of each layer's divergence into the maps, and return the divergences, [layer]."""
    last = len(model.blocks)
    with torch.no_grad():
        if batch.rows is None:
            logits, cache = model.run_with_cache(batch.clean, names_filter="resid_post")
        else:
            cache = batch.read(ip.at("resid_post"))
            logits = model(cache["resid_post", last - 1], start_at_layer=last)
        own = logits.float().log_softmax(-1)  # [example, pos, d_vocab]
        chance = own.exp()
        entropy = -(chance * own).sum(-1)
    found = torch.zeros(last)
    for each in maps:
        each.grad = torch.zeros_like(each)
    for layer in range(last - 1):  # the last is the identity, and stays it
        mine = [each.detach()[layer].requires_grad_() for each in maps]
        with torch.enable_grad():
            stream = _translated(cache["resid_post", layer], *mine)
            said = model(stream, start_at_layer=last).float().log_softmax(-1)
            loss = (-(chance * said).sum(-1) - entropy).mean()
            grads = torch.autograd.grad(loss, mine)  # and no parameter's
        for each, grad in zip(maps, grads):
            assert each.grad is not None
            each.grad[layer] = grad
        found[layer] = loss.detach()
    return found
