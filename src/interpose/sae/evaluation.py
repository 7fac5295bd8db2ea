"""`ip.evaluate_sae`: how much of a site an autoencoder keeps, and of what the model does with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interpose.activations import ActivationRows
from interpose.errors import Unsupported
from interpose.methods.batches import Batch, batches_to_read
from interpose.progress import Progress, ShowProgress
from interpose.render.labelled import Labelled
from interpose.results.result import Result
from interpose.sae.attaching import Attached
from interpose.sae.matching import site_of
from interpose.sae.reconstruction import Reconstruction
from interpose.sae.sae import SAE
from interpose.sae.training.sources import batches_of, found_in, known_site, vectors_of, wanted

SAID = {
    "explained_variance": "1 - squared error over variance around the mean",
    "mse": "squared error, summed over features, of a vector",
    "cosine": "of a vector and what is made of it",
    "norm_ratio": "norm of what is made of a vector, over its own",
    "bias": "squared norms of what is made, over its products with the vectors; 1 is none",
    "l0": "latents that fire at a vector",
    "l1": "sum of the strengths of those",
    "dead": "share of latents that never fire",
    "loss": "of the model as it is, at the next token",
    "loss_replaced": "with what is made of the vectors in their place",
    "loss_zero": "with zeros in their place",
    "loss_mean": "with their mean in their place",
    "recovered": "(loss_zero - loss_replaced) / (loss_zero - loss)",
    "recovered_mean": "(loss_mean - loss_replaced) / (loss_mean - loss)",
    "kl": "of the model as it is to that with the vectors replaced, in nats",
    "kl_zero": "the same with zeros",
}
"""What is measured, in words."""

_EVIDENCE = (
    "Evidence for how much of this site the autoencoder keeps, on these texts. Not evidence that its latents mean "
    "something: that is seen in what makes them fire, and in what changes with them."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SAEEvaluation(Result):
    """What an autoencoder keeps.

    ```python
    found = ip.evaluate_sae(texts, sae, model=model)
    found["explained_variance"], found["recovered"]
    found.density                   # how often each latent fires, [latent]
    found.save("evaluation.html")
    ```

    Attributes:
        of: the autoencoder, as it prints.
        numbers: by name; what each is, a page says.
        density: at which share of the vectors each latent fires, [latent].
        protocol: on what it was measured.
        evidence: what it is evidence for.
    """

    of: str
    numbers: dict[str, float]
    density: Tensor
    protocol: dict[str, Any]
    evidence: str = _EVIDENCE

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]

    @property
    def title(self) -> str:
        """Of what."""
        return f"Evaluation of {self.of}"

    def lines(self) -> list[str]:
        """On what."""
        return [", ".join(f"{name.replace('_', ' ')} {one}" for name, one in self.protocol.items())]

    def records(self) -> Iterator[dict[str, Any]]:
        """Every number, with what it is."""
        for name, one in self.numbers.items():
            yield {"metric": name, "value": one, "about": SAID.get(name, "")}

    def histogram(self) -> dict[str, int]:
        """How many latents fire how often: by powers of ten of their density."""
        density = self.density.double()
        found = {"never": int((density == 0).sum())}
        for power in range(-7, 0):
            low, high = 10.0**power, 10.0 ** (power + 1)
            inside = (density >= (0 if power == -7 else low)) & (density < high) & (density > 0)
            if power == -1:
                inside |= density >= 1
            found[f"{low:g} to {high:g}"] = int(inside.sum())
        return found

    def view(self) -> Labelled:
        """The histogram of densities."""
        found = self.histogram()
        return Labelled(
            values=torch.tensor(list(found.values())).float(),
            labels={"density": list(found)},
            what="latents",
        )

    def html_body(self) -> str:
        """The numbers, and the histogram of densities."""
        return f"{super(SAEEvaluation, self).html_body()}<p>How often latents fire</p>{self.view().html()}"


def evaluate_sae(
    source: Any,
    sae: SAE | Attached,
    site: Any = None,
    *,
    out: Any = None,
    model: Any = None,
    pos: slice | None = None,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> SAEEvaluation:
    """Measure how much of a site an autoencoder keeps; with a model, also how much worse the model gets with it.

    ```python
    ip.evaluate_sae(store, sae)                       # of vectors alone
    ip.evaluate_sae(texts, sae, model=model)          # of texts, with losses
    ip.evaluate_sae(texts, sae.attach(model))         # the same
    ```

    No padding is counted, whatever the lengths of texts. The first position is an outlier in many models: it is left
    out of all that is measured, and left as it is in the model, where the autoencoder was trained so, or says so
    (``about["seqpos_slice"]``), or with ``pos=slice(1, None)``.

    Args:
        source: where vectors are from, as in `train_sae`; with a model, texts, or a store with all its tokens.
        sae: the autoencoder, or where one is attached.
        site: which site; by default what the autoencoder says.
        out: which site a transcoder writes.
        model: runs the texts; None where only vectors are looked at.
        pos: which positions of each text are measured and replaced; by default those that it was trained on.
        batch_size: how many texts run together, 16 by default; without a model how many vectors, 4096.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if isinstance(sae, Attached):
        model, site, out = (
            model or sae.model,
            sae.given,
            sae.site if sae.sae.is_transcoder else None,
        )
        sae = sae.sae
    where = pos if pos is not None else positions_of(sae)
    was = sae.training
    sae.eval()
    try:
        with torch.no_grad():
            if model is None:
                sums, protocol = _of_vectors(source, sae, site, out, where, batch_size, progress)
                more: dict[str, float] = {}
            else:
                texts = batches_to_read(
                    model, source, batch_size=batch_size or 16, prepend_bos=prepend_bos, runs=True
                )
                runs = _Runs(model, sae, site, out, where)
                sums, more, protocol = runs.measure(texts, progress)
    finally:
        sae.train(was)
    if isinstance(source, ActivationRows):
        protocol = {"source": "a store", **protocol}
    return SAEEvaluation(
        of=repr(sae), numbers={**sums.numbers(), **more}, density=sums.density(), protocol=protocol
    )


def positions_of(sae: SAE) -> slice | None:
    """The positions that an autoencoder says that it was trained on; None for all."""
    said = sae.about.get("seqpos_slice")
    if not isinstance(said, (list, tuple)) or not 1 <= len(said) <= 3:
        return None
    if not all(one is None or type(one) is int for one in said) or all(one is None for one in said):
        return None
    return slice(*said)


def _of_vectors(
    source: Any,
    sae: SAE,
    site: Any,
    out: Any,
    where: slice | None,
    batch_size: int | None,
    progress: ShowProgress,
) -> tuple[Reconstruction, dict[str, Any]]:
    """What an autoencoder makes of vectors."""
    asked = [known_site(source, name) for name in wanted(sae, site, out)]
    given = where if hasattr(source, "sites") else None
    needed = [name for name in asked if name is not None]
    batches = batches_of(source, needed or None, batch_size=batch_size, seed=0, epochs=1, pos=given)
    sums = Reconstruction(sae)
    with Progress(progress, None, "vector") as shown:
        for batch in batches:
            names = [found_in(batch, name) for name in asked]
            into, made = (names[:1], names[1:]) if sae.is_transcoder else (names, names)
            x = vectors_of(batch, into, sae.W_dec.device)
            sums.add(x, vectors_of(batch, made, sae.W_dec.device))
            shown.step(len(x))
    if not sums.vectors:
        raise ValueError("the source has no vectors.")
    return sums, {"vectors": sums.vectors, "positions": _shown(given)}


def _shown(where: slice | None) -> str:
    if where is None:
        return "all"
    ends = ["" if one is None else str(one) for one in (where.start, where.stop, where.step)]
    return ":".join(ends[: 3 if ends[2] else 2])


class _Runs:
    """A model with and without what an autoencoder makes of one of its sites."""

    def __init__(self, model: Any, sae: SAE, site: Any, out: Any, where: slice | None) -> None:
        if sae.architecture == "crosscoder":
            raise Unsupported(
                "a crosscoder reads several sites, and is not put into a model: evaluate it without model=."
            )
        self.model, self.sae, self.where = model, sae, where or slice(None)
        self.given = site_of(model, sae, site, "hook_name", "site").canonical
        self.there = (
            site_of(model, sae, out, "hook_name_out", "out").canonical
            if sae.is_transcoder
            else self.given
        )

    def measure(
        self, texts: Sequence[Batch], progress: ShowProgress
    ) -> tuple[Reconstruction, dict[str, float], dict[str, Any]]:
        """Over some texts: first what is made of the vectors, with their mean, then the losses."""
        sums = Reconstruction(self.sae)
        total: dict[str, Tensor] = {}
        with Progress(progress, 2 * sum(map(len, texts)), "text") as shown:
            for batch in texts:
                x, y = self._vectors(batch)
                sums.add(x.flatten(0, 1), y.flatten(0, 1))
                shown.step(len(batch))
            if not sums.vectors:
                raise ValueError(f"no text has positions {_shown(self.where)}.")
            mean = sums.mean()
            for batch in texts:
                for name, one in self._losses(batch, mean).items():
                    total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + one
                shown.step(len(batch))
        count = float(total.pop("count"))
        if not count:
            raise ValueError("no text has a token after the positions that are looked at.")
        means = {name: float(one) / count for name, one in total.items()}
        protocol = {
            "site": self.there if self.there == self.given else f"{self.given} -> {self.there}",
            "texts": sum(map(len, texts)),
            "vectors": sums.vectors,
            "predictions": int(count),
            "positions": _shown(self.where),
        }
        return sums, _with_recovered(means), protocol

    def _vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What is read and what is written, at the positions that are looked at, [text, pos, d]."""
        names = list(dict.fromkeys((self.given, self.there)))
        _, cache = self.model.run_with_cache(batch.clean, names_filter=names, return_type=None)
        x, y = (cache[name].flatten(2)[:, self.where] for name in (self.given, self.there))
        return x, y

    def _losses(self, batch: Batch, mean: Tensor) -> dict[str, Tensor]:
        """Sums over predictions: from the first position that is replaced on."""
        tokens = batch.clean
        places = range(tokens.shape[1])[self.where]
        if not len(places) or min(places) >= tokens.shape[1] - 1:
            return {"count": torch.zeros((), dtype=torch.float64)}
        after = slice(min(places), tokens.shape[1] - 1)
        logits, cache = self.model.run_with_cache(tokens, names_filter=[self.given])
        x = cache[self.given].flatten(2)[:, self.where]
        mine = self.sae(x)
        clean = logits[:, after].float().log_softmax(-1)
        goal = tokens[:, after.start + 1 :, None]
        found = {"loss": -clean.gather(-1, goal).double().sum()}
        for name, new in (("replaced", mine), ("zero", torch.zeros_like(mine)), ("mean", mean)):
            other = self._with(tokens, new)[:, after].float().log_softmax(-1)
            found[f"loss_{name}"] = -other.gather(-1, goal).double().sum()
            if name != "mean":
                word = "kl" if name == "replaced" else "kl_zero"
                found[word] = (clean.exp() * (clean - other)).double().sum()
        found["count"] = torch.tensor(float(goal.numel()), dtype=torch.float64)
        return {name: one.cpu() for name, one in found.items()}

    def _with(self, tokens: Tensor, new: Tensor) -> Any:
        """The logits with other vectors at the positions."""

        def put(value: Tensor, hook: Any) -> None:  # noqa: ARG001
            here = value[:, self.where]
            value[:, self.where] = new.to(value).expand(*here.shape[:2], -1).reshape(here.shape)

        return self.model.run_with_hooks(tokens, fwd_hooks=[(self.there, put)])


def _with_recovered(means: Mapping[str, float]) -> dict[str, float]:
    found = dict(means)
    for word, base in (("recovered", "loss_zero"), ("recovered_mean", "loss_mean")):
        gap = means[base] - means["loss"]
        found[word] = (means[base] - means["loss_replaced"]) / gap if gap else float("nan")
    return {name: found[name] for name in SAID if name in found}
