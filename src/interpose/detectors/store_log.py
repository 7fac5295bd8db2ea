"""`StoreLog`: the values of sites into a store, while something else runs the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

import interpose
from interpose.detectors.collector import Collector
from interpose.detectors.texts import tokens_at
from interpose.edits.edit import Edit
from interpose.engine.hooks import Detector
from interpose.engine.points import HookPoint
from interpose.errors import FileError
from interpose.jobs.job import live_hooks
from interpose.models.knowledge import Conditions
from interpose.sites.tree import Filter
from interpose.store import fingerprint
from interpose.store.filling import fill_segment
from interpose.store.harvest import SEGMENT, WINDOW, _about_there, _begin, _hash_of, _said
from interpose.store.records import About, ModelAbout, Plan, StoredSite, TextsAbout
from interpose.store.remote import local_folder
from interpose.store.rows import Row, row_length
from interpose.store.sources import Shard
from interpose.store.store import Store, open_store


class StoreLog(Collector):
    """Writes the values of sites to a store while something else runs the model, padding left out.

    ```python
    with ip.StoreLog(("resid_post", 3), store="seen") as log, model.hooks([log]):
        trainer.evaluate()
    store = ip.open_store("seen")        # a row for each text, in the order they came
    ```

    A segment counts when it is committed: as soon as it is large enough, at `flush` and at the end of the block. What
    was kept in memory until then is lost with the process. A store of the same model and sites is gone on with; what a
    model makes whose weights or edits have changed since is refused, and what came before stays. For
    texts that nothing runs yet there is `ip.harvest`.

    Args:
        site: sites with a vector at each position.
        store: its folder.
        dtype: of the vectors; by default their own.
        segment_bytes: how large a segment is, about.
    """

    def __init__(
        self,
        site: Filter = None,
        *,
        store: str | Path,
        dtype: torch.dtype | None = None,
        segment_bytes: int = SEGMENT,
        id: str | None = None,  # noqa: A002
    ) -> None:
        super().__init__(site, id=id, copies=False)
        self.folder = local_folder(store)
        self.dtype = dtype
        self.segment_bytes = segment_bytes
        self._about: About | None = None
        self._model: Any = None
        self._made_by: ModelAbout  # these two as soon as there is a model
        self._rests_on: Conditions
        self._hooks: list[Any] = []
        self._pass: Any = None  # what tells one forward pass from another
        self._values: dict[str, Tensor] = {}
        self._tokens: list[list[int]] = []
        self._described: dict[str, StoredSite] = {}
        self._rows: list[list[int]] = []
        self._parts: dict[str, list[Tensor]] = {}
        self._size = 0

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Keep the vectors of a value until a segment is full."""
        tokens, real = tokens_at(self.id, value, hook)
        if hook.given is not self._pass:
            self._end_pass()
            if self._size >= self.segment_bytes:
                self._commit(last=False)
            self._must_be_of(hook.model)
            self._pass = hook.given
            self._tokens = [row[text].tolist() for row, text in zip(tokens, real)]
        with torch.inference_mode(False), torch.no_grad():
            kept = value[real.to(value.device)].to("cpu", self.dtype or value.dtype, copy=True)
        site = hook.model.tree.site(hook.name)
        self._described[hook.canonical] = StoredSite(
            shape=tuple(kept.shape[1:]),
            dtype=str(kept.dtype).removeprefix("torch."),
            made=str(value.dtype).removeprefix("torch."),
            axes=hook.axes[2:],
            kind=site.kind,
            layer=site.layer,
            aliases=tuple(site.aliases),
        )
        self._values[hook.canonical] = kept

    def _must_be_of(self, model: Any) -> None:
        """Refuse what another model makes, or this one with other numbers or edits; what came before is committed."""
        live = [one for one in live_hooks(model) if not isinstance(one, Detector)]
        if self._model is None:
            self._hooks = live
        same = list(map(_said, live)) == list(map(_said, self._hooks))
        if same and self._model is model and self._rests_on.hold():
            return
        about = fingerprint.of_model(model)
        if self._model is None:
            self._model, self._made_by = model, about
        elif about != self._made_by or not same:
            self.flush()
            what = "other edits" if about == self._made_by else "another model, or other weights"
            raise FileError(
                f"{str(self.folder)!r} has what came before, and this is of {what}: a store is of one model as it was, "
                "with the same edits. Give another folder to what comes now."
            )
        self._rests_on = Conditions(model.root)

    def _end_pass(self) -> None:
        """A forward pass is over; one that did not reach every site has failed, and nothing of it counts."""
        if self._values and self._values.keys() == self._described.keys():
            for name, part in self._values.items():
                self._parts.setdefault(name, []).append(part)
                self._size += part.nbytes
            self._rows += self._tokens
            self.metadata["texts"] = self.metadata.get("texts", 0) + len(self._tokens)
        self._values, self._pass = {}, None

    def flush(self) -> None:
        """Commit what came so far."""
        self._end_pass()
        if self._rows:
            self._commit(last=False)

    def close(self) -> Store | None:
        """Commit what came so far, and open the store; None if nothing came."""
        self._end_pass()
        if self._rows:
            self._commit(last=True)
        return None if self._about is None else open_store(self.folder)

    def clear(self) -> None:
        """Forget what is not committed yet."""
        super().clear()
        self._values, self._rows, self._parts, self._size, self._pass = {}, [], {}, 0, None

    def _commit(self, *, last: bool) -> None:
        if self._about is None:
            self._about = self._begun()
        commits = open_store(self.folder).commits
        number = max(commits, default=-1) + 1
        first = max((one.texts[1] for one in commits.values()), default=0)
        shard = Shard(number=number, first=first, items=tuple(self._rows), last=last)
        rows = [Row(tokens, first + at, 0) for at, tokens in enumerate(self._rows)]
        parts = [dict(zip(self._parts, some)) for some in zip(*self._parts.values())]
        fill_segment(self.folder, self._about, shard, rows, parts)
        self._rows, self._parts, self._size = [], {}, 0

    def _begun(self) -> About:
        """The store, made or found."""
        model = self._model
        edits = [hook for hook in self._hooks if isinstance(hook, Edit)]
        names = model.tree.speller()
        about = About(
            model=self._made_by,
            texts=TextsAbout(
                fingerprint=None,
                count=None,
                tokenizer=fingerprint.of_tokenizer(model),
                prepend_bos=None,
                length=row_length(model, None),
            ),
            sites=self._described,
            pos=None,
            plan=Plan(texts=0, window=WINDOW, batch_tokens=0),
            hooks=tuple(map(_said, self._hooks)),
            edits=_hash_of(edits),
            versions={"interpose": interpose.__version__, "torch": torch.__version__},
            names={} if names is None else dataclasses.asdict(names),
        )
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise FileError(f"a log stores vectors as floating point numbers; got {self.dtype}.")
        return _begin(self.folder, about, _about_there(self.folder), edits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.flush() if error is not None else self.close()

    def __repr__(self) -> str:
        return f"StoreLog({vars(self)['site']!r}, store={str(self.folder)!r})"
