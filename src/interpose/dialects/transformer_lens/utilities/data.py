"""Datasets of texts, files from the Hugging Face Hub, and texts as rows of tokens."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.utilities.optional import needs
from interpose.dialects.transformer_lens.utilities.tensors import get_cumsum_along_dim

_DATASETS = {
    "openwebtext": "stas/openwebtext-10k",
    "owt": "stas/openwebtext-10k",
    "pile": "NeelNanda/pile-10k",
    "c4": "NeelNanda/c4-10k",
    "code": "NeelNanda/code-10k",
    "python": "NeelNanda/code-10k",
    "c4_code": "NeelNanda/c4-code-20k",
    "c4-code": "NeelNanda/c4-code-20k",
    "wiki": "NeelNanda/wiki-10k",
}


def get_dataset(dataset_name: str, **kwargs: Any) -> Any:
    """A small dataset of texts (10,000 or 20,000), from the Hugging Face Hub; texts are in its column ``text``.

    Args:
        dataset_name: ``openwebtext``, ``pile``, ``c4``, ``code``, ``c4_code`` or ``wiki``.
        **kwargs: for ``datasets.load_dataset``.
    """
    if dataset_name not in _DATASETS:
        raise ValueError(
            f"no dataset {dataset_name!r}. There are: {', '.join(_DATASETS)}. For any other: "
            "datasets.load_dataset(name)."
        )
    datasets = needs("datasets", "get_dataset")
    return datasets.load_dataset(_DATASETS[dataset_name], **{"split": "train"} | kwargs)


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str | None = ".",
    cache_dir: str | None = None,
    force_is_torch: bool = False,
    weights_only: bool = True,
    **kwargs: Any,
) -> Any:
    """A file from the Hugging Face Hub: what is in it for ``.pth`` and ``.json``, else the path it was saved at.

    Args:
        repo_name: the repository, ``owner/name``.
        file_name: the file.
        subfolder: the folder that it is in.
        cache_dir: where to save it; None for where the Hub's library does.
        force_is_torch: load it with `torch.load` whatever its name.
        weights_only: load tensors and plain containers only. Anything else in a torch file is a program
            that loading runs: allow it, with False, for files whose author you trust.
        **kwargs: for ``huggingface_hub.hf_hub_download``, such as ``revision``.
    """
    hub = needs("huggingface_hub", "download_file_from_hf")
    folder = None if subfolder in (".", "") else subfolder
    path = str(
        hub.hf_hub_download(repo_name, file_name, subfolder=folder, cache_dir=cache_dir, **kwargs)
    )
    if path.endswith(".pth") or force_is_torch:
        try:
            return torch.load(path, map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as error:
            if weights_only:
                error.add_note(
                    f"If you trust who made it: download_file_from_hf({repo_name!r}, {file_name!r}, "
                    "..., weights_only=False)"
                )
            raise
    return json.loads(Path(path).read_text("utf-8")) if path.endswith(".json") else path


def keep_single_column(dataset: Any, col_name: str) -> Any:
    """A dataset with one of its columns."""
    others = [name for name in dataset.features if name != col_name]
    return dataset.remove_columns(others) if others else dataset


def tokenize_and_concatenate(
    dataset: Any,
    tokenizer: Any,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int | None = 10,
    set_format: bool = True,
) -> Any:
    """A dataset of texts as rows of ``max_length`` tokens, none of them padding, in a column ``tokens``.

    Texts follow one another with an EOS token between them; what does not fill a row at the end is
    left out, unless it is all there is, which is padded. Rows are cut per batch of the dataset's
    own ``map``.

    Args:
        dataset: of the ``datasets`` library, streamed or not.
        tokenizer: of transformers, with an EOS token; it stays as it is.
        streaming: whether the dataset is streamed, so that no processes are started.
        max_length: tokens in a row.
        column_name: where the texts are.
        add_bos_token: begin each row with a BOS token.
        num_proc: how many processes; None for this one.
        set_format: give tensors.
    """
    for needed in ("eos", "bos") if add_bos_token else ("eos",):
        if getattr(tokenizer, f"{needed}_token_id", None) is None:
            raise ValueError(
                f"the tokenizer has no {needed.upper()} token"
                + (
                    "; add_bos_token=False does without."
                    if needed == "bos"
                    else " to put between texts."
                )
            )

    def rows_of(examples: Mapping[str, Sequence[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": _rows(examples[column_name], tokenizer, max_length, add_bos_token)}

    processes = {} if streaming else {"num_proc": num_proc}
    kept = keep_single_column(dataset, column_name)
    tokenized = kept.map(rows_of, batched=True, remove_columns=[column_name], **processes)
    if set_format:
        tokenized.set_format(type="torch", columns=["tokens"])
    return tokenized


def _rows(
    texts: Sequence[str], tokenizer: Any, max_length: int, add_bos_token: bool
) -> list[list[int]]:
    """Texts as rows of one length."""
    start = [tokenizer.bos_token_id] if add_bos_token else []
    length = max_length - len(start)
    if length < 1:
        raise ValueError(f"max_length={max_length} leaves no room for text.")
    if not texts:
        return []
    # No special tokens: some tokenizers would begin or end every text with one. Long texts are fine.
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    stream: list[int] = []
    for number, row in enumerate(encoded):
        stream += [tokenizer.eos_token_id, *row] if number else row
    if len(stream) < length:
        pad = getattr(tokenizer, "pad_token_id", None)
        filler = tokenizer.eos_token_id if pad is None else pad
        stream += [filler] * (length - len(stream))
    ends = range(length, len(stream) + 1, length)
    return [[*start, *stream[end - length : end]] for end in ends]


def get_input_with_manually_prepended_bos(
    bos_token: str | None,
    input: str | list[str],
) -> str | list[str]:
    """Texts with a BOS token before each; as they are if there is none."""
    if bos_token is None:
        return input
    return bos_token + input if isinstance(input, str) else [bos_token + text for text in input]


def get_tokens_with_bos_removed(
    tokenizer: Any, tokens: Tensor, padding_side: str | None = None
) -> Tensor:
    """Tokens without the BOS token of each text, [..., pos - 1]; as they are if the tokenizer has none.

    Args:
        tokenizer: what the tokens are from.
        tokens: token ids [..., pos], each text with its BOS.
        padding_side: ``left`` or ``right``; by default the tokenizer's.
    """
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    if bos is None:
        return tokens
    if (padding_side or tokenizer.padding_side) == "right":
        return tokens[..., 1:]
    text = torch.ones_like(tokens) if pad is None else (tokens != pad).long()
    first = (get_cumsum_along_dim(text, -1) == 0).sum(-1, keepdim=True)
    first = first - 1 if bos == pad else first  # its own BOS looks like padding
    inside = (first >= 0) & (first < tokens.shape[-1])
    begins = [bos, getattr(tokenizer, "cls_token_id", None)]
    found = tokens.gather(-1, first.clamp(0, tokens.shape[-1] - 1))
    known = torch.tensor([token for token in begins if token is not None], device=tokens.device)
    if not bool((inside & torch.isin(found, known)).all()):
        raise ValueError(
            f"a text does not begin with the BOS token ({bos}), so it cannot be taken off."
        )
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    return tokens[places != first].reshape(*tokens.shape[:-1], tokens.shape[-1] - 1)
