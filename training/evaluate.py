"""Measure a trained model on what its training never showed: `python -m training.evaluate [FOLDER]`.

Every case is scored with the prompt as it is and with the end-of-text token in front. A case is right when the most
likely next token begins a right answer (and, for an answer of several tokens, each following token is the most likely
one too). Beside it stands a bigram model of the training text, which knows the last token only.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from training import agreement, corpus, facts, indirect_objects, opinions, stories, years
from training.splits import Case

POCKET = Path(__file__).parents[1] / "src" / "interpose" / "pocket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How one part of a held-out set went.

    Attributes:
        name: The set and its part.
        count: How many cases.
        right: Share of cases answered right.
        with_start: The same with the end-of-text token in front.
        probability: Median probability of the right answers together.
        preferred: Share of cases whose answer is likelier than the wrong ones; None where no wrong ones are named.
        bigram: Share of cases that a bigram model answers right.
    """

    name: str
    count: int
    right: float
    with_start: float
    probability: float
    preferred: float | None
    bigram: float


@dataclass(frozen=True, slots=True)
class Answered:
    """What the model said to one case."""

    is_right: bool
    probability: float
    is_preferred: bool | None


def grouped(rows: Sequence[Sequence[int]]) -> Iterable[list[int]]:
    """Indices of rows that share a length: they run together without padding."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_length[len(row)].append(index)
    for indices in by_length.values():
        for start in range(0, len(indices), 256):
            yield indices[start : start + 256]


class Examiner:
    """A model with its tokenizer, asked one prompt after another."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, nothing added."""
        if text not in self._known:
            self._known[text] = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._known[text]

    @torch.no_grad()
    def next_probabilities(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Probabilities of the token after each row, [rows, vocabulary]."""
        found = torch.empty(len(rows), self.model.config.vocab_size)
        for indices in grouped(rows):
            logits = self.model(torch.tensor([list(rows[i]) for i in indices])).logits
            found[indices] = logits[:, -1].softmax(-1)
        return found

    def answered(self, cases: Sequence[Case], *, start: bool) -> list[Answered]:
        """What the model says to each case, with or without the end-of-text token in front."""
        front = [0] if start else []
        prompts = [front + self.ids(case.prompt) for case in cases]
        probabilities = self.next_probabilities(prompts)
        later = self._later_tokens_are_right(prompts, cases)
        result = []
        for case, row, rest in zip(cases, probabilities, later):
            right = [self.ids(answer)[0] for answer in case.answers]
            mass = row[right].sum().item()
            wrong = [self.ids(answer)[0] for answer in case.wrong]
            preferred = bool(row[right].max() > row[wrong].max()) if wrong else None
            result.append(Answered(int(row.argmax()) in right and rest, mass, preferred))
        return result

    def _later_tokens_are_right(
        self, prompts: list[list[int]], cases: Sequence[Case]
    ) -> list[bool]:
        """Whether the second and later tokens of single long answers are the most likely ones too."""
        right = [True] * len(cases)
        for place in range(1, 4):
            rows, owners, targets = [], [], []
            for index, case in enumerate(cases):
                answer = self.ids(case.answers[0])
                if len(case.answers) == 1 and len(answer) > place:
                    rows.append(prompts[index] + answer[:place])
                    owners.append(index)
                    targets.append(answer[place])
            if rows:
                said = self.next_probabilities(rows).argmax(-1).tolist()
                for owner, token, target in zip(owners, said, targets):
                    right[owner] = right[owner] and token == target
        return right


class Bigram:
    """The likeliest token after a token, counted in the training text."""

    def __init__(self, examiner: Examiner, documents: int = 60_000) -> None:
        size = examiner.model.config.vocab_size
        self.counts = torch.zeros(size, size)
        texts = list(corpus.documents("bigram", documents))
        rows = examiner.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([token for row in rows for token in (*row, 0)])
        self.counts.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1), accumulate=True)
        self.examiner = examiner

    def right(self, cases: Sequence[Case]) -> list[bool]:
        """Whether the likeliest token after the prompt's last one begins a right answer."""
        said = [int(self.counts[self.examiner.ids(case.prompt)[-1]].argmax()) for case in cases]
        return [
            token in [self.examiner.ids(answer)[0] for answer in case.answers]
            for token, case in zip(said, cases)
        ]

    def mass(self, case: Case) -> float:
        """Probability of the right answers together."""
        row = self.counts[self.examiner.ids(case.prompt)[-1]]
        right = [self.examiner.ids(answer)[0] for answer in case.answers]
        return float(row[right].sum() / row.sum().clamp(min=1))


def _mean(values: Iterable[bool | float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def score(examiner: Examiner, bigram: Bigram, name: str, cases: Sequence[Case]) -> list[Score]:
    """One score per part of a set."""
    parts: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        parts[case.part].append(case)
    scores = []
    for part, members in parts.items():
        plain = examiner.answered(members, start=False)
        started = examiner.answered(members, start=True)
        preferred = [one.is_preferred for one in plain if one.is_preferred is not None]
        scores.append(
            Score(
                name=f"{name}: {part}" if part else name,
                count=len(members),
                right=_mean(one.is_right for one in plain),
                with_start=_mean(one.is_right for one in started),
                probability=sorted(one.probability for one in plain)[len(plain) // 2],
                preferred=_mean(preferred) if preferred else None,
                bigram=_mean(bigram.right(members)),
            )
        )
    return scores


def score_years(examiner: Examiner, bigram: Bigram) -> Score:
    """Greater-than: a start year is right when later years have at least 95% of the probability, whatever the event."""
    by_year: dict[str, list[Case]] = defaultdict(list)
    for case in years.cases():
        by_year[case.part].append(case)
    masses: dict[bool, list[float]] = {True: [], False: []}
    for members in by_year.values():
        for start in (False, True):
            told = examiner.answered(members, start=start)
            masses[start].append(_mean(one.probability for one in told))
    baseline = [_mean(bigram.mass(case) for case in members) for members in by_year.values()]
    return Score(
        name=f"greater-than: start years (worst mass {min(masses[False]):.3f}, with start {min(masses[True]):.3f})",
        count=len(by_year),
        right=_mean(mass >= 0.95 for mass in masses[False]),
        with_start=_mean(mass >= 0.95 for mass in masses[True]),
        probability=sorted(masses[False])[len(by_year) // 2],
        preferred=None,
        bigram=_mean(mass >= 0.95 for mass in baseline),
    )


def repeated_rows(vocabulary: int, *, rows: int, period: int) -> Tensor:
    """Random different tokens, said twice: [rows, 2 * period]."""
    rng = torch.Generator().manual_seed(period)
    said = torch.stack(
        [torch.randperm(vocabulary - 1, generator=rng)[:period] + 1 for _ in range(rows)]
    )
    return said.repeat(1, 2)


def score_induction(examiner: Examiner, bigram: Bigram) -> list[Score]:
    """Random sequences said twice: every token of the second saying after its first."""
    scores = []
    for period in (10, 30, 60):
        rows = repeated_rows(examiner.model.config.vocab_size, rows=64, period=period)
        right = {}
        for start in (False, True):
            asked = (
                torch.cat([torch.zeros(len(rows), 1, dtype=torch.long), rows], 1) if start else rows
            )
            with torch.no_grad():
                probabilities = examiner.model(asked).logits.softmax(-1)
            told = probabilities[:, -period:-1]
            wanted = rows[:, period + 1 :]
            right[start] = float((told.argmax(-1) == wanted).float().mean())
            if not start:
                likely = told.gather(-1, wanted[..., None]).median().item()
        last = bigram.counts[rows[:, period:-1]].argmax(-1)
        scores.append(
            Score(
                name=f"induction: {period} random tokens said twice",
                count=wanted.numel(),
                right=right[False],
                with_start=right[True],
                probability=likely,
                preferred=None,
                bigram=float((last == wanted).float().mean()),
            )
        )
    return scores


def evaluate(folder: Path) -> list[Score]:
    """Every held-out set on the model in this folder."""
    examiner = Examiner(folder)
    bigram = Bigram(examiner)
    sets = {
        "indirect objects": indirect_objects.cases(),
        "facts, main wording": facts.main_cases(),
        "facts, unseen wording": facts.cases(),
        "agreement": agreement.cases(),
        "opinions": opinions.cases(),
        "stories": stories.cases(),
    }
    scores = [one for name, cases in sets.items() for one in score(examiner, bigram, name, cases)]
    return [*scores, score_years(examiner, bigram), *score_induction(examiner, bigram)]


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table."""
    lines = [
        "| held-out set | cases | right | after end-of-text | median probability | above the wrong answer | bigram |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in scores:
        preferred = "" if one.preferred is None else f"{one.preferred:.1%}"
        lines.append(
            f"| {one.name} | {one.count} | {one.right:.1%} | {one.with_start:.1%} | {one.probability:.2f} "
            f"| {preferred} | {one.bigram:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", default=POCKET)
    parser.add_argument("--json", type=Path, help="write the scores here too")
    args = parser.parse_args()
    scores = evaluate(args.folder)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in scores], indent=1) + "\n")
    print(table(scores))  # noqa: T201


if __name__ == "__main__":
    main()
