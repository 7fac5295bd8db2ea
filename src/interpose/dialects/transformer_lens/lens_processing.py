"""Processed weights: norms folded into what reads them, and so on, on a copy of the model.

A model of transformers still runs its own forward, with other numbers in its parameters. What is not exact is refused
with the reason; flags that nobody set are done where they are exact, as in `from_pretrained`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.lens_text import LensText
from interpose.dialects.transformer_lens.scratch import processing
from interpose.dialects.transformer_lens.scratch.transformer import Transformer
from interpose.errors import Unsupported
from interpose.models.discovery.inputs import probe_inputs
from interpose.models.processing.observed import TOLERANCE
from interpose.models.processing.process import process
from interpose.taps.context import unheard


class LensProcessing(LensText):
    """The part of a `HookedTransformer` that processes weights."""

    _processed: tuple[str, ...] = ()
    """The flags that were done."""

    def process_weights_(
        self,
        fold_ln: bool | None = None,
        center_writing_weights: bool | None = None,
        center_unembed: bool | None = None,
        refactor_factored_attn_matrices: bool | None = False,
        fold_value_biases: bool | None = None,
        *,
        copy: bool = True,
    ) -> Self:
        """Go over to processed weights: those of a copy, so that a module of yours stays as it is.

        Args:
            fold_ln: what norms multiply with and add goes into the weights that read them. True insists, None does it
                where it is exact; so with all flags.
            center_writing_weights: whatever writes to the stream writes with mean zero.
            center_unembed: logits have mean zero over the vocabulary.
            refactor_factored_attn_matrices: each head's factors become those of a singular value decomposition.
            fold_value_biases: the biases of values go into those of outputs.
            copy: False changes the module itself, for one that nobody else holds: less memory.
        """
        asked = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        if self.list_hooks():
            raise Unsupported("there are hooks on the model: call reset_hooks() before processing.")
        self._become(*self._processed_module(asked, copy))
        return self

    process_weights = process_weights_

    def load_and_process_state_dict(
        self,
        state_dict: dict[str, Tensor],
        fold_ln: bool | None = None,
        center_writing_weights: bool | None = None,
        center_unembed: bool | None = None,
        fold_value_biases: bool | None = None,
        refactor_factored_attn_matrices: bool | None = False,
    ) -> None:
        """Load a state dict, and process the weights as in `process_weights_`."""
        self.load_state_dict(state_dict)
        self.process_weights_(
            fold_ln,
            center_writing_weights,
            center_unembed,
            refactor_factored_attn_matrices,
            fold_value_biases,
        )

    def _processed_module(
        self, asked: dict[str, bool | None], copy: bool
    ) -> tuple[Any, tuple[str, ...]]:
        """A module with processed weights, and the flags that were done."""
        if isinstance(self.module, Transformer):
            return _rebuilt(self.module, asked)
        made, done = process(self, asked, copy=copy)
        return made.module, done

    def _become(self, module: Any, done: tuple[str, ...]) -> None:
        """Be a model around another module."""
        kept = {
            "tokenizer": self.tokenizer,
            "processor": self.processor,
            "default_padding_side": self.default_padding_side,
        }
        prepends, n_ctx = self.default_prepend_bos, self._n_ctx
        vars(self).clear()
        self.__init__(module, **kept)  # type: ignore[misc]
        self._processed = done
        self.default_prepend_bos = prepends
        if n_ctx is not None:
            self.shorten(n_ctx)


@torch.no_grad()
def _rebuilt(
    module: Transformer, asked: dict[str, bool | None]
) -> tuple[Transformer, tuple[str, ...]]:
    """A module from scratch like another, with processed weights: proven to compute the same."""
    state, cfg, done = processing.process(module.state_dict(), module.cfg, asked)
    made = Transformer(cfg).to(module.cfg.device)
    made.load_state_dict(state)
    made.train(module.training)
    inputs = probe_inputs(module)
    with unheard():
        before, after = (each(**inputs).double().log_softmax(-1) for each in (module, made))
    far = float((before - after).abs().max() / before.abs().max())
    if not far <= TOLERANCE[cfg.dtype]:
        raise Unsupported(f"processed weights change log-probabilities by {far:.2g} of their size.")
    return made, done
