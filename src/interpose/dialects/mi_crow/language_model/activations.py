"""`LanguageModelActivations`: what layers return for many texts, into the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch

from interpose.dialects.mi_crow.hooks.detector import detectors_off
from interpose.dialects.mi_crow.language_model.context import LanguageModelContext
from interpose.dialects.mi_crow.language_model.layers import Signature
from interpose.dialects.mi_crow.store.harvested import ACTIVATIONS
from interpose.dialects.mi_crow.store.store import new_run_id
from interpose.errors import AmbiguousSite, Unsupported
from interpose.models.transformer import TransformerModel
from interpose.store.harvest import harvest

_LONGEST = 2048


class Rows:
    """The tokens of texts, counted, each cut where it is too long."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> list[int]:
        return self._rows[number]


class StreamedRows:
    """The same for texts that come one by one."""

    def __init__(self, texts: Iterable[str], rows: Any) -> None:
        self._texts, self._make = texts, rows

    def __iter__(self) -> Iterator[list[int]]:
        texts = iter(self._texts)
        while some := list(islice(texts, 256)):
            yield from self._make(some)


class LanguageModelActivations:
    """Saves activations. What is written stays whatever happens, and the same call goes on where one was ended."""

    def __init__(self, context: LanguageModelContext) -> None:
        self.context = context

    def save_activations(
        self,
        texts: Sequence[str],
        layer_signature: Signature | Sequence[Signature],
        run_name: str | None = None,
        batch_size: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        autocast: bool = True,
        autocast_dtype: torch.dtype | None = None,
        free_cuda_cache_every: int = 0,  # noqa: ARG002 - nothing is emptied that is not asked for
        verbose: bool = False,
        save_in_batches: bool = True,  # noqa: ARG002 - one layout serves both
        save_attention_mask: bool = False,  # noqa: ARG002 - tokens are kept in any case
        stop_after_last_layer: bool = True,  # noqa: ARG002 - runs end after the last layer asked for
    ) -> str:
        """Save what some layers return for texts, and return the run's name.

        Args:
            texts: the texts.
            layer_signature: a layer, or several in any order, by any of their names.
            run_name: what to keep it under; made up unless given.
            batch_size: how many texts a batch of the run has, as it is read back; by default all.
            dtype: to save in; by default the model's own.
            max_length: cut texts that have more tokens.
            autocast: whether ``autocast_dtype`` counts.
            autocast_dtype: what to compute in; by default the model's own dtype.
            free_cuda_cache_every: has no effect: memory is not held.
            verbose: show a bar.
            save_in_batches: has no effect.
            save_attention_mask: has no effect: which tokens are text is always known.
            stop_after_last_layer: has no effect: layers behind the last one asked for are not run.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            raise ValueError("Texts list cannot be empty: give at least one.")
        limit = self._limit(max_length)
        options = {"dtype": dtype, "max_length": max_length, "batch_size": batch_size or len(texts)}
        return self._save(
            Rows(self.context.language_model.lm_tokenizer.rows(texts, limit)),
            layer_signature,
            run_name,
            options,
            limit=limit,
            autocast=autocast_dtype if autocast else None,
            verbose=verbose,
            about={"length": len(texts)},
        )

    def save_activations_dataset(
        self,
        dataset: Any,
        layer_signature: Signature | Sequence[Signature],
        run_name: str | None = None,
        batch_size: int = 32,
        *,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        autocast: bool = True,
        autocast_dtype: torch.dtype | None = None,
        free_cuda_cache_every: int = 0,  # noqa: ARG002
        verbose: bool = False,
        save_in_batches: bool = True,  # noqa: ARG002
        save_attention_mask: bool = False,  # noqa: ARG002
        stop_after_last_layer: bool = True,  # noqa: ARG002
        shard_size: int | None = None,
    ) -> str:
        """The same for a data set, also for one that is streamed.

        Args:
            dataset: one of `interpose.dialects.mi_crow.datasets`, or texts.
            layer_signature: as in `save_activations`.
            run_name: as in `save_activations`.
            batch_size: as in `save_activations`.
            dtype: as in `save_activations`.
            max_length: as in `save_activations`.
            autocast: as in `save_activations`.
            autocast_dtype: as in `save_activations`.
            free_cuda_cache_every: has no effect.
            verbose: as in `save_activations`.
            save_in_batches: has no effect.
            save_attention_mask: has no effect.
            stop_after_last_layer: has no effect.
            shard_size: how many texts are written together.
        """
        limit = self._limit(max_length)
        tokenizer = self.context.language_model.lm_tokenizer
        counted = not getattr(dataset, "is_streaming", not hasattr(dataset, "__len__"))
        rows: Any
        if counted:
            rows = Rows(tokenizer.rows(_texts(dataset, list(dataset)), limit))
        else:
            rows = StreamedRows(_each_text(dataset), lambda some: tokenizer.rows(some, limit))
        return self._save(
            rows,
            layer_signature,
            run_name,
            {"dtype": dtype, "max_length": max_length, "batch_size": batch_size},
            limit=limit,
            autocast=autocast_dtype if autocast else None,
            verbose=verbose,
            about={"length": len(dataset) if counted else None},
            shard_size=shard_size,
        )

    def save(
        self,
        layer_signature: Signature | Sequence[Signature],
        dataset: Any,
        sample_limit: int | None = None,
        batch_size: int = 32,
        shard_size: int | None = None,
        run_name: str | None = None,
        **options: Any,
    ) -> str:
        """Save what some layers return for a data set, as mi-crow's guide has it, and return the run's name.

        Args:
            layer_signature: as in `save_activations`.
            dataset: as in `save_activations_dataset`.
            sample_limit: how many texts at most, from the first on.
            batch_size: as in `save_activations`.
            shard_size: how many texts are written together.
            run_name: as in `save_activations`.
            **options: as in `save_activations_dataset`.
        """
        if sample_limit is not None:
            dataset = list(islice(_each_text(dataset), sample_limit))
        options |= {"batch_size": batch_size, "shard_size": shard_size}
        return self.save_activations_dataset(dataset, layer_signature, run_name, **options)

    def _save(
        self,
        rows: Any,
        layer_signature: Any,
        run_name: str | None,
        options: dict[str, Any],
        *,
        limit: int,
        autocast: torch.dtype | None,
        verbose: bool,
        about: dict[str, Any],
        shard_size: int | None = None,
    ) -> str:
        context, layers = self.context, self.context.language_model.layers
        if context.store is None:
            raise ValueError("Store must be provided or set on the language model.")
        if not isinstance(context.view, TransformerModel):
            raise Unsupported(
                f"activations are saved of models of transformers, and this is {type(context.model).__name__}. With "
                "LayerActivationDetector, lm.inference.infer_texts(texts, run_name=...) keeps those of any module."
            )
        run_name = run_name or new_run_id()
        several = isinstance(layer_signature, (list, tuple))
        signatures = list(layer_signature) if several else [layer_signature]
        if not signatures:
            raise ValueError(
                "say which layers: layer_signature='...', an index, or several in a list."
            )
        computed = torch.autocast(context.view.device.type, dtype=autocast) if autocast else None
        with detectors_off(), computed or nullcontext():
            sites = {str(one): self._site(context.view, layers.path_of(one)) for one in signatures}
            said = {
                name: str(one) if isinstance(one, torch.dtype) else one
                for name, one in options.items()
            }
            context.store.put_run_metadata(
                run_name,
                {
                    "run_name": run_name,
                    "model": context.model_id,
                    "options": said,
                    "dataset": about,
                    "layer_signatures": list(sites),
                    "num_layers": len(sites),
                    "sites": sites,
                },
            )
            harvest(
                context.view,
                rows,
                list(dict.fromkeys(sites.values())),
                store=context.store.run_path(run_name) / ACTIVATIONS,
                dtype=options["dtype"],
                length=max(2, limit),
                segment_texts=shard_size,
                progress=verbose,
            )
        return run_name

    def _limit(self, max_length: int | None) -> int:
        """How many tokens a text may have."""
        longest = self.context.language_model.lm_tokenizer.longest()
        return min(one for one in (max_length, longest, None if longest else _LONGEST) if one)

    def _site(self, view: TransformerModel, path: str) -> str:
        """The site of a layer: its output, or the first tensor of it."""
        tokens = torch.full((1, 2), view._filler())
        site = self.context.language_model.layers.site_of(path) if path else "output"
        try:
            with torch.no_grad():
                _, cache = view.run_with_cache(tokens, names_filter=[site])
        except AmbiguousSite:
            return f"{path}.output[0]"
        return next(iter(cache))


def _each_text(dataset: Any) -> Iterator[str]:
    """Every text of a data set, or of texts."""
    for item in dataset:
        yield from _texts(dataset, [item])


def _texts(dataset: Any, items: list[Any]) -> list[str]:
    extract = getattr(dataset, "extract_texts_from_batch", None)
    return items if extract is None else extract(items)
