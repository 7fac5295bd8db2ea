"""The training text as tokens: documents drawn from the mix, each followed by the end-of-text token."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from training import agreement, copying, facts, indirect_objects, opinions, stories, years
from training.tokenizer import END_OF_TEXT

# Share of the documents; documents of one kind are 10 to 30 tokens long.
MIX = {
    indirect_objects: 0.29,
    facts: 0.25,
    opinions: 0.12,
    agreement: 0.09,
    years: 0.08,
    stories: 0.11,
    copying: 0.06,
}
_CHUNK = 20_000


def documents(seed: str, count: int) -> Iterator[str]:
    """So many documents of the mix; the same seed gives the same ones."""
    rng = Random(seed)
    kinds = rng.choices(list(MIX), list(MIX.values()), k=count)
    return (kind.document(rng) for kind in kinds)


def _encoded(tokenizer_file: str, seed: int, chunk: int) -> NDArray[np.uint16]:
    tokenizer = Tokenizer.from_file(tokenizer_file)
    (end,) = tokenizer.encode(END_OF_TEXT).ids
    texts = list(documents(f"{seed}/{chunk}", _CHUNK))
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(texts):
        ids.extend(encoding.ids)
        ids.append(end)
    return np.asarray(ids, dtype=np.uint16)


def corpus(
    folder: Path, tokenizer_file: Path, *, seed: int, count: int, workers: int
) -> NDArray[np.uint16]:
    """About `count` documents as one row of token ids, made once and kept in `folder`.

    Args:
        folder: Where the row is kept between runs.
        tokenizer_file: The `tokenizer.json` to use.
        seed: Which documents.
        count: How many, rounded up to whole chunks.
        workers: Processes that write text.
    """
    kept = folder / f"corpus-{seed}-{count}.npy"
    if not kept.exists():
        chunks = range(-(-count // _CHUNK))
        with ProcessPoolExecutor(workers) as pool:
            made = pool.map(partial(_encoded, str(tokenizer_file), seed), chunks)
            rows = list(tqdm(made, total=len(chunks), desc="text", unit="chunk"))
        partly = kept.with_suffix(".partly.npy")
        np.save(partly, np.concatenate(rows))
        partly.rename(kept)
    tokens: NDArray[np.uint16] = np.load(kept, mmap_mode="r")
    return tokens
