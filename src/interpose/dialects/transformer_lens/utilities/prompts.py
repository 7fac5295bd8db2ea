# ruff: noqa: PT028 - no test, whatever its name looks like
"""`test_prompt`: how well a model continues a text, printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def test_prompt(
    prompt: str,
    answer: str | Sequence[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Print how likely an answer is after a prompt: each token's rank, logit and probability, and the likeliest tokens.

    ```python
    test_prompt("The Eiffel Tower is in the city of", "Paris", model)
    test_prompt("When John and Mary went to the shop, John gave a bag to", ["Mary", "John"], model)
    ```

    Rank 0 is the likeliest. Of several answers the first token of each is compared after the prompt.

    Args:
        prompt: the text before.
        answer: the text that should follow, or several that could.
        model: the model.
        prepend_space_to_answer: put a space before each answer that begins without one.
        print_details: print more than the ranks.
        prepend_bos: begin the prompt with a BOS token; None does what the model does by itself.
        top_k: how many of the likeliest tokens to print.
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    if not answers:
        raise ValueError("no answer to look for: give one, or a list of some.")
    if prepend_space_to_answer:
        answers = [text if text.startswith(" ") else f" {text}" for text in answers]
    asked = model.to_tokens(prompt, prepend_bos=prepend_bos)
    expected = [model.to_tokens(text, prepend_bos=False)[0] for text in answers]
    several = len(answers) > 1
    with torch.no_grad():
        tokens = asked if several else torch.cat((asked, expected[0][None]), -1)
        logits = model(tokens)[0].float()
    if print_details:
        _say("Tokenized prompt:", model.to_str_tokens(asked[0]))
        pieces = [model.to_str_tokens(row) for row in expected]
        _say(
            "Tokenized answers:" if several else "Tokenized answer:",
            pieces if several else pieces[0],
        )
    ranks: list[Any] = []
    for step in range(1 if several else len(expected[0])):
        here = logits[asked.shape[-1] + step - 1]
        wanted = [int(row[step]) for row in expected]
        found = [(_piece(model, token), int((here > here[token]).sum())) for token in wanted]
        ranks.append(found if several else found[0])
        if print_details:
            _print_step(model, here, wanted, found, top_k)
    _say("Ranks of the answer tokens:", ranks)


test_prompt.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _print_step(
    model: Any, logits: Tensor, wanted: list[int], ranks: list[tuple[str, int]], top_k: int
) -> None:
    """One position: the wanted tokens, then the likeliest."""
    probs = logits.softmax(-1)

    def line(what: str, token: int) -> str:
        numbers = f"Logit: {float(logits[token]):6.2f}  Prob: {float(probs[token]):7.2%}"
        return f"{what:<12} {numbers}  Token: |{_piece(model, token)}|"

    _say("Performance on answer tokens:" if len(wanted) > 1 else "Performance on answer token:")
    for token, (_, rank) in zip(wanted, ranks):
        _say(line(f"Rank: {rank}", token))
    for place, token in enumerate(logits.topk(min(top_k, len(logits))).indices.tolist()):
        _say(line(f"Top {place}", token))


def _piece(model: Any, token: int) -> str:
    return str(model.to_str_tokens(torch.tensor([token]))[0])


def _say(*words: object) -> None:
    print(*words)  # noqa: T201 - printing is what it is for
