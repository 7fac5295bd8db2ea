"""Find heads by where they look: compare every head's pattern with the pattern a kind of head would have.

```python
from interpose.dialects.transformer_lens.head_detector import detect_head

detect_head(model, "red cat, red cat", "induction_head")   # [layer, head], 1.0 is perfect
```
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.patching.patching_result import kept
from interpose.methods.head_detectors import wanted_keys
from interpose.names import of_kind

HeadName = Literal["previous_token_head", "duplicate_token_head", "induction_head"]
HEAD_NAMES: tuple[str, ...] = get_args(HeadName)
ErrorMeasure = Literal["abs", "mul"]
LayerHeadTuple = tuple[int, int]
LayerToHead = dict[int, list[int]]


def detect_head(
    model: Any,
    seq: str | list[str] | Tensor,
    detection_pattern: Tensor | HeadName,
    heads: Sequence[LayerHeadTuple] | LayerToHead | None = None,
    cache: Mapping[str, Tensor] | None = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: ErrorMeasure = "mul",
) -> Tensor:
    """How well each head's attention fits a pattern: [layer, head]; heads that were not asked for are -1.

    Args:
        model: the model.
        seq: a text, tokens [1, pos], or a list of texts, whose scores are averaged.
        detection_pattern: what such a head's pattern is, [query, key] and nothing after the query; or one of
            `HEAD_NAMES`.
        heads: which heads to look at, as pairs (layer, head) or as a mapping of layers to heads; all by default.
        cache: values of a run on this very text, so that it need not run again.
        exclude_bos: leave out attention to the first token.
        exclude_current_token: leave out attention of tokens to themselves.
        error_measure: ``mul`` is the share of the attention that falls on the pattern (of ones and zeros);
            ``abs`` is 1 less the mean distance of rows, from 1 for a perfect fit to -1 for none.
    """
    if isinstance(seq, list):
        if cache is not None:
            raise ValueError("a cache is of one text, and seq is a list; give texts one by one.")
        if not seq:
            raise ValueError("seq is an empty list: there is nothing to look at.")
        scores = [
            detect_head(
                model,
                text,
                detection_pattern,
                heads,
                exclude_bos=exclude_bos,
                exclude_current_token=exclude_current_token,
                error_measure=error_measure,
            )
            for text in seq
        ]
        return torch.stack(scores).mean(0)
    tokens = model.to_tokens(seq) if isinstance(seq, str) else seq.reshape(1, -1)
    if not 1 < tokens.shape[-1] <= model.cfg.n_ctx:
        raise ValueError(
            f"seq has {tokens.shape[-1]} tokens; heads look back over 2 to {model.cfg.n_ctx}."
        )
    wanted = _pattern(detection_pattern, tokens, error_measure)
    chosen = _chosen(model, heads)
    if cache is None:
        names = [of_kind("pattern", layer) for layer in sorted({layer for layer, _ in chosen})]
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens, names_filter=names)
    found = torch.full((model.cfg.n_layers, model.cfg.n_heads), -1.0)
    for layer, head in chosen:
        pattern = kept(cache, of_kind("pattern", layer), which="cache")[..., head, :, :]
        found[layer, head] = compute_head_attention_similarity_score(
            pattern.detach().reshape(
                pattern.shape[-2:]
            ),  # the cache may have an axis for its one text
            wanted.to(pattern),
            exclude_bos=exclude_bos,
            exclude_current_token=exclude_current_token,
            error_measure=error_measure,
        )
    return found


def get_previous_token_head_detection_pattern(tokens: Tensor) -> Tensor:
    """Ones where a token looks at the one before: [pos, pos].

    Args:
        tokens: [1, pos].
    """
    return wanted_keys("previous", tokens.reshape(-1).cpu())


def get_duplicate_token_head_detection_pattern(tokens: Tensor) -> Tensor:
    """Ones where a token looks at the same token earlier: [pos, pos].

    Args:
        tokens: [1, pos].
    """
    return wanted_keys("duplicate", tokens.reshape(-1).cpu())


def get_induction_head_detection_pattern(tokens: Tensor) -> Tensor:
    """Ones where a token looks at what came after the same token earlier: [pos, pos].

    Args:
        tokens: [1, pos].
    """
    return wanted_keys("induction", tokens.reshape(-1).cpu())


def get_supported_heads() -> None:
    """Print the kinds of heads that have a name."""
    print(f"Heads with a name: {', '.join(HEAD_NAMES)}")  # noqa: T201 - what users call it for


def compute_head_attention_similarity_score(
    attention_pattern: Tensor,
    detection_pattern: Tensor,
    *,
    exclude_bos: bool,
    exclude_current_token: bool,
    error_measure: ErrorMeasure,
) -> float:
    """How well one head's attention fits a pattern, both [query, key]; see `detect_head`."""
    _check_measure(error_measure)
    shape = attention_pattern.shape
    if attention_pattern.ndim != 2 or shape[0] != shape[1] or shape != detection_pattern.shape:
        raise ValueError(
            f"patterns are square and of one size; got {tuple(shape)} and "
            f"{tuple(detection_pattern.shape)}."
        )
    counted = torch.ones_like(attention_pattern)
    if exclude_bos:
        counted[:, 0] = 0
    if exclude_current_token:
        counted.fill_diagonal_(0)
    attention, wanted = attention_pattern * counted, detection_pattern * counted
    if error_measure == "mul":
        return float((attention * wanted).sum() / attention.sum())
    return 1 - round(float((attention - wanted).abs().sum() / len(attention)), 3)


def _check_measure(measure: str) -> None:
    if measure not in get_args(ErrorMeasure):
        raise ValueError(f"error_measure is 'mul' or 'abs'; got {measure!r}")


def _pattern(given: Tensor | str, tokens: Tensor, measure: str) -> Tensor:
    """The pattern to compare with, [pos, pos]."""
    _check_measure(measure)
    length = tokens.shape[-1]
    if isinstance(given, str):
        if given not in HEAD_NAMES:
            raise ValueError(
                f"no head is called {given!r}; there are {', '.join(HEAD_NAMES)}. For others, give "
                "the pattern itself, a tensor [query, key]."
            )
        maker = {
            "previous_token_head": get_previous_token_head_detection_pattern,
            "duplicate_token_head": get_duplicate_token_head_detection_pattern,
            "induction_head": get_induction_head_detection_pattern,
        }[given]
        return maker(tokens)
    if given.shape != (length, length) or not torch.equal(given, given.tril()):
        raise ValueError(
            f"seq has {length} tokens, so the pattern is a tensor [{length}, {length}] with zeros "
            f"above the diagonal; got shape {tuple(given.shape)}."
        )
    if measure == "mul" and not bool(((given == 0) | (given == 1)).all()):
        warnings.warn(
            "with error_measure='mul' a pattern of ones and zeros gives a share; this one has "
            "other numbers.",
            stacklevel=3,
        )
    return given


def _chosen(
    model: Any, heads: Sequence[LayerHeadTuple] | LayerToHead | None
) -> list[tuple[int, int]]:
    """The heads to look at, as pairs (layer, head)."""
    layers, count = model.cfg.n_layers, model.cfg.n_heads
    if heads is None:
        return [(layer, head) for layer in range(layers) for head in range(count)]
    if isinstance(heads, Mapping):
        heads = [(layer, head) for layer, several in heads.items() for head in several]
    for layer, head in heads:
        if not (0 <= layer < layers and 0 <= head < count):
            raise IndexError(
                f"there is no head {layer}.{head}: layers are 0 to {layers - 1}, heads 0 to {count - 1}."
            )
    return list(heads)
