"""`Store.export`: a store as numpy's files, as parquet tables, or as a data set of Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from interpose.errors import FileError
from interpose.files.writing import write_whole
from interpose.monitors.statistics import ActivationStatistics
from interpose.store.foreign.extras import needed
from interpose.store.reading import Segment
from interpose.store.records import StoredSite, file_name

FORMATS = ("npy", "parquet", "dataset")


class Exported(Protocol):
    """The parts of a store that are exported."""

    segments: list[Segment]

    @property
    def sites(self) -> Mapping[str, StoredSite]:
        """The sites by canonical name."""

    @property
    def vectors(self) -> int:
        """How many vectors each site has."""

    def __len__(self) -> int: ...

    def statistics(self, site: Any = None) -> ActivationStatistics:
        """Mean, variance and range of every unit."""


def export_store(store: Exported, folder: str | Path, kind: str, names: Sequence[str]) -> Path:
    """Write some sites of a store to a new folder, which is there when it is whole.

    Args:
        store: what is exported.
        folder: a new one.
        kind: one of `FORMATS`.
        names: of the sites.
    """
    writers: dict[str, Callable[[Exported, Path, Sequence[str]], None]] = {
        "npy": _as_arrays,
        "parquet": _as_tables,
        "dataset": _as_dataset,
    }
    if kind not in writers:
        raise ValueError(f"format is one of {', '.join(FORMATS)}; got {kind!r}.")
    target = Path(folder).absolute()
    if target.exists():
        raise FileError(f"{str(target)!r} is there already. Give a new folder.")
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        writers[kind](store, unfinished, names)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _numpys(values: Tensor) -> Tensor:
    """As numpy can hold it: it has no bfloat16."""
    return values.float() if values.dtype == torch.bfloat16 else values


def _dtype(site: StoredSite) -> Any:
    kind = torch.float32 if site.dtype in ("int8", "bfloat16") else site.torch_dtype
    return _numpys(torch.empty(0, dtype=kind)).numpy().dtype


def _as_arrays(store: Exported, folder: Path, names: Sequence[str]) -> None:
    """A file for each site [vector, ...], and ``row``, ``pos`` and ``tokens`` of each vector."""
    count = store.vectors
    files = {
        name: np.lib.format.open_memmap(
            folder / file_name(name).replace(".safetensors", ".npy"),
            mode="w+",
            dtype=_dtype(store.sites[name]),
            shape=(count, *store.sites[name].shape),
        )
        for name in names
    }
    index = {
        name: np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=np.int64, shape=(count,)
        )
        for name in ("row", "pos", "tokens")
    }
    at = first_row = 0
    for segment in store.segments:
        end = at + segment.commit.vectors
        for name, file in files.items():
            file[at:end] = _numpys(segment.values(name)).numpy()
        row, pos, tokens = segment.places()
        for name, one in {"row": row + first_row, "pos": pos, "tokens": tokens}.items():
            index[name][at:end] = one.numpy()
        at, first_row = end, first_row + segment.commit.rows
    for file in (*files.values(), *index.values()):
        file.flush()
    described = {
        file_name(name).replace(".safetensors", ".npy"): {"site": name, "stored": store.sites[name].dtype}
        for name in names
    }  # fmt: skip
    write_whole(folder / "sites.json", json.dumps(described, indent=1))


def _as_tables(store: Exported, folder: Path, names: Sequence[str]) -> None:
    """``rows`` (with their tokens), ``vectors`` (where each is) and ``statistics`` of units; no values."""
    needed("pyarrow", "format='parquet'")
    arrow, parquet = needed("pyarrow", ""), needed("pyarrow.parquet", "format='parquet'")
    int32s = arrow.list_(arrow.int32())
    rows = arrow.schema(
        [("row", arrow.int64()), ("text", arrow.int64()), ("start", arrow.int32()),
         ("segment", arrow.int32()), ("vector", arrow.int64()), ("tokens", int32s)]
    )  # fmt: skip
    vectors = arrow.schema(
        [("vector", arrow.int64()), ("row", arrow.int64()), ("pos", arrow.int32()), ("token", arrow.int32())]
    )  # fmt: skip
    with (
        parquet.ParquetWriter(folder / "rows.parquet", rows) as to_rows,
        parquet.ParquetWriter(folder / "vectors.parquet", vectors) as to_vectors,
    ):
        first_row = first_vector = 0
        for segment in store.segments:
            index, commit = segment.index, segment.commit
            starts = index.get("vector_offsets", index["offsets"])[:-1].long() + first_vector
            tokens = arrow.ListArray.from_arrays(index["offsets"].numpy(), index["tokens"].numpy())
            made = {
                "row": np.arange(first_row, first_row + commit.rows),
                "text": index["texts"].long().numpy() + commit.texts[0],
                "start": index["starts"].numpy(),
                "segment": np.full(commit.rows, commit.segment, np.int32),
                "vector": starts.numpy(),
                "tokens": tokens,
            }
            to_rows.write_table(arrow.table(made, schema=rows))
            row, pos, token = segment.places()
            made = {
                "vector": np.arange(first_vector, first_vector + commit.vectors),
                "row": row.numpy() + first_row,
                "pos": pos.int().numpy(),
                "token": token.int().numpy(),
            }
            to_vectors.write_table(arrow.table(made, schema=vectors))
            first_row, first_vector = first_row + commit.rows, first_vector + commit.vectors
    parts = [
        arrow.table(
            {
                "site": [one.site] * one.units,
                "unit": np.arange(one.units),
                "count": np.full(one.units, one.count),
                **{
                    column: getattr(one, column).reshape(-1).double().numpy()
                    for column in ("mean", "variance", "minimum", "maximum", "sparsity")
                },
            }
        )
        for one in store.statistics(list(names)).rows
    ]
    if parts:
        parquet.write_table(arrow.concat_tables(parts), folder / "statistics.parquet")


def _as_dataset(store: Exported, folder: Path, names: Sequence[str]) -> None:
    """A row for each row of text: its sites [pos, size], and ``token_ids``; of equal lengths as SAELens caches them."""
    datasets = needed("datasets", "format='dataset'")
    sizes = {name: int(np.prod(store.sites[name].shape)) for name in names}
    lengths = {
        int(count)
        for segment in store.segments
        for count in segment.index.get("vector_offsets", segment.index["offsets"]).diff().unique()
    }
    length = lengths.pop() if len(lengths) == 1 else None  # None: each row has its own

    def of_site(name: str) -> Any:
        kind = str(_dtype(store.sites[name]))
        return datasets.Array2D((length, sizes[name]), kind)

    features = datasets.Features(
        {name: of_site(name) for name in names}
        | {
            "token_ids": datasets.Sequence(datasets.Value("int32"), length=-1 if length is None else length),
            "text": datasets.Value("int64"),
            "start": datasets.Value("int32"),
        }
    )  # fmt: skip

    def rows() -> Iterator[dict[str, Any]]:
        for segment in store.segments:
            _, _, tokens = segment.places()
            index = segment.index
            for row in range(segment.commit.rows):
                where = slice(*segment.vectors(row))
                yield {
                    **{
                        name: _numpys(segment.values(name, where)).flatten(1).numpy()
                        for name in names
                    },
                    "token_ids": tokens[where].tolist(),
                    "text": segment.commit.texts[0] + int(index["texts"][row]),
                    "start": int(index["starts"][row]),
                }

    writing = needed("datasets.arrow_writer", "format='dataset'")
    scratch = folder.with_name(folder.name + ".arrow")
    try:
        with writing.ArrowWriter(features=features, path=str(scratch)) as writer:
            for row in rows():
                writer.write(row)
            writer.finalize()
        datasets.Dataset.from_file(str(scratch)).save_to_disk(str(folder))
    finally:
        scratch.unlink(missing_ok=True)
