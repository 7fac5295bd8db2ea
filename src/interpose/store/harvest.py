"""`ip.harvest`: fill a store with the activations of texts. Interrupted, it goes on; done, it does nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import interpose
from interpose.edits.edit import Edit
from interpose.edits.saving import save_edits
from interpose.engine.hooks import Detector, Hook, all_hooks
from interpose.errors import FileError, Unsupported
from interpose.jobs.job import Worker, gpus_of, live_hooks, must_be_engine, must_travel, run
from interpose.models.loading import load
from interpose.models.running.rows import must_read_text
from interpose.models.spread import must_not_be_spread
from interpose.models.transformer import TransformerModel
from interpose.progress import Progress, ShowProgress
from interpose.render.text import human_bytes
from interpose.sites.tree import Filter
from interpose.store import fingerprint
from interpose.store.filling import SegmentMaker, record, sweep_unfinished
from interpose.store.needs import Expected, Left
from interpose.store.pools import must_be_part
from interpose.store.records import (
    ABOUT,
    COMMITS,
    HOOKS,
    SEGMENTS,
    UNFINISHED,
    About,
    Plan,
    StoredSite,
    TextsAbout,
    commit_name,
)
from interpose.store.remote import Remote, local_folder
from interpose.store.rows import row_length, texts_of
from interpose.store.sources import Done, Shard, Source
from interpose.store.store import Store, open_store
from interpose.store.vectors import Positions, Vectors

SEGMENT = 2**28
"""How many bytes a segment has, about, all sites together."""
WINDOW = 2**26
"""How many bytes of a segment are in memory at a time, about."""


def harvest(
    model: TransformerModel | str,
    texts: Any,
    site: Filter,
    *,
    store: str | Path,
    pos: Any = None,
    dtype: str | torch.dtype | None = None,
    hooks: Iterable[Any] = (),
    prepend_bos: bool | None = None,
    length: int | None = None,
    column: str = "text",
    batch_tokens: int | None = None,
    segment_texts: int | None = None,
    part: tuple[int, int] = (0, 1),
    engine: str = "local",
    workers: int | None = None,
    progress: ShowProgress = True,
) -> Store:
    """Fill a store with the values of some sites at every token of some texts, and open it.

    ```python
    store = ip.harvest(model, texts, [("resid_post", 3)], store="activations")
    store[0]["resid_post", 3]            # [1, pos, d_model]: those of the first text
    ```

    What is committed stays, whatever happens: a call that Ctrl-C, a crash or a full disk has ended goes on when it
    is made again. Several may write into one store.

    Args:
        model: a model of transformers, in eval mode; or what `load` takes.
        texts: a text, several, tokens, a ``.txt`` file (a text a line), a ``.jsonl`` file, a data set, an iterator.
        site: which sites: each has a vector for every token.
        store: its folder, or a URL that fsspec knows, such as ``s3://bucket/activations``: see docs/store.md.
        pos: which positions of each row: numbers (negative from its end), slices, texts; None for all.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``int8`` (with a scale for each vector); None as made.
        hooks: hooks and edits that are live meanwhile; the store says which.
        prepend_bos: as in ``to_tokens``; a BOS token also begins the further rows of a long text.
        length: how many tokens a row has at most; a longer text becomes several rows. By default the model's context,
            at most 2048.
        column: which field of records is the text.
        batch_tokens: how many tokens run together.
        segment_texts: how many texts a segment has; by default about as many as fill 256 MB.
        part: which of how many parts of the work: ``(0, 4)`` makes every fourth segment.
        engine: ``local`` for this process, or ``ray`` for a cluster (or all cores of this machine).
        workers: how many processes hold the model, with ``ray``.
        progress: as in `sweep`; it counts tokens.
    """
    must_be_engine(engine, workers)
    begun = begin(
        model,
        texts,
        site,
        store=store,
        pos=pos,
        dtype=dtype,
        hooks=hooks,
        prepend_bos=prepend_bos,
        length=length,
        column=column,
        batch_tokens=batch_tokens,
        segment_texts=segment_texts,
        part=part,
        engine=engine,
    )
    return begun.fill(engine=engine, workers=workers, progress=progress)


def begin(
    model: TransformerModel | str,
    texts: Any,
    site: Filter,
    *,
    store: str | Path,
    pos: Any = None,
    dtype: str | torch.dtype | None = None,
    hooks: Iterable[Any] = (),
    prepend_bos: bool | None = None,
    length: int | None = None,
    column: str = "text",
    batch_tokens: int | None = None,
    segment_texts: int | None = None,
    part: tuple[int, int] = (0, 1),
    engine: str = "local",
) -> Begun:
    """A store with nothing in it yet, or one that is gone on with: all that `harvest` does before the model runs."""
    name = model if isinstance(model, str) else None
    model = load(model) if isinstance(model, str) else model
    _must_be_ready(model)
    must_be_part(part)
    given = all_hooks(hooks, (), ())
    live = _live(model, given, engine)
    vectors = Vectors(model, site, dtype=dtype, hooks=given)
    source = texts_of(model, texts, column)
    remote = _remote(store, engine)
    folder = local_folder(store) if remote is None else remote.folder
    there = _about_there(folder)
    sites = vectors.described()
    expected = None
    if there is None or source.count is not None:  # an iterator goes on where it was
        expected = Expected.of(
            model, source, sites, Positions(pos), prepend_bos=prepend_bos, length=length
        )
    if there is None:
        assert expected is not None
        plan = _plan(model, sites, expected.tokens, batch_tokens, segment_texts)
    else:
        plan = _same_plan(there.plan, batch_tokens, segment_texts)
    edits = [hook for hook in live if isinstance(hook, Edit)]
    about = About(
        model=fingerprint.of_model(model),
        texts=TextsAbout(
            fingerprint=source.fingerprint(),
            count=source.count,
            tokenizer=fingerprint.of_tokenizer(model),
            prepend_bos=prepend_bos,
            length=row_length(model, length),
        ),
        sites=sites,
        pos=Positions(pos).data,
        plan=plan,
        hooks=tuple(map(_said, live)),
        edits=_hash_of(edits),
        versions={"interpose": interpose.__version__, "torch": torch.__version__},
        names={} if (names := model.tree.speller()) is None else dataclasses.asdict(names),
    )
    about = _begin(folder, about, there, edits)
    left = _left(expected, source, folder, about.plan.texts, part)
    if left is not None and remote is None:
        left.must_fit(folder)
    if remote is not None:
        remote.begin(part)
    job = Harvest(folder, about, source, vectors, part=part, name=name, remote=remote)
    return Begun(job, expected, left)


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """A harvest that can start: the job, what there is of a text, what is left; None where that is not known."""

    job: Harvest
    expected: Expected | None
    left: Left | None

    def fill(
        self, *, engine: str = "local", workers: int | None = None, progress: ShowProgress = True
    ) -> Store:
        """Do what is left."""
        folder = self.job.folder
        total = None if self.left is None else self.left.tokens
        if self.job.name is not None and engine != "local":
            self.job.vectors.model.root.to("cpu")  # workers load their own, and may need the place
        try:
            with Progress(progress, total, "token", note=self._note) as bar:
                run(self.job, engine=engine, workers=workers, step=bar.step)
        except KeyboardInterrupt as ended:
            where = str(folder) if self.job.remote is None else self.job.remote.url
            ended.add_note(f"What was committed stays in {where!r}. {GOES_ON}")
            raise
        return open_store(folder if self.job.remote is None else self.job.remote.url)

    def _note(self, tokens: int) -> str:
        """How many bytes so many tokens are."""
        if self.expected is None:
            return ""
        whole = "" if self.left is None else f" of {human_bytes(self.left.nbytes)}"
        return human_bytes(tokens * self.expected.nbytes) + whole


GOES_ON = "The same ip.harvest(...) goes on from there."


class Harvest:
    """The job: shards are segments, and a commit says that one is done.

    Args:
        folder: of the store.
        about: what the store is of.
        source: of the texts.
        vectors: what runs the model.
        part: which of how many parts of the work.
        name: what other processes load the model from; by default it is sent to them.
        remote: where segments go, if that is not here.
    """

    def __init__(
        self,
        folder: Path,
        about: About,
        source: Source,
        vectors: Vectors,
        *,
        part: tuple[int, int],
        name: str | None,
        remote: Remote | None = None,
    ) -> None:
        self.remote = remote
        self.folder = folder
        self.about = about
        self.source = source
        self.vectors = vectors
        self.part = part
        self.name = name

    def shards(self) -> Iterator[Shard]:
        """Those that are not committed yet, of this part of the work."""
        mine, of = self.part
        commits = open_store(self.folder).commits
        done = {n: Done(commit.resume, commit.digest) for n, commit in commits.items()}
        for shard in self.source.shards(self.about.plan.texts, done):
            if shard.number % of == mine and not self.is_done(shard):
                yield shard

    def is_done(self, shard: Shard) -> bool:
        """Whether somebody has committed it by now."""
        here = (self.folder / COMMITS / commit_name(shard.number)).exists()
        return here or (self.remote is not None and self.remote.has(shard.number))

    def said(self, shard: Shard) -> str:
        """What errors call it."""
        return (
            f"segment {shard.number} (texts {shard.first} to {shard.first + len(shard.items) - 1})"
        )

    def gpus(self) -> int | None:
        """How many GPUs a worker takes: as the model does here, or one where each loads its own."""
        return None if self.name else gpus_of(self.vectors.model.root)

    def accept(self, shard: Shard, made: None) -> None:
        """Nothing: what was made is in the store."""

    def worker(self) -> Worker[Shard]:
        """What makes segments, in this process."""
        if not (self.folder / ABOUT).exists():
            raise FileError(
                f"a worker on {socket.gethostname()!r} does not see {str(self.folder)!r}. All machines of a cluster "
                "need a folder that they share."
            )
        push = None if self.remote is None else self.remote.push
        return SegmentMaker(self.folder, self.about, self.vectors, push)

    def __getstate__(self) -> dict[str, Any]:
        """What other processes are sent: no texts, which come with each shard, and no model that has a name."""
        state = {**vars(self), "source": None}
        return {**state, "vectors": None, "given": self.vectors.given} if self.name else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = state.pop("given", None)
        vars(self).update(state)
        if self.name:
            model = load(self.name)
            if fingerprint.of_model(model) != self.about.model:
                raise FileError(
                    f"{self.name!r} is another model on {socket.gethostname()!r} than where the harvest began. Put the "
                    "same files there, or load the model first and give it instead of its name."
                )
            self.vectors = Vectors(model, **given)


def _must_be_ready(model: TransformerModel) -> None:
    """Refuse a model that reads no text, or of which every run is another one."""
    must_read_text(model)
    must_not_be_spread(model.root, "a harvest", "each of them would write")
    if model.module.training:
        raise Unsupported(
            "the model is in training mode, where dropout makes every run another one. Call model.eval() first."
        )


def _remote(store: str | Path, engine: str) -> Remote | None:
    """The object store of a URL, with the records that it has; None of a folder."""
    remote = Remote.of(store)
    if remote is not None and engine != "local":
        raise Unsupported(
            f"with engine={engine!r} workers share a folder, and {remote.url!r} is a URL. Give a folder that all of "
            "them see; or start processes with part=(0, 4), part=(1, 4) and so on."
        )
    if remote is not None:
        remote.pull()
    return remote


def _left(
    expected: Expected | None, source: Source, folder: Path, size: int, part: tuple[int, int]
) -> Left | None:
    """What is left to do, where that can be known."""
    if expected is None or source.count is None:
        return None
    done = open_store(folder).commits
    return Left.of(expected, folder, source.count, size, done, part)


def _about_there(folder: Path) -> About | None:
    """What a store is of that is there already."""
    file = folder / ABOUT
    if not file.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            if not (folder / UNFINISHED).is_dir():
                raise FileError(
                    f"{str(folder)!r} is there and is not a store. Give a new folder, or an empty one."
                )
        return None
    return About.read(file)


def _begin(folder: Path, about: About, there: About | None, edits: list[Edit]) -> About:
    """Write what the store is of, or see that it is the same."""
    try:
        for name in (COMMITS, SEGMENTS, UNFINISHED):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if there is None and not record(folder, ABOUT, about.to_json()):
            there = _about_there(folder)  # another writer was first
        if there is not None and (why := there.differs(about)) is not None:
            raise FileError(
                f"{str(folder)!r} is a store of something else: {why}. Give another folder; or the same model, texts "
                "and arguments, to go on with this one."
            )
        if edits and not (folder / HOOKS / "edits.json").exists():  # which is written last
            save_edits(folder / HOOKS, edits)
        sweep_unfinished(folder)
    except PermissionError as error:
        raise FileError(
            f"{str(folder)!r} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    return there or about


def _hash_of(edits: list[Edit]) -> str | None:
    """A hash of edits with all their numbers; None of none."""
    if not edits:
        return None
    said = json.dumps([edit.to_dict() for edit in edits], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def _live(model: TransformerModel, given: Iterable[Hook], engine: str) -> list[Hook]:
    """Every hook that changes values while the harvest runs, in order; none that others would not have."""
    if engine != "local":
        must_travel(model, "Give them as hooks=[...].")
        for hook in given:
            if isinstance(hook, Detector):
                raise Unsupported(
                    f"with engine='ray', {hook.label} would keep what it finds in other processes. Look at the store."
                )
    return [*live_hooks(model), *given]


def _said(hook: Hook) -> str:
    """A hook as the store names it: the same in every process."""
    if isinstance(hook, Edit):
        return repr(hook)
    return hook.label if hasattr(hook, "function") else type(hook).__name__


def _plan(
    model: TransformerModel,
    sites: Mapping[str, StoredSite],
    tokens: float,
    batch_tokens: int | None,
    segment_texts: int | None,
) -> Plan:
    size = sum(site.nbytes for site in sites.values())
    fast = model.device.type != "cpu"
    return Plan(
        texts=segment_texts or max(1, min(10**7, round(SEGMENT / size / tokens))),
        window=max(64, WINDOW // size),
        batch_tokens=batch_tokens or (16384 if fast else 2048),
    )


def _same_plan(plan: Plan, batch_tokens: int | None, segment_texts: int | None) -> Plan:
    """The plan of a store that is there, with what is asked for: if that is another, it is refused."""
    asked = {"batch_tokens": batch_tokens, "texts": segment_texts}
    return dataclasses.replace(plan, **{n: one for n, one in asked.items() if one is not None})
