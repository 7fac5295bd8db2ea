"""Rough numbers that say whether a model is any good: losses, induction, indirect objects.

`induction_loss`, `IOIDataset`, `ioi_eval`, `sanity_check` and `evaluate_on_dataset` need nothing but the model. Data
of others is downloaded with the ``datasets`` package: the ``make_*`` loaders, `evaluate` and `mmlu_eval`.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

_CONTEXT = 1024  # tokens in a row of a loader
_DOCUMENTS = 2000  # of a large dataset, streamed
MMLU_ANSWER_LETTERS = ["A", "B", "C", "D"]
MMLU_SUBJECTS = """
abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
college_computer_science college_mathematics college_medicine college_physics computer_security conceptual_physics
econometrics electrical_engineering elementary_mathematics formal_logic global_facts high_school_biology
high_school_chemistry high_school_computer_science high_school_european_history high_school_geography
high_school_government_and_politics high_school_macroeconomics high_school_mathematics high_school_microeconomics
high_school_physics high_school_psychology high_school_statistics high_school_us_history high_school_world_history
human_aging human_sexuality international_law jurisprudence logical_fallacies machine_learning management marketing
medical_genetics miscellaneous moral_disputes moral_scenarios nutrition philosophy prehistory
professional_accounting professional_law professional_medicine professional_psychology public_relations
security_studies sociology us_foreign_policy virology world_religions
""".split()
_TEXT = (
    "The harbour was quiet in the morning. A few boats had come in during the night, and the fishermen "
    "were carrying their boxes to the market, where people were already waiting. An old man sat on the "
    "wall and watched them. He had worked on the same boats for forty years, and he knew every one of "
    "the men by name. When the last box was gone, he stood up and walked slowly home."
)


def sanity_check(model: Any, text: str | Sequence[str] | Tensor = _TEXT) -> Tensor:
    """The loss on a piece of plain English, or on a text, texts or tokens of yours.

    A language model of some size is below 5; above 7 something is wrong with it.
    """
    with torch.no_grad():
        loss: Tensor = model(text, return_type="loss")
    return loss


def induction_loss(
    model: Any,
    tokenizer: Any = None,
    batch_size: int = 4,
    subseq_len: int | None = None,
    prepend_bos: bool | None = None,
    device: Any = None,
) -> Tensor:
    """The mean loss on the second saying of random tokens said twice: low in a model with induction heads.

    Args:
        model: the model.
        tokenizer: whose BOS token to use; the model's by default.
        batch_size: how many rows.
        subseq_len: how many tokens are said twice; by default 384, or half the context if that is less.
        prepend_bos: whether the BOS token takes the place of the first token; by default if there is one.
        device: where to make the tokens; the model's by default.
    """
    length = min(384, model.cfg.n_ctx // 2) if subseq_len is None else subseq_len
    if not 3 <= length <= model.cfg.n_ctx // 2:
        raise ValueError(
            f"{length} tokens said twice: at least 3, and at most {model.cfg.n_ctx // 2}, half the "
            "model's context. Give another subseq_len."
        )
    first = 100 if model.cfg.d_vocab > 1000 else 0  # special tokens and single bytes come first
    once = torch.randint(first, min(20_000, model.cfg.d_vocab), (batch_size, length))
    tokens = once.repeat(1, 2)
    bos = getattr(tokenizer or getattr(model, "tokenizer", None), "bos_token_id", None)
    if prepend_bos and bos is None:
        raise ValueError(
            "prepend_bos=True, but no BOS token is known: give a tokenizer that has one."
        )
    if prepend_bos is None:
        prepend_bos = bos is not None and getattr(model.cfg, "default_prepend_bos", True)
    if prepend_bos and bos is not None:
        tokens[:, 0] = int(bos)
    with torch.no_grad():
        losses = model(
            tokens.to(device or model.cfg.device), return_type="loss", loss_per_token=True
        )
    second: Tensor = losses[:, length + 1 :].mean()
    return second


def evaluate_on_dataset(
    model: Any, data_loader: Iterable[Any], truncate: int = 100, device: Any = None
) -> float:
    """The mean loss over the batches of a loader, each a tensor of tokens or a mapping with ``tokens``.

    Args:
        model: the model.
        data_loader: what gives the batches.
        truncate: how many batches at most.
        device: where to put the tokens; the model's by default.
    """
    losses = []
    for batch in itertools.islice(data_loader, truncate):
        tokens = batch["tokens"] if isinstance(batch, Mapping) else batch
        losses.append(float(sanity_check(model, tokens.to(device or model.cfg.device))))
    if not losses:
        raise ValueError("the loader gave no batch.")
    return sum(losses) / len(losses)


class IOIDataset(Dataset[dict[str, Tensor]]):
    """Sentences in which two people meet and one gives something to the other, whose name comes last.

    ``dataset[0]`` has the tokens of the whole sentence (``prompt``), of the name that ends it (``IO``) and of the
    name said twice (``S``); ``dataset.samples[0]`` has the same as text.

    Args:
        tokenizer: a tokenizer of transformers.
        templates: sentences with ``[A]`` and ``[B]`` for the names and other words in brackets for nouns; they
            end with ``[A]``, and ``[B]`` is the name said twice.
        names: the names.
        nouns: what may stand for each word in brackets.
        num_samples: how many sentences.
        symmetric: whether every sentence is followed by itself with the names exchanged.
        prepend_bos: whether prompts begin with the BOS token.
        seed: the same seed gives the same sentences; without one they differ each time.
    """

    def __init__(
        self,
        tokenizer: Any,
        templates: list[str] | None = None,
        names: list[str] | None = None,
        nouns: dict[str, list[str]] | None = None,
        num_samples: int = 1000,
        symmetric: bool = False,
        prepend_bos: bool = True,
        seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prepend_bos = prepend_bos
        self.templates = templates or self.get_default_templates()
        self.names = names or self.get_default_names()
        self.nouns = nouns or self.get_default_nouns()
        wrong = [text for text in self.templates if not text.rstrip(". ").endswith("[A]")]
        if wrong or len(set(self.names)) < 2:
            raise ValueError(
                f"templates end with [A], and there are two names; got {wrong or names}"
            )
        self._random = Random(seed)
        self.samples: list[dict[str, str]] = []
        while len(self.samples) < num_samples:
            self.samples += self.get_sample(symmetric)
        del self.samples[num_samples:]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        sample = self.samples[idx]
        prompt = self._tokens(sample["text"])
        bos = self.tokenizer.bos_token_id
        if self.prepend_bos and bos is not None:
            prompt = torch.cat([torch.tensor([bos]), prompt])
        return {"prompt": prompt, "IO": self._tokens(sample["IO"]), "S": self._tokens(sample["S"])}

    def get_sample(self, symmetric: bool = False) -> list[dict[str, str]]:
        """A new sentence, and the same with the names exchanged if ``symmetric``."""
        text = self._random.choice(self.templates).rstrip(". ")
        for noun, choices in self.nouns.items():
            text = text.replace(f"[{noun}]", self._random.choice(choices))
        pair = self._random.sample(list(dict.fromkeys(self.names)), 2)
        return [
            {
                "text": text.replace("[A]", receiver).replace("[B]", giver),
                "IO": f" {receiver}",
                "S": f" {giver}",
            }
            for receiver, giver in ((pair, pair[::-1]) if symmetric else (pair,))
        ]

    def _tokens(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @staticmethod
    def get_default_names() -> list[str]:
        """The names, each one token of most tokenizers."""
        return "Mary John Anna Tom Sarah James Laura Paul Alice Emma David Susan".split()

    @staticmethod
    def get_default_templates() -> list[str]:
        """The sentences; each name comes first in half of them."""
        return [
            "When [A] and [B] were at the [LOCATION], [B] gave the [OBJECT] to [A]",
            "When [B] and [A] were at the [LOCATION], [B] gave the [OBJECT] to [A]",
            "After [A] and [B] left the [LOCATION], [B] handed the [OBJECT] to [A]",
            "After [B] and [A] left the [LOCATION], [B] handed the [OBJECT] to [A]",
            "While [A] and [B] sat down in the [LOCATION], [B] showed the [OBJECT] to [A]",
            "While [B] and [A] sat down in the [LOCATION], [B] showed the [OBJECT] to [A]",
        ]

    @staticmethod
    def get_default_nouns() -> dict[str, list[str]]:
        """What stands for ``[LOCATION]`` and ``[OBJECT]``."""
        return {
            "LOCATION": "garden kitchen school park station".split(),
            "OBJECT": "book letter ring ball key".split(),
        }


def ioi_eval(
    model: Any,
    dataset: Any = None,
    batch_size: int = 8,
    num_samples: int = 1000,
    tokenizer: Any = None,
    symmetric: bool = False,
) -> dict[str, float]:
    """How far the right name is ahead of the one said twice (mean logits), and how often it is ahead.

    Names are compared by their first token.

    Args:
        model: the model.
        dataset: what `IOIDataset` gives, or anything with the same items; a new one by default.
        batch_size: how many sentences, all of one length, run together.
        num_samples: how many sentences a new dataset has.
        tokenizer: of a new dataset; the model's by default.
        symmetric: whether a new dataset has every sentence both ways.
    """
    if dataset is None:
        tokenizer = tokenizer or model.tokenizer
        dataset = IOIDataset(tokenizer, num_samples=num_samples, symmetric=symmetric)
    by_length: dict[int, list[dict[str, Tensor]]] = {}
    for at in range(len(dataset)):  # equal lengths need no padding
        by_length.setdefault(len(dataset[at]["prompt"]), []).append(dataset[at])
    ahead: list[float] = []
    for items in by_length.values():
        for start in range(0, len(items), batch_size):
            batch = items[start : start + batch_size]
            tokens = torch.stack([item["prompt"] for item in batch]).to(model.cfg.device)
            with torch.no_grad():
                logits = model(tokens, return_type="logits")
            for row, item in zip(logits, batch):
                last = row[-1 - len(item["IO"])]  # what the first token of the name is read from
                ahead.append(float(last[item["IO"][0]] - last[item["S"][0]]))
    right = sum(lead > 0 for lead in ahead)
    return {"Logit Difference": sum(ahead) / len(ahead), "Accuracy": right / len(ahead)}


def _datasets(what: str) -> Any:
    """The datasets package, which downloads."""
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{what} downloads its data: pip install datasets, and be online. Without it, give batches of "
            "your own to evaluate_on_dataset, or use induction_loss and ioi_eval.",
            name="datasets",
        ) from error


def _loader(what: str, tokenizer: Any, batch_size: int, column: str, *where: str) -> Any:
    """Batches ``{"tokens": [batch, pos]}`` of the first documents of a dataset, one after the other."""
    data = _datasets(what).load_dataset(*where, split="train", streaming=True)
    ids: list[int] = []
    for document in itertools.islice(data, _DOCUMENTS):
        ids += [tokenizer.eos_token_id, *tokenizer(document[column])["input_ids"]]
    rows = torch.tensor(ids[: len(ids) // _CONTEXT * _CONTEXT]).view(-1, _CONTEXT)
    return DataLoader([{"tokens": row} for row in rows], batch_size=batch_size)  # type: ignore[arg-type]


def make_wiki_data_loader(tokenizer: Any, batch_size: int = 8) -> Any:
    """Articles of Wikipedia (wikitext-2) in rows of 1024 tokens; needs the datasets package."""
    where = ("wikitext", "wikitext-2-raw-v1")
    return _loader("make_wiki_data_loader", tokenizer, batch_size, "text", *where)


def make_owt_data_loader(tokenizer: Any, batch_size: int = 8) -> Any:
    """Pages of OpenWebText in rows of 1024 tokens; needs the datasets package."""
    where = ("stas/openwebtext-10k",)
    return _loader("make_owt_data_loader", tokenizer, batch_size, "text", *where)


def make_pile_data_loader(tokenizer: Any, batch_size: int = 8) -> Any:
    """Documents of the Pile in rows of 1024 tokens; needs the datasets package."""
    where = ("NeelNanda/pile-10k",)
    return _loader("make_pile_data_loader", tokenizer, batch_size, "text", *where)


def make_code_data_loader(tokenizer: Any, batch_size: int = 8) -> Any:
    """Python code in rows of 1024 tokens; needs the datasets package."""
    where = ("codeparrot/codeparrot-valid-v2-near",)
    return _loader("make_code_data_loader", tokenizer, batch_size, "content", *where)


DATASET_NAMES = ["wiki", "owt", "pile", "code"]
DATASET_LOADERS = [
    make_wiki_data_loader,
    make_owt_data_loader,
    make_pile_data_loader,
    make_code_data_loader,
]


def evaluate(
    model: Any, truncate: int = 100, batch_size: int = 8, tokenizer: Any = None
) -> dict[str, float]:
    """Losses on four datasets and on repeated random tokens; needs the datasets package."""
    tokenizer = tokenizer or model.tokenizer
    found = {}
    for name, make in zip(DATASET_NAMES, DATASET_LOADERS):
        loader = make(tokenizer, batch_size=batch_size)
        found[f"{name}_loss"] = evaluate_on_dataset(model, loader, truncate=truncate)
    return found | {"induction_loss": float(induction_loss(model, tokenizer))}


def make_mmlu_data_loader(
    subjects: str | list[str] | None = None, split: str = "test", num_samples: int | None = None
) -> list[dict[str, Any]]:
    """Questions of MMLU (``question``, ``choices``, ``answer``, ``subject``); needs the datasets package.

    Args:
        subjects: a subject or several; all 57 by default.
        split: ``test``, ``validation`` or ``dev``.
        num_samples: how many of each subject at most.
    """
    data = _datasets("make_mmlu_data_loader")
    wanted = [subjects] if isinstance(subjects, str) else subjects or MMLU_SUBJECTS
    unknown = [name for name in wanted if name not in MMLU_SUBJECTS]
    if unknown:
        raise ValueError(f"MMLU has no {', '.join(unknown)}; its subjects are in MMLU_SUBJECTS.")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in data.load_dataset("cais/mmlu", "all", split=split):
        if row["subject"] in wanted:
            found.setdefault(row["subject"], []).append(dict(row))
    return [row for rows in found.values() for row in rows[:num_samples]]


def mmlu_eval(
    model: Any,
    tokenizer: Any = None,
    subjects: str | list[str] | None = None,
    split: str = "test",
    num_samples: int | None = None,
) -> dict[str, Any]:
    """How often the letter of the right choice is the likeliest of the four; needs the datasets package.

    Args:
        model: the model.
        tokenizer: the model's by default.
        subjects: as in `make_mmlu_data_loader`.
        split: as in `make_mmlu_data_loader`.
        num_samples: as in `make_mmlu_data_loader`.
    """
    return _mmlu_scores(
        model, tokenizer or model.tokenizer, make_mmlu_data_loader(subjects, split, num_samples)
    )


def _mmlu_scores(model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of `mmlu_eval` on questions that are there already."""
    letters = [
        tokenizer(f" {x}", add_special_tokens=False)["input_ids"][-1] for x in MMLU_ANSWER_LETTERS
    ]
    right: dict[str, list[bool]] = {}
    for row in rows:
        lines = [f"{x}. {choice}" for x, choice in zip(MMLU_ANSWER_LETTERS, row["choices"])]
        text = "\n".join([f"Question: {row['question']}", *lines, "Answer:"])
        tokens = torch.tensor([tokenizer(text)["input_ids"]], device=model.cfg.device)
        with torch.no_grad():
            last = model(tokens, return_type="logits")[0, -1]
        said = int(last[letters].argmax())
        right.setdefault(row["subject"], []).append(said == row["answer"])
    correct, total = (sum(map(f, right.values())) for f in (sum, len))
    return {
        "accuracy": correct / total,
        "num_correct": correct,
        "num_total": total,
        "subject_scores": {name: sum(hits) / len(hits) for name, hits in right.items()},
    }
