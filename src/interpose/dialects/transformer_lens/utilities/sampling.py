"""From logits to a next token, and to a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.utilities.optional import needs


def sample_logits(
    final_logits: Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    tokens: Tensor | None = None,
) -> Tensor:
    """A next token for each text, [batch], drawn from logits [batch, d_vocab].

    In this order: repetition penalty, temperature, frequency penalty, top k or else top p. With both,
    top p is not asked; with temperature 0, the likeliest token after the repetition penalty is taken
    and nothing else is asked. TransformerLens has it so, and seeds give the same tokens.

    Args:
        final_logits: logits of the last position.
        top_k: draw from so many of the likeliest tokens.
        top_p: draw from the fewest likeliest tokens with this probability together, in (0, 1].
        temperature: logits are divided by it.
        freq_penalty: taken off a token's logit for each time that it is in ``tokens``.
        repetition_penalty: tokens that are in ``tokens`` have a positive logit divided by it, a
            negative one multiplied.
        tokens: the texts so far, [batch, pos], for the two penalties.
    """
    logits = final_logits
    if temperature < 0:
        raise ValueError(f"temperature is 0 or more; got {temperature}")
    if tokens is None and (freq_penalty != 0 or repetition_penalty != 1):
        raise ValueError(
            "freq_penalty and repetition_penalty count tokens that are there already: give tokens=, "
            "[batch, pos]."
        )
    if tokens is not None and repetition_penalty != 1:
        if repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty is more than 0; got {repetition_penalty}")
        harder = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(_counts(tokens, logits) > 0, harder, logits)
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if tokens is not None and freq_penalty != 0:
        logits = logits - freq_penalty * _counts(tokens, logits)
    if top_k is not None:
        logits = _only_top_k(logits, top_k)
    elif top_p is not None:
        logits = _only_top_p(logits, top_p)
    drawn: Tensor = torch.distributions.Categorical(logits=logits).sample()
    return drawn


def _counts(tokens: Tensor, logits: Tensor) -> Tensor:
    """How often each token is there, of the shape of the logits."""
    ones = torch.ones(tokens.shape, dtype=logits.dtype, device=logits.device)
    return torch.zeros_like(logits).scatter_add_(-1, tokens.to(logits.device), ones)


def _only_top_k(logits: Tensor, top_k: int) -> Tensor:
    if top_k <= 0:
        raise ValueError(f"top_k is 1 or more; got {top_k}")
    least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def _only_top_p(logits: Tensor, top_p: float) -> Tensor:
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is in (0, 1]; got {top_p}")
    ordered, places = logits.sort(descending=True)
    probs = ordered.softmax(-1)
    # One is out if those before it are enough already; so the likeliest stays, whatever top_p is.
    out = probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, places, out), -torch.inf)


def logits_to_df(logits: Tensor, tokenizer: Any = None, top_k: int | None = None) -> Any:
    """A pandas table of tokens, the likeliest first: index, string, logit, log probability, probability.

    Args:
        logits: of one position, [d_vocab].
        tokenizer: what has the strings; without one there are none.
        top_k: how many tokens; None for all.
    """
    pandas = needs("pandas", "logits_to_df")
    if logits.ndim != 1:
        raise ValueError(
            f"a table is of one position's logits, [d_vocab]; got {list(logits.shape)}"
        )
    count = len(logits) if top_k is None else min(top_k, len(logits))
    values = logits.detach().float().cpu()
    chosen = values.argsort(descending=True)[:count]
    log_probs = values.log_softmax(-1)[chosen]
    columns: dict[str, list[Any]] = {"token_index": chosen.tolist()}
    if tokenizer is not None:
        columns["token_string"] = [tokenizer.decode([index]) for index in chosen.tolist()]
    columns["logit"] = values[chosen].tolist()
    columns["log_prob"] = log_probs.tolist()
    columns["probability"] = log_probs.exp().tolist()
    return pandas.DataFrame(columns)
