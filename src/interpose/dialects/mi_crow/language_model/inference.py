"""`InferenceEngine`: texts through the model, with the hooks that are registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from interpose.dialects.mi_crow.hooks.controller import controllers_off
from interpose.dialects.mi_crow.hooks.tensors import main_tensor
from interpose.dialects.mi_crow.language_model.context import LanguageModelContext
from interpose.dialects.mi_crow.language_model.layers import Signature
from interpose.engine.hooks import torch_hook
from interpose.models.running import masks
from interpose.models.transformer import TransformerModel
from interpose.progress import Progress, count


class _Stopped(BaseException):
    """Ends a forward pass with what a layer returned."""

    def __init__(self, output: Any) -> None:
        super().__init__("the forward pass ends here")
        self.output = output


class InferenceEngine:
    """Runs texts without gradients. For gradients call ``lm.model`` itself: registered hooks are live there too."""

    def __init__(self, context: LanguageModelContext) -> None:
        self.context = context

    def execute_inference(
        self,
        texts: Sequence[str],
        tok_kwargs: Mapping[str, Any] | None = None,
        autocast: bool = True,
        autocast_dtype: torch.dtype | None = None,
        with_controllers: bool = True,
        stop_after_layer: Signature = None,
    ) -> tuple[Any, Any]:
        """Run some texts together: what the model returned, and what the tokenizer did.

        Args:
            texts: some texts.
            tok_kwargs: for the tokenizer; they are not changed.
            autocast: whether ``autocast_dtype`` counts.
            autocast_dtype: what to compute in; by default the model's own dtype.
            with_controllers: False leaves values as they are; detectors look all the same.
            stop_after_layer: end after this layer, and return what it returned.
        """
        if isinstance(texts, str):
            texts = [texts]
        if not len(texts):
            raise ValueError("Texts list cannot be empty: give at least one.")
        language_model = self.context.language_model
        encodings = language_model.tokenize(texts, **(tok_kwargs or {}))
        given = self._arguments(encodings)
        on = nullcontext() if with_controllers else controllers_off()
        with torch.no_grad(), on, self._autocast(autocast_dtype if autocast else None):
            return self._run(given, stop_after_layer), encodings

    def _arguments(self, encodings: Any) -> dict[str, Any]:
        """What the model takes for padded texts, so that each has the values that it has alone."""
        view = self.context.view
        given = {
            name: value.to(view.device) if isinstance(value, Tensor) else value
            for name, value in encodings.items()
        }
        tokens, mask = given.get("input_ids"), given.get("attention_mask")
        if isinstance(view, TransformerModel) and tokens is not None and mask is not None:
            given |= view._with_mask(masks.remember(tokens.clone(), mask), mask)
        return given

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.context.view.device.type, dtype=dtype)

    def _run(self, given: dict[str, Any], stop_after_layer: Signature) -> Any:
        view, layers = self.context.view, self.context.language_model.layers
        if stop_after_layer is None:
            return view(**given)

        def stop(module: Any, args: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
            raise _Stopped(output)

        site = layers.site_of(layers.path_of(stop_after_layer))
        try:
            with view.hooks([(site, torch_hook(stop))]):
                return view(**given)
        except _Stopped as stopped:
            return stopped.output

    def infer_texts(
        self,
        texts: Sequence[str],
        run_name: str | None = None,
        batch_size: int | None = None,
        tok_kwargs: Mapping[str, Any] | None = None,
        autocast: bool = True,
        autocast_dtype: torch.dtype | None = None,
        with_controllers: bool = True,
        clear_detectors_before: bool = False,
        verbose: bool = False,
        stop_after_layer: Signature = None,
        save_in_batches: bool = True,
    ) -> tuple[Any, Any]:
        """Run texts batch by batch: what the model returned and the tokenizer did, of several batches a list each.

        Args:
            texts: the texts.
            run_name: keep what detectors find in the store under this name, batch by batch.
            batch_size: how many run together; by default all.
            tok_kwargs: as in `execute_inference`.
            autocast: as in `execute_inference`.
            autocast_dtype: as in `execute_inference`.
            with_controllers: as in `execute_inference`.
            clear_detectors_before: let detectors forget what they know first.
            verbose: show a bar.
            stop_after_layer: as in `execute_inference`.
            save_in_batches: False keeps all batches in one place of the run.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            raise ValueError("Texts list cannot be empty: give at least one.")
        options = {
            "tok_kwargs": tok_kwargs,
            "autocast": autocast,
            "autocast_dtype": autocast_dtype,
            "with_controllers": with_controllers,
            "stop_after_layer": stop_after_layer,
        }
        self._begin(
            run_name, clear_detectors_before, {"batch_size": batch_size, "length": len(texts)}
        )
        size = batch_size or len(texts)
        batches = [texts[at : at + size] for at in range(0, len(texts), size)]
        outputs, encodings = [], []
        for output, encoding in self._batches(batches, run_name, options, verbose, save_in_batches):
            outputs.append(output)
            encodings.append(encoding)
        if len(batches) == 1:
            return outputs[0], encodings[0]
        return outputs, encodings

    def infer_dataset(
        self,
        dataset: Any,
        run_name: str | None = None,
        batch_size: int = 32,
        tok_kwargs: Mapping[str, Any] | None = None,
        autocast: bool = True,
        autocast_dtype: torch.dtype | None = None,
        with_controllers: bool = True,
        free_cuda_cache_every: int = 0,  # noqa: ARG002 - nothing is emptied that is not asked for
        clear_detectors_before: bool = False,
        verbose: bool = False,
        stop_after_layer: Signature = None,
        save_in_batches: bool = True,
    ) -> str:
        """Run a data set batch by batch, keep what detectors find in the store, and return the run's name.

        Args:
            dataset: one of `interpose.dialects.mi_crow.datasets`.
            run_name: what to keep it under; made up unless given.
            batch_size: how many texts run together.
            tok_kwargs: as in `execute_inference`.
            autocast: as in `execute_inference`.
            autocast_dtype: as in `execute_inference`.
            with_controllers: as in `execute_inference`.
            free_cuda_cache_every: has no effect: memory is not held.
            clear_detectors_before: as in `infer_texts`.
            verbose: as in `infer_texts`.
            stop_after_layer: as in `execute_inference`.
            save_in_batches: as in `infer_texts`.
        """
        from interpose.dialects.mi_crow.store.store import new_run_id

        run_name = run_name or new_run_id()
        options = {
            "tok_kwargs": tok_kwargs,
            "autocast": autocast,
            "autocast_dtype": autocast_dtype,
            "with_controllers": with_controllers,
            "stop_after_layer": stop_after_layer,
        }
        self._begin(run_name, clear_detectors_before, {"batch_size": batch_size})
        batches = map(dataset.extract_texts_from_batch, dataset.iter_batches(batch_size))
        for _ in self._batches(batches, run_name, options, verbose, save_in_batches):
            pass  # what the model returned is not kept
        return run_name

    def _begin(self, run_name: str | None, clear: bool, options: dict[str, Any]) -> None:
        language_model, store = self.context.language_model, self.context.store
        if run_name is not None:
            if store is None:
                raise ValueError("run_name needs a store: LanguageModel(model, tokenizer, store).")
            detectors = language_model.layers.get_detectors()
            store.put_run_metadata(
                run_name,
                {
                    "run_name": run_name,
                    "model": self.context.model_id,
                    "options": options,
                    "layer_signatures": [str(one.layer_signature) for one in detectors],
                },
            )
        if clear:
            language_model.clear_detectors()

    def _batches(
        self,
        batches: Iterable[Sequence[str]],
        run_name: str | None,
        options: dict[str, Any],
        verbose: bool,
        apart: bool,
    ) -> Iterator[tuple[Any, Any]]:
        with Progress(verbose, count(batches), "batch") as bar:
            for number, texts in enumerate(batches):
                output, encodings = self.execute_inference(texts, **options)
                if run_name is not None:
                    self.context.language_model.save_detector_metadata(
                        run_name, number, unified=not apart, inputs=encodings
                    )
                yield output, encodings
                bar.step()

    def extract_logits(self, output: Any) -> Tensor:
        """The logits in what a model returned: its ``logits``, the first of a tuple, or itself."""
        logits = getattr(output, "logits", None)
        if logits is None:
            logits = main_tensor(output)
        if not isinstance(logits, Tensor):
            raise ValueError(f"there are no logits in a {type(output).__name__}.")
        return logits
