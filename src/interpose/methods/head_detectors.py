"""Find heads by where they look: at the token before, at the same token earlier, at what followed it there.

A kind of head says which keys each query should look at. The score of a head is the attention that it pays to those
keys, averaged over the queries that have one: 1 for a head that looks nowhere else.

    score[layer, head] = mean over queries with a wanted key of sum over keys of wanted[query, key] pattern[query, key]

By default the texts are random tokens said twice, in which there is nothing to attend to but the repetition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import must_read_text
from interpose.methods.layers import sites_in
from interpose.models.selection import Some
from interpose.progress import ShowProgress, tracked

Pattern = Tensor | Callable[[Tensor], Tensor]
"""Which keys each query should look at, [query, key]; or a function that says so of a text's tokens [pos]."""
KINDS = {
    "previous": "the token before",
    "current": "the token itself",
    "first": "the first token",
    "duplicate": "the same token, earlier",
    "induction": "the token after the same token, earlier",
}


def head_scores(
    model: ip.TransformerModel,
    kind: str | Pattern = "induction",
    *,
    texts: Any = None,
    length: int = 50,
    repeats: int = 2,
    batch: int = 8,
    seed: int = 0,
    layer: Some = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> ip.Scores:
    """How much of its attention each head pays to the keys that a kind of head would look at, [layer, head].

    ```python
    ip.head_scores(model, "induction").top(5)
    ip.head_scores(model, "previous", texts="The cat sat on the mat")
    ip.head_scores(model, lambda tokens: tokens[:, None] == tokens)   # [query, key]: any of the same token
    ```

    Args:
        model: a model of transformers, in eval mode.
        kind: ``previous``, ``current``, ``first``, ``duplicate`` or ``induction``; a tensor [query, key] of weights, 1
            for a wanted key; or a function from the tokens of a text [pos] to one.
        texts: a text, several, or tokens; by default random tokens, said again and again.
        length: how many different random tokens a text has.
        repeats: how often they are said.
        batch: how many random texts.
        seed: of the random tokens.
        layer: which; by default all that have attention.
        prepend_bos: whether texts begin with the BOS token; by default as the tokenizer has it.
        progress: as in `ip.sweep`.
    """
    if isinstance(kind, str) and kind not in KINDS:
        raise ValueError(
            f"no head is called {kind!r}; there are {', '.join(KINDS)}. For others give the wanted keys: a tensor "
            "[query, key], or a function of tokens [pos] that makes one."
        )
    must_read_text(model)
    given = texts is not None
    if not given:
        texts = _said_again(model, length, repeats, batch, seed, prepend_bos)
    sites = sites_in(model, "pattern", layer, "attention")
    total, queries, forwards = torch.zeros(1, 1, dtype=torch.float64, device="cpu"), 0, 0
    for part in tracked(ip.batches(model, texts, prepend_bos=prepend_bos), progress):
        wanted = torch.stack(
            [wanted_keys(kind, row) for row in part.clean]
        )  # [example, query, key]
        total = total + _paid(model, part.clean, wanted, list(sites.values()))
        queries, forwards = queries + int((wanted != 0).any(-1).sum()), forwards + 1
    if not queries:
        looked = KINDS[kind] if isinstance(kind, str) else "what the pattern wants"
        raise ValueError(
            f"no query has a key to look at ({looked}). Give a text that repeats tokens."
        )
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "own pattern")
    made = f"{batch} x {length} random tokens said {repeats} times, seed {seed}"
    return ip.Scores(
        title=f"Attention to {KINDS[kind] if isinstance(kind, str) else 'the wanted keys'}",
        values=(total / queries).float(),
        axes={
            "layer": list(sites),
            "head": list(range(total.shape[1])),
        },
        unit="share of attention",
        protocol={
            "kind": name,
            "texts": "given" if given else made,
            "queries": queries,
            "forwards": forwards,
        },
        evidence="Where a head looks on these texts, not what it does with what it sees, nor what it does on others; "
        "ablate or patch it to see whether the model needs it.",
    )


@torch.no_grad()
def _paid(model: ip.TransformerModel, tokens: Tensor, wanted: Tensor, sites: list[str]) -> Tensor:
    """The attention that each head pays to wanted keys, added up over queries and examples, [layer, head]."""

    def reduced(pattern: Tensor) -> Tensor:  # as it is made, so that no more than one is ever there
        weights = wanted.to(device=pattern.device, dtype=torch.float32)
        return torch.einsum("bhqk,bqk->h", pattern.float(), weights)

    _, cache = model.run_with_cache(tokens, names_filter=sites, keep=reduced, return_type=None)
    found = [cache[name].cpu().double() for name in sites]
    if len({len(heads) for heads in found}) > 1:
        raise ip.Unsupported(
            "layers of this model have different numbers of heads, so their scores are no one table. Ask for "
            "layer=[...] that are alike."
        )
    return torch.stack(found)


def wanted_keys(kind: str | Pattern, tokens: Tensor) -> Tensor:
    """Which keys each query of a text should look at, [query, key]."""
    if not isinstance(kind, str):
        wanted = torch.as_tensor(kind(tokens) if callable(kind) else kind, device=tokens.device)
        if wanted.shape != (len(tokens), len(tokens)):
            raise ValueError(
                f"the wanted keys of a text of {len(tokens)} tokens are a tensor [{len(tokens)}, {len(tokens)}]; got "
                f"{list(wanted.shape)}."
            )
        return wanted.float()
    key = torch.arange(len(tokens), device=tokens.device)
    query = key[:, None]
    earlier = (tokens[:, None] == tokens) & (key < query)
    return {
        "previous": key == query - 1,
        "current": key == query,
        "first": (key == 0) & (query > 0),
        "duplicate": earlier,
        "induction": earlier.roll(1, dims=1),  # the last column is empty, and becomes the first
    }[kind].float()


def _said_again(
    model: ip.TransformerModel,
    length: int,
    repeats: int,
    batch: int,
    seed: int,
    prepend_bos: bool | None,
) -> Tensor:
    """Random tokens, none of them special, said again and again: [batch, repeats * length], after a BOS if any."""
    if min(length, repeats, batch) < 1:
        raise ValueError(
            f"length, repeats and batch are at least 1; got {length}, {repeats} and {batch}."
        )
    tokenizer, config = model.tokenizer, getattr(model.module, "config", None)
    known = model.cfg.d_vocab or 0
    known = known if tokenizer is None else min(known, len(tokenizer))
    special: set[Any] = set()
    for name in ("bos", "eos", "pad"):
        token = getattr(config, f"{name}_token_id", None)
        special |= set(token) if isinstance(token, (list, tuple)) else {token}
    for name in ("all_special_ids", "added_tokens_decoder"):
        special |= set(getattr(tokenizer, name, ()))
    plain = torch.tensor([token for token in range(known) if token not in special], device="cpu")
    draw = torch.Generator("cpu").manual_seed(seed)
    rows = []
    for _ in range(batch):
        order = torch.randperm(len(plain), generator=draw, device="cpu")[:length]
        if len(order) < length:  # a small vocabulary: tokens may come twice in one saying
            order = torch.randint(len(plain), (length,), generator=draw, device="cpu")
        rows.append(plain[order].repeat(repeats))
    said = torch.stack(rows)
    if tokenizer is not None or prepend_bos:
        start = model.to_tokens("", prepend_bos=prepend_bos)[0, :1].cpu()  # BOS, or nothing
        said = torch.cat([start.expand(batch, -1), said], 1)
    most = model.cfg.n_ctx
    if most is not None and said.shape[1] > most:
        raise ValueError(
            f"{said.shape[1]} tokens, and the model has {most} positions. Choose a smaller length={length} or "
            f"repeats={repeats}."
        )
    return said
