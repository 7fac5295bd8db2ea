"""`Experiment`: a model's name, texts, edits, metrics and perhaps a sweep, as one piece of plain data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from interpose.edits.edit import Edit
from interpose.experiments import saving, script
from interpose.experiments.measure import Measured, measure, speaks_of_rows
from interpose.files.schema import Field
from interpose.models.loading import as_model, load
from interpose.models.running.rows import read_tokens
from interpose.models.running.text import is_text
from interpose.models.transformer import TransformerModel
from interpose.progress import ShowProgress
from interpose.sweeps import sweep as sweeps
from interpose.sweeps.metrics import as_metric
from interpose.sweeps.result import SweepResult

Text = str | Sequence[int]
"""A text, or its tokens."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Experiment:
    """What is done to which model, on which texts, and what is measured.

    ```python
    experiment = ip.Experiment(
        model="pocket",
        inputs=["The Eiffel Tower is in"],
        edits=[ip.zero("z", layer=5, head=3)],
        metrics=ip.metrics.logit_difference(" Paris", " Rome"),
    )
    print(experiment.run())          # each text's metric, without the edits and with them
    experiment.save("paris.json")    # then: interpose run paris.json
    print(experiment.to_python())    # the same as a script
    ```

    Two experiments that say the same are equal.

    Args:
        model: what `ip.load` takes; or a model itself, for an experiment that stays in memory.
        metrics: one of `ip.metrics`, or several by name.
        inputs: texts (or tokens) for an experiment without a sweep.
        clean: texts for a sweep.
        corrupt: the texts it compares them with, if any.
        edits: all in force at once, also in every run of a sweep (which then runs cell by cell).
        sweep: what `ip.sweep` takes besides, as a dictionary: ``site``, ``over``, ``patch``, ``layer``, ...; and
            ``edit``, an edit that is made at each place instead of patching (its sites are the sweep's).
        prepend_bos: as in ``to_tokens``.
        dtype: of the weights, such as ``bfloat16``; by default as they were saved.
    """

    model: Any
    metrics: Any
    inputs: Sequence[Text] | str | None = None
    clean: Sequence[Text] | str | None = None
    corrupt: Sequence[Text] | str | None = None
    edits: Sequence[Edit] = ()
    sweep: Mapping[str, Any] | None = None
    prepend_bos: bool | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        made = vars(self)
        if isinstance(self.model, Path):
            made["model"] = str(self.model)
        made["metrics"] = _metrics(self.metrics)
        for name in ("inputs", "clean", "corrupt"):
            made[name] = _texts(made[name], name)
        made["edits"] = (self.edits,) if isinstance(self.edits, Edit) else tuple(self.edits)
        for edit in self.edits:
            if not isinstance(edit, Edit):
                raise TypeError(
                    f"edits of an experiment are data, such as ip.zero('z', layer=3); got {edit!r}."
                )
        if self.prepend_bos not in (None, True, False):
            raise TypeError(f"prepend_bos is True, False or None; got {self.prepend_bos!r}.")
        if self.dtype is not None and not isinstance(
            getattr(torch, str(self.dtype), None), torch.dtype
        ):
            raise ValueError(f"no dtype {self.dtype!r}; try float32, bfloat16 or float16.")
        if self.sweep is None:
            if not self.inputs or self.clean or self.corrupt:
                raise ValueError(
                    "an experiment without a sweep has inputs=[...]; clean= and corrupt= go with sweep={...}."
                )
            return
        made["sweep"] = _sweep(self.sweep)
        if not self.clean or self.inputs:
            raise ValueError("a sweep has clean=[...], and corrupt=[...] to patch from; no inputs.")
        for edit in filter(speaks_of_rows, made["edits"]):
            raise ValueError(
                f"{edit!r} speaks of rows of the batch, and a sweep makes its own batches. The edit that it makes at "
                "each place is sweep={'edit': ...}."
            )

    # Running.

    def run(
        self,
        model: TransformerModel | None = None,
        *,
        device: str | torch.device | None = None,
        progress: ShowProgress = True,
    ) -> Measured | SweepResult:
        """Do it: what a sweep found, or each text's metric without the edits and with them.

        Args:
            model: already loaded; by default the one that is named.
            device: where to load it.
            progress: as in `ip.sweep`.
        """
        model = model if model is not None else self._loaded(device)
        if self.sweep is None:
            return measure(
                model,
                self.inputs,
                self.metrics,
                edits=self.edits,
                prepend_bos=self.prepend_bos,
                progress=progress,
            )
        words = dict(self.sweep)
        if "edit" in words:
            words["edit"] = placed(words["edit"])
        with model.hooks(list(self.edits)) if self.edits else nullcontext():
            return sweeps.sweep(
                model,
                self.clean,
                self.corrupt,
                metric=self.metrics,
                prepend_bos=self.prepend_bos,
                progress=progress,
                **words,
            )

    def _loaded(self, device: str | torch.device | None) -> TransformerModel:
        if isinstance(self.model, str):
            dtype = None if self.dtype is None else getattr(torch, self.dtype)
            return load(self.model, device=device, dtype=dtype)
        return cast(TransformerModel, as_model(self.model))

    # Data.

    def to_dict(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Itself as data that JSON takes.

        Args:
            tensors: gets the tensors of edits, by the names that the dictionary has for them. Without it they are
                written into the dictionary.
        """
        return saving.as_data(self, tensors)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> Experiment:
        """What `to_dict` wrote."""
        return saving.made_of(cls, data, tensors, Field("this dictionary"))

    def save(self, path: str | Path) -> None:
        """Write a JSON file, and a safetensors file beside it if edits hold tensors.

        What was there before stays whole until the new one is complete.
        """
        saving.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Experiment:
        """Read what `save` wrote."""
        return saving.load(cls, Path(path))

    def to_python(self, path: str | Path | None = None) -> str:
        """A short script that does the same and prints the same.

        Args:
            path: where the experiment is saved, if its edits hold tensors that are too large to be written out: the
                script, put beside it, loads them from there.
        """
        return script.written(self, None if path is None else Path(path))

    @functools.cached_property
    def key(self) -> str:
        """A hash of what it says: equal for equal experiments, in every process."""
        return saving.digest(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Experiment):
            return NotImplemented
        return self is other or self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[Any, ...]:
        named = isinstance(self.model, str)
        try:
            plain = self if named else dataclasses.replace(self, model="")
            return (None if named else id(self.model), plain.key)
        except ValueError:  # it holds what cannot be written down
            return (id(self),)

    def __repr__(self) -> str:
        model = repr(self.model) if isinstance(self.model, str) else type(self.model).__name__
        named = self.metrics if isinstance(self.metrics, dict) else {"": self.metrics}
        lines = [f"Experiment on {model}: {', '.join(map(repr, named.values()))}"]
        texts: Any = self.inputs or self.clean
        more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        lines.append(f"  {'text' if self.inputs else 'clean'}: {texts[0]!r}{more}")
        if self.corrupt:
            lines.append(f"  corrupt: {self.corrupt[0]!r}{more}")
        lines += [f"  edit: {edit!r}" for edit in self.edits]
        if self.sweep is not None:
            said = ", ".join(f"{name}={value!r}" for name, value in self.sweep.items())
            lines.append(f"  sweep: {said}")
        return "\n".join(lines)


def placed(edit: Edit) -> Callable[..., Edit]:
    """What makes an edit at each place of a sweep."""
    return lambda site, **part: dataclasses.replace(edit, site=site, **part)


def _metrics(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return as_metric(given)
    if not given or not all(isinstance(name, str) for name in given):
        raise ValueError("metrics have names: {'lead': ip.metrics.logit_difference(...)}.")
    return {name: as_metric(metric) for name, metric in given.items()}


def _texts(given: Any, name: str) -> tuple[Any, ...] | None:
    """Texts as a tuple; tokens as lists of numbers, without padding that is known."""
    if given is None:
        return None
    if isinstance(given, str):
        return (given,)
    found = given if isinstance(given, (Mapping, Tensor)) else list(given)
    strings = {isinstance(text, str) for text in found}
    if len(strings) > 1:
        raise TypeError(f"{name} are texts, or tokens, not both.")
    return tuple(found if is_text(found) else read_tokens(found))


def _sweep(given: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a sweep, as JSON has them."""
    found = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(found) - set(saving.SWEEP_WORDS))
    if unknown:
        raise ValueError(
            f"a sweep has {', '.join(saving.SWEEP_WORDS)}; {unknown[0]!r} is none of them."
        )
    for name in ("site", "over", "layer", "head", "neuron", "pos"):
        value = found.get(name)
        if isinstance(value, int):
            value = [value]
        if value is not None and not isinstance(value, str):
            found[name] = [one if isinstance(one, str) else int(one) for one in value]
    edit = found.get("edit")
    if isinstance(edit, type) and issubclass(edit, Edit):
        edit = found["edit"] = edit(found.get("site", "resid_pre"))
    if edit is None:
        return found
    if not isinstance(edit, Edit):
        raise TypeError(f"the edit of a sweep is data, such as ip.zero('z'); got {edit!r}.")
    site = edit.where.site
    over = found.get("over", ("layer", "pos"))
    twice = [
        axis
        for axis in over
        if axis in ("head", "neuron", "pos") and getattr(edit, axis) is not None
    ]
    if twice:
        raise ValueError(
            f"{edit!r} says which {twice[0]}, and the sweep goes over {twice[0]!r}: choose with "
            f"{twice[0]}=[...] of the sweep, or leave it out of over."
        )
    if edit.layer is not None or found.setdefault("site", site) != site:
        raise ValueError(
            f"{edit!r} is made at each place of the sweep: it names the sweep's site, and no layer."
        )
    return found
