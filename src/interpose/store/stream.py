"""`ip.stream`: what a store's batches are, made by the model while they are asked for, and never written down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from interpose.engine.hooks import all_hooks
from interpose.models.running.rows import must_read_text
from interpose.models.transformer import TransformerModel
from interpose.sites.tree import Filter
from interpose.store.pools import POOL, Pool, PooledBatches
from interpose.store.rows import Row, batches_of, row_length, rows_of, texts_of, tokens_a_text
from interpose.store.sources import Done, Shard, Source
from interpose.store.vectors import Positions, Vectors


def stream(
    model: TransformerModel,
    texts: Any,
    site: Filter,
    *,
    batch_size: int = 4096,
    shuffle: bool = True,
    seed: int = 0,
    epochs: int | None = 1,
    pos: slice | None = None,
    most_norm: float | None = None,
    pool: int | None = None,
    part: tuple[int, int] = (0, 1),
    dtype: str | torch.dtype | None = None,
    hooks: Iterable[Any] = (),
    prepend_bos: bool | None = None,
    length: int | None = None,
    column: str = "text",
    batch_tokens: int = 8192,
) -> PooledBatches:
    """Batches of vectors from a live model: as `Store.batches`, without a store.

    ```python
    for batch in ip.stream(model, texts, ("resid_post", 3), batch_size=1024):
        batch["blocks.3.hook_resid_post"]        # [1024, d_model]
    ```

    Texts are run in their order, a pool of them at a time; vectors are mixed within a pool. The values are on the
    model's device. ``batch.row`` is the number of the text,
    ``batch.pos`` the position in the row that ran.

    Args:
        model: a model of transformers, in eval mode.
        texts: as in `harvest`.
        site: which sites.
        batch_size: how many vectors a batch has; the last of a pool may have fewer.
        shuffle: whether the vectors of a pool are mixed.
        seed: of the order.
        epochs: how often all texts come; None for ever.
        pos: as in `Store.batches`.
        most_norm: as in `Store.batches`.
        pool: how many vectors are mixed, about; by default 512 MB of them.
        part: as in `Store.batches`.
        dtype: of the vectors; None as they are made.
        hooks: as in `harvest`.
        prepend_bos: as in `harvest`.
        length: as in `harvest`.
        column: as in `harvest`.
        batch_tokens: how many tokens run together.
    """
    must_read_text(model)
    vectors = Vectors(model, site, dtype=dtype, hooks=all_hooks(hooks, (), ()))
    source = texts_of(model, texts, column)
    size = sum(one.nbytes for one in vectors.described().values())
    wanted = pool or max(batch_size, POOL // size)
    made = _LivePools(
        vectors,
        source,
        texts=max(1, round(wanted / tokens_a_text(model, source, prepend_bos, length))),
        prepend_bos=prepend_bos,
        length=row_length(model, length),
        batch_tokens=batch_tokens,
    )
    return PooledBatches(
        made,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        epochs=epochs,
        pos=pos,
        most_norm=most_norm,
        part=part,
    )


class _LivePools:
    """The vectors of some texts after the other, as a source of pools."""

    def __init__(
        self,
        vectors: Vectors,
        source: Source,
        *,
        texts: int,
        prepend_bos: bool | None,
        length: int,
        batch_tokens: int,
    ) -> None:
        self.vectors = vectors
        self.source = source
        self.texts = texts
        self.prepend_bos = prepend_bos
        self.length = length
        self.batch_tokens = batch_tokens

    def of(self, epoch: int, state: Any, first: int) -> Iterator[Pool]:  # noqa: ARG002 - all are the same
        """The pools from one on."""
        done = dict.fromkeys(range(first), Done()) | ({first - 1: Done(state)} if first else {})
        for shard in self.source.shards(self.texts, done):
            yield self._pool(shard, state)
            state = shard.resume

    def _pool(self, shard: Shard, state: Any) -> Pool:
        model = self.vectors.model
        rows = rows_of(
            model, shard.items, shard.first, prepend_bos=self.prepend_bos, length=self.length
        )
        parts: dict[str, list[torch.Tensor]] = {}
        order: list[Row] = []
        for batch in batches_of(rows, self.batch_tokens):
            some = [rows[number] for number in batch]
            order += some
            for name, values in self.vectors.read([row.tokens for row in some], _ALL).items():
                parts.setdefault(name, []).append(values)
        self.vectors.must_have_fitted()
        lengths = torch.tensor([len(row.tokens) for row in order])
        counts = torch.cat([torch.arange(int(n)) for n in lengths])
        return Pool(
            values={name: torch.cat(some) for name, some in parts.items()},
            tokens=torch.tensor([token for row in order for token in row.tokens]),
            row=torch.tensor([row.text for row in order]).repeat_interleave(lengths),
            pos=counts,
            state=state,
        )


_ALL = Positions()
