"""What users give as texts, as rows: each text's own tokens, none padded. Every method reads its texts here.

A text, several, tokens [pos] or [batch, pos] as a tensor or as lists, or a mapping as tokenizers return it. Padding is
taken off: by the mask that is given, by what is remembered of tokens, by a token for padding alone. Where none of these
tells, `masks.must_be_known` asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.activations import ActivationRows
from interpose.engine.model import Model
from interpose.errors import Unsupported
from interpose.models.running import masks
from interpose.models.running.padding import accepts
from interpose.models.running.text import raise_empty, texts_in

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

Row = dict[str, Tensor]
"""What the module takes for one text, each [pos]: ``input_ids``, and what a mapping has besides.

``attention_mask`` only if it has holes inside the text.
"""
BESIDES = (
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "overflow_to_sample_mapping",
    "num_truncated_tokens",
    "overflowing_tokens",
)
"""What tokenizers say of texts that is an argument of hardly any model."""
_BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")


def read(
    model: TransformerModel, given: Any, prepend_bos: bool | None = None, *, truncate: bool = False
) -> list[Row]:
    """Each text as a row of its own, in the order they were given.

    Args:
        model: for its tokenizer.
        given: a text, several, tokens, or a mapping of ``input_ids`` and what belongs to each of them.
        prepend_bos: as in ``to_tokens``, for texts.
        truncate: cut texts that are longer than the model's context; by default they are refused.
    """
    must_read_text(model)
    if isinstance(given, ActivationRows):
        raise TypeError(
            "this runs texts, and was given a store, which has values of them: give the texts. What reads a store "
            "instead of texts: ip.probe, ip.max_activating, ip.activation_statistics, ip.function_vector and "
            "ip.TunedLens.fit."
        )
    found = _read(model, given, prepend_bos, truncate)
    for row in found:
        model.must_have_image(row["input_ids"])
    return found


def _read(
    model: TransformerModel, given: Any, prepend_bos: bool | None, truncate: bool
) -> list[Row]:
    if isinstance(given, Mapping):
        return _of_mapping(model, given)
    given = given if isinstance(given, (str, Tensor)) else list(given)
    texts = texts_in(given)
    if texts is not None:
        return _of_texts(model, texts, prepend_bos, truncate)
    tokens = _tokens(given, "texts are strings, or tokens")
    return _without_padding({"input_ids": tokens}, _known(model, tokens), model.device)


def must_read_text(model: TransformerModel) -> None:
    """Refuse what cannot run texts: every method that takes texts asks here."""
    module = getattr(model, "module", model)
    name = type(module).__name__
    if not hasattr(model, "to_tokens"):
        raise Unsupported(
            f"this runs texts through a model of transformers, whose layers and heads are known; got {name}. "
            "Load one with ip.load(name), or wrap one with its tokenizer: ip.wrap(module, tokenizer). "
            "Of other modules, run edits one by one: model.run_with_hooks(x, hooks=[...])."
        )
    reads = getattr(model.root, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise Unsupported(
            f"this runs texts, and {name} reads {reads}: it is not a language model. Run it with its own inputs: "
            f"model.run_with_hooks({reads}=..., hooks=[...]), model.run_with_cache({reads}=...)."
        )


def read_tokens(given: Any) -> list[list[int]]:
    """Tokens of each text, without the padding that is known without a model: by a mask, or since it is remembered."""
    mapping = given if isinstance(given, Mapping) else {"input_ids": given}
    return [tokens_of(row).tolist() for row in _of_mapping(None, mapping)]


def tokens_of(row: Mapping[str, Tensor]) -> Tensor:
    """The tokens of a row, or of several side by side, that is nothing else; an error for another."""
    if more := sorted(set(row) - {"input_ids"}):
        why = "has holes inside a text" if more == ["attention_mask"] else "would be lost"
        raise TypeError(
            f"texts are strings, or tokens with a mask of their padding; got a mapping whose {', '.join(more)} {why}. "
            "Only ip.sweep and ip.measure take such mappings."
        )
    return row["input_ids"]


def as_arguments(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as the module's forward takes it: lists as tensors, without what only tokenizers speak of.

    Args:
        model: whose device they go to.
        given: what a tokenizer returns, or arguments of the module, which stay as they are.
    """
    made = {
        name: value
        for name, value in given.items()
        if name not in BESIDES or accepts(model, name, outright=True)
    }
    listed = [name for name in _BY_TOKEN if isinstance(made.get(name), (list, tuple))]
    if not listed:
        return made
    parts = {name: _split(made[name]) for name in listed}
    if all(len({len(row) for row in rows}) == 1 for rows in parts.values()):
        return made | {name: torch.stack(rows).to(model.device) for name, rows in parts.items()}
    rows = [tokens_of(row).tolist() for row in read(model, made)]
    found: dict[str, Any] = model._with_mask(*model._as_batch(rows, None))
    return found


def _of_texts(
    model: TransformerModel, texts: Sequence[str], prepend_bos: bool | None, truncate: bool
) -> list[Row]:
    found = model._encode(texts, prepend_bos, truncate)
    if not all(found):
        raise_empty(texts, found)
    most, longest = model._longest_text(), max(map(len, found))
    if not truncate and most is not None and longest > most:
        raise ValueError(
            f"a text has {longest} tokens, and the model {most} positions. Cut it yourself: where it ends is where "
            "the answer is read."
        )
    tokens = [torch.tensor(row) for row in found]
    return _without_padding({"input_ids": tokens}, [None] * len(tokens), model.device)


def _of_mapping(model: TransformerModel | None, given: Mapping[str, Any]) -> list[Row]:
    """Rows of what a tokenizer returns, or of what the module takes."""
    if given.get("input_ids") is None:
        raise ValueError(
            f"a mapping of texts has input_ids, tokens [batch, pos]; got {', '.join(map(str, given))}."
        )
    tokens = _tokens(given["input_ids"], "input_ids are tokens")
    parts = {"input_ids": tokens}
    for name, value in given.items():
        if name in ("input_ids", "attention_mask") or _says_nothing(model, name, value):
            continue
        parts[name] = _beside(value, tokens, name)
    mask, device = given.get("attention_mask"), "cpu" if model is None else model.device
    if mask is None:
        return _without_padding(parts, _known(model, tokens), device)
    mask = mask != 0 if isinstance(mask, Tensor) else mask
    return _without_padding(parts, _beside(mask, tokens, "attention_mask"), device)


def _says_nothing(model: Model | None, name: str, value: Any) -> bool:
    """Whether a part of a mapping makes no difference to the model: it is as if the texts were given."""
    if value is None or name in BESIDES:
        return True
    if name != "token_type_ids":
        return False
    unused = model is not None and not accepts(model, name)
    return unused or not any(bool(row.any()) for row in _split(value))


def _beside(value: Any, tokens: Sequence[Tensor], name: str) -> list[Tensor]:
    """Something that has a number for each token."""
    rows = _split(value) if isinstance(value, (Tensor, list, tuple)) else []
    if [row.shape for row in rows] != [row.shape for row in tokens]:
        what = tuple(value.shape) if isinstance(value, Tensor) else repr(value)[:60]
        raise ValueError(
            f"{name!r} is {what}: a mapping of texts has tensors of the shape of input_ids, "
            f"[{len(tokens)}, {max(map(len, tokens), default=0)}], whose rows and positions can be told apart."
        )
    return rows


def _tokens(given: Any, what: str) -> list[Tensor]:
    """Tokens as rows."""
    rows = _split(given)
    if any(row.ndim != 1 or (len(row) and row.is_floating_point()) for row in rows):
        shape = list(given.shape) if isinstance(given, Tensor) else str(given)[:60]
        raise TypeError(
            f"{what}, integers [pos] or [batch, pos] in a tensor or in lists; got {shape}."
        )
    return [row.long() if row.is_floating_point() else row for row in rows]


def _split(given: Any) -> list[Tensor]:
    """Numbers [pos], [batch, pos] or a list of rows, as rows; what is none, as a row without an axis."""
    if not isinstance(given, Tensor):
        given = list(given)
        if any(isinstance(one, int) or getattr(one, "ndim", 1) == 0 for one in given):
            given = [given]  # the tokens of one text
    rows = [given] if isinstance(given, Tensor) and given.ndim == 1 else given
    try:
        return [torch.as_tensor(row) for row in rows]
    except (TypeError, ValueError, RuntimeError):
        return [torch.tensor(0)]


def _known(model: TransformerModel | None, tokens: Sequence[Tensor]) -> list[Tensor | None]:
    """Which tokens of each row are text; None if all are."""
    found = [masks.remembered(row) for row in tokens]
    if model is None:
        return found
    rest = [number for number, mask in enumerate(found) if mask is None]
    if len({len(tokens[number]) for number in rest}) == 1:
        mask = masks.must_be_known(model, torch.stack([tokens[number] for number in rest]))
        for place, number in enumerate(rest if mask is not None else ()):
            found[number] = mask[place]  # type: ignore[index]
    else:
        for number in rest:
            mask = masks.must_be_known(model, tokens[number][None])
            found[number] = None if mask is None else mask[0]
    return found


def _without_padding(
    parts: Mapping[str, Sequence[Tensor]], known: Sequence[Tensor | None], device: Any
) -> list[Row]:
    """Rows whose padding is off, remembered as text."""
    spans, holes = [], {}
    for number, mask in enumerate(known):
        length = len(parts["input_ids"][number])
        places = None if mask is None else mask.nonzero()[:, 0].tolist()
        if length == 0 or places == []:
            raise ValueError(f"text {number} has no tokens, so there is nothing to run.")
        spans.append(slice(0, length) if places is None else slice(places[0], places[-1] + 1))
        if mask is not None and len(places) < places[-1] + 1 - places[0]:  # type: ignore[arg-type, index]
            holes[number] = mask[spans[-1]].to(device)
    found: list[Row] = [{} for _ in known]
    for name, rows in parts.items():
        cut = [row[span] for row, span in zip(rows, spans)]
        if not cut:
            break
        flat = torch.cat(cut).to(device)
        if name == "input_ids":
            masks.remember(flat)
        for row, part in zip(found, flat.split([len(one) for one in cut])):
            row[name] = part
    for number, mask in holes.items():
        found[number]["attention_mask"] = mask
    return found
