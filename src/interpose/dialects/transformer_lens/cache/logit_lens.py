"""The logit lens: the stream after each layer, read through the final norm and the unembedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.taps.context import unheard

if TYPE_CHECKING:
    from interpose.dialects.transformer_lens.cache.activation_cache import ActivationCache


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitLensResult:
    """What each layer would say.

    Attributes:
        values: [entry, ..., d_vocab], or [entry, ..., token] if some tokens were asked for.
        labels: Where the stream was read: ``0_pre``, ..., ``final_post``.
        top: For each entry, the likeliest tokens of the first text at its last position, as strings.
    """

    values: Tensor
    labels: list[str]
    top: list[list[str]]

    def __repr__(self) -> str:
        lines = [
            f"{label:>12}  {' '.join(map(repr, words))}"
            for label, words in zip(self.labels, self.top)
        ]
        return "\n".join(["LogitLensResult", *lines])


@torch.no_grad()
def logit_lens(
    cache: ActivationCache,
    *,
    layers: Sequence[int] | None = None,
    incl_mid: bool = False,
    positions: Any = -1,
    lens: Callable[[Tensor, int], Tensor] | None = None,
    apply_ln: bool = True,
    targets: Any = None,
    return_type: str = "logits",
    top_k: int = 5,
) -> LogitLensResult:
    """Read the accumulated stream as the model reads its last state: the last entry is the unembedding's own output.

    A softcap or a scale that the model applies to its logits afterwards is left out.

    Args:
        cache: with the stream of every layer.
        layers: which entries; None for all.
        incl_mid: also between attention and MLP.
        positions: which positions; by default the last.
        lens: changes each entry before the norm, by its number: a tuned lens.
        apply_ln: go through the final norm, with each entry's own scale.
        targets: only these tokens, as strings or numbers.
        return_type: ``logits``, ``log_probs`` or ``probs``.
        top_k: how many likeliest tokens are named.
    """
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "logits": lambda logits: logits,
        "log_probs": lambda logits: logits.log_softmax(-1),
        "probs": lambda logits: logits.softmax(-1),
    }
    if return_type not in kinds:
        raise ValueError(f"return_type is {', '.join(map(repr, kinds))}; got {return_type!r}")
    stack, labels = cache.accumulated_resid(
        incl_mid=incl_mid, pos_slice=positions, return_labels=True
    )
    if lens is not None:
        stack = torch.stack([lens(entry, number) for number, entry in enumerate(stack)])
    if layers is not None:
        stack, labels = stack[list(layers)], [labels[layer] for layer in layers]
    model = cache.model
    if apply_ln:
        stack = cache.apply_ln_to_stack(stack, recompute_ln=True)
    with unheard():
        logits = model.unembed(stack)
    first = logits[:, 0] if cache.has_batch_dim else logits
    first = first[:, -1] if first.ndim > 2 else first
    top = [
        [
            str(token if model.tokenizer is None else model.to_string([token]))
            for token in row.topk(top_k).indices.tolist()
        ]
        for row in first
    ]
    values = kinds[return_type](logits)
    if targets is not None:
        given = [targets] if isinstance(targets, (str, int)) else list(targets)
        ids = [
            model.to_single_token(word) if isinstance(word, str) else int(word) for word in given
        ]
        values = values[..., ids]
    return LogitLensResult(values=values, labels=labels, top=top)
