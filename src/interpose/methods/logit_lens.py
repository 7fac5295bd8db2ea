"""The logit lens: what the model would say if it stopped after each layer.

The residual stream has the same axes in every layer, so it can be read everywhere as the model reads it at the end:

    logits(layer) = unembed(final norm(stream(layer)))

with whatever else the model does behind its last block (a multiplier, a soft cap): the stream is handed to the model's
own forward there. After the last layer the lens is the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.layers import chosen_layers
from interpose.models.selection import Some
from interpose.progress import ShowProgress, tracked
from interpose.render.labelled import Labelled
from interpose.render.words import WordGrid

_MOST = 2**24  # logits that are computed at once
_EVIDENCE = (
    "Evidence for what the stream holds in the directions that the unembedding reads. Not evidence that later layers "
    "use it, nor that a layer lacks what it does not show: early layers often write in directions of their own."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LogitLens(ip.Scores):
    """What each layer would say: `values` are the likeliest tokens' probabilities, [layer, pos].

    Of several texts there is one more axis, ``example``, in front. With ``logits_of``, values are logits, along one
    more axis ``answer``, and the rest is None.

    Attributes:
        top_ids: the likeliest tokens, the likeliest first, [layer, pos, top].
        top_probabilities: theirs, [layer, pos, top].
        top_tokens: the same tokens as strings, in the order of ``top_ids.flatten()``.
        kl: how far each prediction is from the model's own: KL(model's, layer's), [layer, pos].
        answer_logit: the answer's logit, [layer, pos], if there is an answer.
        answer_probability: its probability, [layer, pos].
        answer_rank: how many tokens are likelier, [layer, pos].
    """

    top_ids: Tensor | None = None
    top_probabilities: Tensor | None = None
    top_tokens: list[str] | None = None
    kl: Tensor | None = None
    answer_logit: Tensor | None = None
    answer_probability: Tensor | None = None
    answer_rank: Tensor | None = None

    def best(self, **entries: Any) -> list[tuple[str, float]]:
        """The likeliest tokens at a place, with their probabilities: ``lens.best(layer=5, pos=3)``."""
        if self.top_ids is None or self.top_probabilities is None or self.top_tokens is None:
            raise ValueError(
                "with logits_of only the logits it names are computed; leave it out to see the likeliest tokens."
            )
        self.at(**entries)  # or what is wrong with them
        if missing := [name for name in self.axes if name not in entries]:
            raise KeyError(f"say which {missing[0]}. The axes are: {', '.join(self.axes)}.")
        place = tuple(there.index(entries[name]) for name, there in self.axes.items())
        numbers = torch.arange(self.top_ids.numel()).view(self.top_ids.shape)[place].tolist()
        chances = self.top_probabilities[place].tolist()
        return [(self.top_tokens[number], chance) for number, chance in zip(numbers, chances)]

    @property
    def is_grid(self) -> bool:
        """Whether there is one text, whose likeliest tokens can be shown by layer and position."""
        return self.top_ids is not None and "example" not in self.axes

    def words(self) -> WordGrid:
        """The likeliest tokens of a single text, as they are drawn."""
        cells = [
            [self.best(layer=layer, pos=pos) for pos in self.axes["pos"]]
            for layer in self.axes["layer"]
        ]
        labels = self.labels
        return WordGrid(cells=cells, rows=labels["layer"], columns=labels["pos"], corner="layer")

    def columns(self) -> dict[str, Sequence[Any]]:
        """What there is of every place, by name: also the likeliest token, and what there is of the answer."""
        found: dict[str, Sequence[Any]] = ip.Scores.columns(self)
        if self.top_tokens is not None and self.top_ids is not None:
            found["says"] = self.top_tokens[:: self.top_ids.shape[-1]]
        for name in ("kl", "answer_logit", "answer_probability", "answer_rank"):
            if (value := getattr(self, name)) is not None:
                found[name] = value.flatten().tolist()
        return found

    def text_body(self, high: int) -> str:
        """The likeliest token of each cell, or the numbers.

        Args:
            high: how many lines there are for it.
        """
        if not self.is_grid or len(self.axes["layer"]) > high - 3:
            return ip.Scores.text_body(self, high)
        return "\n" + self.words().text()

    def html_body(self) -> str:
        """A grid with the likeliest token in each cell; point at one to see the next ones."""
        if not self.is_grid:
            return ip.Scores.html_body(self)
        parts = [self.words().html()]
        more = {
            "Probability of the answer": self.answer_probability,
            "How many tokens are likelier than the answer": self.answer_rank,
            "Distance from the model's own prediction (KL)": self.kl,
        }
        for caption, values in more.items():
            if values is not None:
                drawn = Labelled(values=values.float(), labels=self.labels).html()
                parts.append(f"<p><b>{caption}</b></p>{drawn}")
        return "".join(parts)


@torch.no_grad()
def logit_lens(
    model: ip.TransformerModel,
    texts: Any,
    *,
    site: str = "resid_post",
    layer: Some = None,
    pos: int | str | Sequence[int] | Sequence[str] | None = None,
    answer: Any = None,
    top: int = 5,
    logits_of: str | int | Sequence[str | int] | None = None,
    through: Callable[[Tensor, int], Tensor] | None = None,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> LogitLens:
    """What the model would say after each layer: tokens, probabilities, and how far that is from its own answer.

    ```python
    lens = ip.logit_lens(model, "The Eiffel Tower is in", answer=" Paris")
    lens.best(layer=5, pos=4)  # the likeliest tokens there
    lens.answer_rank[:, -1]  # by layer, at the last position
    few = ip.logit_lens(model, "The Eiffel Tower is in", logits_of=[" Paris", " Rome"])
    few.values[0] - few.values[1]  # [layer, pos]; nothing as large as the vocabulary is computed for it
    ```

    Args:
        model: a causal language model.
        texts: a text, several, or tokens [batch, pos].
        site: where the stream is read: ``resid_post``, ``resid_mid``, ``resid_pre``; also what is added to it.
        layer: which layers, negative ones from the end; None for all that have the site.
        pos: which positions, negative ones from the end, or tokens of the text; None for all.
        answer: a token whose logit, probability and rank are kept too; one for all texts, or one for each.
        top: how many of the likeliest tokens are kept.
        logits_of: compute nothing but the logits of these tokens, or of this one.
        through: a function of a stream [example, pos, d_model] and its layer; what it returns is read instead.
        batch_size: how many texts run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if top < 1:
        raise ValueError(f"top is how many tokens are kept, at least 1; got {top}.")
    few = _few(logits_of, answer)
    found = ip.batches(model, texts, batch_size=batch_size, prepend_bos=prepend_bos)
    where, places = _positions(found, pos)
    rows: dict[int, dict[str, Tensor]] = {}
    streams: dict[int, Tensor] = {}
    for batch, some in zip(tracked(found, progress), places):
        streams, logits = _streams(model, batch, site, layer, some, whole=few is None)
        if through is not None:
            streams = {layer: through(stream, layer) for layer, stream in streams.items()}
        if few is None:
            ids = None if answer is None else batch.ids(answer)
            made = _read(model, streams, logits, ids, top)
        else:
            made = {"values": _logits_of(model, streams, _ids(model, few))}
        for row, number in enumerate(batch.numbers):
            rows[number] = {name: value[row].cpu() for name, value in made.items()}
    axes: dict[str, list[Any]] = {"layer": list(streams), "pos": where}
    kept: dict[str, Any] = dict(rows[0])
    if len(rows) > 1:
        axes = {"example": sorted(rows), **axes}
        kept = {name: torch.stack([rows[i][name] for i in sorted(rows)]) for name in rows[0]}
    if few is None:
        words = {token: _word(model, token) for token in kept["top_ids"].unique().tolist()}
        kept["top_tokens"] = [words[token] for token in kept["top_ids"].flatten().tolist()]
    else:
        axes = {"answer": few, **axes}
        kept["values"] = kept["values"].movedim(-1, 0)
    return LogitLens(
        title=f"Logit lens at {site}",
        axes=axes,
        unit="probability of the likeliest token" if few is None else "logits",
        protocol={
            "site": site,
            **({} if answer is None else {"answer": repr(answer)}),
            "forwards": len(found),
            "unembeddings": len(found) if few else len(rows) * len(streams) * len(where),
        },
        evidence=_EVIDENCE,
        tokens=found[0].str_tokens,
        **kept,
    )


def _streams(
    model: ip.TransformerModel,
    batch: ip.Batch,
    site: str,
    layers: Any,
    places: list[int],
    *,
    whole: bool,
) -> tuple[dict[int, Tensor], Any]:
    """The stream of each layer at some positions, [example, pos, d_model], and the model's own logits there."""
    count, length = len(model.blocks), batch.clean.shape[1]
    wanted = sorted(chosen_layers(layers, range(count), count, repr(site)))
    names = site if layers is None else [(site, layer) for layer in wanted]
    # No logits before the first position that is looked at, where the model can leave them out.
    end = batch.last_logits(ip.metrics.logit(0, pos=places[0] - length))
    how = end if whole else {"return_type": None}
    logits, cache = model.run_with_cache(batch.clean, names_filter=names, pos_slice=places, **how)
    found = {layer: cache[site, layer] for layer in wanted if (site, layer) in cache}  # type: ignore[comparison-overlap]
    width = model.cfg.d_model
    if any(model.sites[name].layer is None for name in cache):
        raise ValueError(
            f"{site!r} is in no layer. There are resid_pre, resid_mid, resid_post, attn_out and mlp_out."
        )
    if whole and logits.ndim != 3:
        raise ip.Unsupported(
            f"the lens reads logits [batch, pos, d_vocab] of tokens, and this model gives {list(logits.shape)}: it "
            "predicts no tokens."
        )
    if any(stream.ndim != 3 or stream.shape[-1] != width for stream in found.values()):
        raise ValueError(
            f"the lens reads values [batch, pos, {width}], as wide as the stream; {site!r} has others. There are "
            "resid_pre, resid_mid, resid_post, attn_out and mlp_out."
        )
    return found, logits[:, [place - length for place in places]] if whole else None


def _read(
    model: ip.TransformerModel,
    streams: dict[int, Tensor],
    logits: Tensor,
    ids: Tensor | None,
    top: int,
) -> dict[str, Tensor]:
    """What is kept of each prediction, [example, layer, pos], or [example, layer, pos, top]."""
    own = logits.float().log_softmax(-1)  # [example, pos, d_vocab]
    chance = own.exp()
    entropy = -torch.einsum("epv,epv->ep", chance, own)
    stack = torch.stack(list(streams.values()))  # [layer, example, pos, d_model]
    kept: dict[str, list[Tensor]] = {}
    for some in stack.split(max(1, _MOST // chance.numel())):
        # Behind the last block, with all that the model does there.
        said = model(some.flatten(0, 1), start_at_layer=len(model.blocks)).float()
        said = said.unflatten(0, some.shape[:2])  # [layer, example, pos, d_vocab]
        best, which = _likeliest(said, min(top, said.shape[-1]))
        row = {"top_ids": which}
        expected = torch.einsum("epv,lepv->lep", chance, said)
        if ids is not None:
            mine = said.gather(-1, ids[:, None, None].expand(*said.shape[:-1], 1))
            row["answer_logit"] = mine[..., 0]
            row["answer_rank"] = (said > mine).sum(-1)
        # As logsumexp, in the same memory: to ask for more costs as much as the arithmetic.
        size = said.sub_(best[..., :1]).exp_().sum(-1).log() + best[..., 0]
        row["top_probabilities"] = (best - size[..., None]).exp()
        row["values"] = row["top_probabilities"][..., 0]
        # KL is the cross entropy less the entropy; below zero it is rounding.
        row["kl"] = (size - expected - entropy).clamp(min=0)
        if ids is not None:
            row["answer_probability"] = (row["answer_logit"] - size).exp()
        for name, value in row.items():
            kept.setdefault(name, []).append(value)
    return {name: torch.cat(values).movedim(0, 1) for name, values in kept.items()}


def _likeliest(said: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The largest logits and their tokens; only the blocks of tokens with the largest ones are sorted."""
    width = 256
    whole = said.shape[-1] // width * width
    if whole // width < top:
        best, which = said.topk(top)
        return best, which
    blocks = said[..., :whole].unflatten(-1, (-1, width)).amax(-1).topk(top).indices
    inside = torch.arange(width, device=said.device)
    rest = torch.arange(whole, said.shape[-1], device=said.device).expand(*said.shape[:-1], -1)
    tokens = torch.cat([(blocks[..., None] * width + inside).flatten(-2), rest], -1)
    best, place = said.gather(-1, tokens).topk(top)
    return best, tokens.gather(-1, place)


def _logits_of(model: ip.TransformerModel, streams: dict[int, Tensor], ids: list[int]) -> Tensor:
    """The logits of some tokens, [example, layer, pos, token]: those columns of the unembedding alone."""
    stack = torch.stack(list(streams.values()), 1)  # [example, layer, pos, d_model]
    last = {"start_at_layer": len(model.blocks)}
    _, cache = model.run_with_cache(
        stack.flatten(0, 1), names_filter="unembed.hook_in", return_type=None, **last
    )
    said = cache["unembed.hook_in"].float() @ model.W_U[:, ids].float() + model.b_U[ids].float()
    return model.stream.logits(said.unflatten(0, stack.shape[:2]))


def _positions(found: list[ip.Batch], positions: Any) -> tuple[list[int], list[list[int]]]:
    """What positions are called, and those of each batch, ascending."""
    places = []
    for batch in found:
        wanted = range(batch.clean.shape[1]) if positions is None else positions
        first, *others = batch.positions(wanted)
        if not first:
            raise ValueError("pos is empty: give some, or None for all.")
        if any(other != first for other in others):
            raise ValueError(
                f"{positions!r} is at other positions in other texts: give them one by one."
            )
        places.append(first)
    if all(some == places[0] for some in places):
        return places[0], places
    given = [positions] if isinstance(positions, int) else positions
    if given is None or not all(isinstance(pos, int) and pos < 0 for pos in given):
        lengths = sorted({batch.clean.shape[1] for batch in found})
        raise ValueError(
            f"the texts have {' and '.join(map(str, lengths))} tokens, so that their positions differ: give "
            "positions that count from the end, such as pos=-1, or texts of one length."
        )
    return sorted(set(given)), places


def _few(logits_of: Any, answer: Any) -> list[str | int] | None:
    """The tokens whose logits alone are wanted; None if all are."""
    if logits_of is None:
        return None
    if answer is not None:
        raise ValueError("logits_of computes nothing but its logits: put the answer among them.")
    few = [logits_of] if isinstance(logits_of, (str, int)) else list(logits_of)
    if not few:
        raise ValueError("logits_of is empty: name the tokens whose logits are wanted.")
    return few


def _ids(model: ip.TransformerModel, words: Sequence[str | int]) -> list[int]:
    ids = [int(model.to_single_token(word)) if isinstance(word, str) else word for word in words]
    count = model.W_U.shape[-1]
    if wrong := [token for token in ids if not 0 <= token < count]:
        raise ValueError(f"logits_of has token {wrong[0]}, and the model tokens 0 to {count - 1}.")
    return ids


def _word(model: ip.TransformerModel, token: int) -> str:
    """A token as a string; of a model without a tokenizer, its number."""
    return str(token) if model.tokenizer is None else str(model.to_single_str_token(token))
