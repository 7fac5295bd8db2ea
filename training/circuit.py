"""What the heads of a trained model do, measured: `python -m training.circuit [FOLDER]`.

Everything is read and cut with interpose itself. Names stand at three places of an indirect-object prompt: the first of
the two names, the second, and the name said again; the prompt's last token is where the answer is read.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

import interpose as ip
from training import indirect_objects
from training.evaluate import POCKET, repeated_rows
from training.splits import Case

Head = tuple[int, int]


def shape(model: ip.TransformerModel) -> tuple[int, int]:
    """How many layers and heads there are."""
    layers, heads = model.W_Q.shape[:2]
    return layers, heads


@torch.no_grad()
def repetition_heads(model: ip.TransformerModel, period: int = 40) -> tuple[Tensor, Tensor]:
    """Mean attention on random tokens said twice, each [layer, head].

    The first is to the token before; the second, in the second saying, to the token after the same one in the first.
    """
    rows = repeated_rows(int(model.W_U.shape[1]), rows=16, period=period)
    _, cache = model.run_with_cache(rows, names_filter="pattern")
    patterns = torch.stack([cache["pattern", layer] for layer in range(shape(model)[0])])
    previous = patterns.diagonal(-1, -2, -1).mean((1, 3))
    induction = patterns.diagonal(1 - period, -2, -1)[..., 1:].mean((1, 3))
    return previous, induction


@dataclass(frozen=True, slots=True)
class Prompt:
    """An indirect-object prompt with its places.

    Attributes:
        tokens: [1, pos].
        first: Position of the first of the two names.
        second: Position of the second.
        again: Position of the name said again.
        answer: Token of the name that is the answer.
        subject: Token of the name said again.
    """

    tokens: Tensor
    first: int
    second: int
    again: int
    answer: int
    subject: int

    @property
    def answer_is_first(self) -> bool:
        """Whether the answer is the first of the two names."""
        return self.answer_place == self.first

    @property
    def answer_place(self) -> int:
        """Where the answer stands."""
        said = int(self.tokens[0, self.again])
        return self.second if said == int(self.tokens[0, self.first]) else self.first


def prompts(model: ip.TransformerModel, count: int = 120) -> list[Prompt]:
    """Held-out prompts in which no name begins the text, so that each name is one and the same token everywhere."""
    rng = Random("circuit")
    found: list[Prompt] = []
    while len(found) < count:
        placed = _placed(model, indirect_objects.prompt(rng))
        if placed is not None:
            found.append(placed)
    return found


def _placed(model: ip.TransformerModel, case: Case) -> Prompt | None:
    tokens = model.to_tokens(case.prompt)
    answer, subject = (model.to_single_token(text[0]) for text in (case.answers, case.wrong))
    places = [at for at, token in enumerate(tokens[0].tolist()) if token in (answer, subject)]
    if len(places) != 3:
        return None
    first, second, again = places
    return Prompt(tokens, first, second, again, answer, subject)


@torch.no_grad()
def attention(model: ip.TransformerModel, asked: Sequence[Prompt]) -> dict[str, Tensor]:
    """Mean attention from the last token to each of the three names, each [layer, head]."""
    found = {name: torch.zeros(shape(model)) for name in ("first", "second", "again")}
    for prompt in asked:
        _, cache = model.run_with_cache(prompt.tokens, names_filter="pattern")
        for layer in range(shape(model)[0]):
            last = cache["pattern", layer][0, :, -1]
            for name, total in found.items():
                total[layer] += last[:, getattr(prompt, name)] / len(asked)
    return found


@torch.no_grad()
def copying(model: ip.TransformerModel, head: Head, asked: Sequence[Prompt]) -> float:
    """How often a head's output, for a name it looks at fully, has that name among its five most raised tokens."""
    layer, number = head
    unembed = model.W_U * model.ln_final.w[:, None]
    right = 0
    for prompt in asked:
        _, cache = model.run_with_cache(prompt.tokens, names_filter=("v", layer))
        written = cache["v", layer][0, prompt.answer_place, number] @ model.W_O[layer, number]
        raised = ((written - written.mean()) @ unembed).topk(5).indices
        right += prompt.answer in raised
    return right / len(asked)


@torch.no_grad()
def lead(
    model: ip.TransformerModel, asked: Sequence[Prompt], off: Sequence[Head] = ()
) -> tuple[float, float]:
    """With heads off: the answer's mean logit above the subject's, and how often the answer is the likeliest token."""
    hooks = [ip.zero("z", layer=layer, head=head) for layer, head in off]
    ahead, right = 0.0, 0
    for prompt in asked:
        logits = model.run_with_hooks(prompt.tokens, hooks=hooks)[0, -1]
        ahead += float(logits[prompt.answer] - logits[prompt.subject])
        right += int(logits.argmax()) == prompt.answer
    return ahead / len(asked), right / len(asked)


def best(scores: Tensor, most: int) -> list[Head]:
    """The heads with the highest scores."""
    order = scores.flatten().argsort(descending=True)[:most].tolist()
    return [divmod(place, scores.shape[1]) for place in order]


def report(model: ip.TransformerModel) -> str:
    """The measured circuit as text."""
    previous, induction = repetition_heads(model)
    asked = prompts(model)
    seen = attention(model, asked)
    by_order = {
        True: [p for p in asked if p.answer_is_first],
        False: [p for p in asked if not p.answer_is_first],
    }
    lines = [
        "attention on random tokens said twice",
        *(
            f"  to the token before: {_name(head)} {previous[head]:.2f}"
            for head in best(previous, 3)
        ),
        *(
            f"  to what came next:   {_name(head)} {induction[head]:.2f}"
            for head in best(induction, 5)
        ),
        "indirect objects: attention from the last token",
    ]
    for name, scores in seen.items():
        for head in best(scores, 5):
            copied = (
                f", copies it in {copying(model, head, asked[:40]):.0%}" if name != "again" else ""
            )
            lines.append(f"  to the name that is {name}: {_name(head)} {scores[head]:.2f}{copied}")
    whole, right = lead(model, asked)
    lines.append(
        f"the answer leads by {whole:.2f} and is the likeliest token in {right:.0%}; without a head:"
    )
    layers, heads = shape(model)
    cost = torch.zeros(layers, heads)
    for layer in range(layers):
        for number in range(heads):
            cost[layer, number] = whole - lead(model, asked[:40], [(layer, number)])[0]
    for head in best(cost, 8):
        ahead, right = lead(model, asked, [head])
        first, second = (lead(model, by_order[order], [head])[0] for order in (True, False))
        lines.append(
            f"  {_name(head)}: leads by {ahead:.2f} (answer first {first:.2f}, second {second:.2f}), "
            f"right in {right:.0%}"
        )
    return "\n".join(lines)


def _name(head: Head) -> str:
    return f"{head[0]}.{head[1]}"


def main() -> None:
    """Read the command line and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", default=POCKET)
    args = parser.parse_args()
    print(report(ip.load(str(args.folder), device="cpu")))  # noqa: T201


if __name__ == "__main__":
    main()
