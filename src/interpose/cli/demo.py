"""`interpose demo`: where a small language model keeps a fact, as a table in the terminal and a page with pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from interpose.cli.options import Shown, Wanted, give
from interpose.edits.basic import fill, zero
from interpose.models.loading import load
from interpose.models.transformer import TransformerModel
from interpose.render import escape
from interpose.render.grid import Grid
from interpose.render.html import bar, html_table, legend, page, section
from interpose.render.labels import token_label
from interpose.render.text import table

CLEAN = "The Eiffel Tower is in"
CORRUPT = "The Trevi Fountain is in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What was asked and what was found.

    Attributes:
        clean: The prompt whose answer is looked for.
        corrupt: A prompt of the same number of tokens, with another answer.
        tokens: The clean prompt, token by token.
        answer: What the model says to the clean prompt.
        other: What it says to the corrupted one.
        likeliest: For each prompt, the likeliest next tokens with their probabilities.
        traced: [layer, pos]: the share of the answer that the clean stream brings back into the corrupted run.
        heads: [layer, head]: how much the answer's lead falls without the head.
        lead: The answer's logit above the other's, in the clean run.
    """

    clean: str
    corrupt: str
    tokens: list[str]
    answer: str
    other: str
    likeliest: dict[str, list[tuple[str, float]]]
    traced: Tensor
    heads: Tensor
    lead: float

    def where(self) -> str:
        """One sentence on what the trace shows."""
        strongest = self.traced.argmax(-1).tolist()
        stays: list[tuple[int, int]] = []
        for layer, pos in enumerate(strongest):
            if not stays or stays[-1][1] != pos:
                stays.append((layer, pos))
        told = [
            f"from block {layer} at {self.tokens[pos]!r} (position {pos})" for layer, pos in stays
        ]
        return f"What tells {self.answer!r} from {self.other!r} sits {', then '.join(told)}."

    def ranked(self, most: int = 5) -> list[tuple[str, float]]:
        """The heads whose loss costs the answer most, as ``layer.head``."""
        width = self.heads.shape[1]
        order = self.heads.flatten().argsort(descending=True)[:most].tolist()
        return [
            (f"{place // width}.{place % width}", float(self.heads.flatten()[place]))
            for place in order
        ]

    def script(self) -> str:
        """The strongest patch in the middle of the model and the head that costs most, as a program."""
        layer = len(self.traced) // 2
        head = self.ranked(1)[0][0].split(".")
        return _SCRIPT.format(
            clean=self.clean,
            corrupt=self.corrupt,
            layer=layer,
            pos=int(self.traced[layer].argmax()),
            head=head,
            answer=self.answer,
            other=self.other,
        )

    def grids(self) -> tuple[Grid, Grid]:
        """The trace and the heads as heat maps."""
        layers = [str(layer) for layer in range(len(self.traced))]
        traced = Grid(
            values=self.traced.tolist(),
            rows=layers,
            columns=[token_label(token, pos) for pos, token in enumerate(self.tokens)],
            corner="before block / pos",
            unit="of the lead",
        )
        heads = Grid(
            values=self.heads.tolist(),
            rows=layers,
            columns=[str(head) for head in range(self.heads.shape[1])],
            corner="block / head",
            limit=float(self.heads.abs().max()),
            unit="logits",
        )
        return traced, heads


@torch.no_grad()
def investigate(model: TransformerModel, clean: str, corrupt: str) -> Story:
    """Run both prompts, patch the clean stream into the corrupted run everywhere, switch every head off once."""
    clean_tokens, corrupt_tokens = (model.to_tokens(text) for text in (clean, corrupt))
    if clean_tokens.shape != corrupt_tokens.shape:
        pieces = " and ".join(str(model.to_str_tokens(text)) for text in (clean, corrupt))
        raise ValueError(
            f"the two prompts must have the same number of tokens, so that positions match; they have "
            f"{clean_tokens.shape[1]} and {corrupt_tokens.shape[1]}: {pieces}."
        )
    clean_logits, cache = model.run_with_cache(clean_tokens, names_filter="resid_pre")
    corrupt_logits = model(corrupt_tokens)
    answer, other = (int(logits[0, -1].argmax()) for logits in (clean_logits, corrupt_logits))
    if answer == other:
        raise ValueError(
            f"the model says {model.to_string([answer])!r} to both prompts: there is nothing to trace. Choose a "
            "corrupt prompt with another answer."
        )

    def lead(logits: Tensor) -> float:
        return float(logits[0, -1, answer] - logits[0, -1, other])

    best, worst = lead(clean_logits), lead(corrupt_logits)
    (layers, heads), length = model.W_Q.shape[:2], clean_tokens.shape[1]
    traced, lost = torch.zeros(layers, length), torch.zeros(layers, heads)
    for layer in range(layers):
        for pos in range(length):
            patch = fill("resid_pre", cache["resid_pre", layer], layer=layer, pos=pos)
            patched = lead(model.run_with_hooks(corrupt_tokens, hooks=[patch]))
            traced[layer, pos] = (patched - worst) / (best - worst)
        for head in range(heads):
            ablation = zero("z", layer=layer, head=head)
            lost[layer, head] = best - lead(model.run_with_hooks(clean_tokens, hooks=[ablation]))
    return Story(
        clean=clean,
        corrupt=corrupt,
        tokens=[str(token) for token in model.to_str_tokens(clean)],
        answer=str(model.to_string([answer])),
        other=str(model.to_string([other])),
        likeliest={
            clean: likeliest(model, clean_logits),
            corrupt: likeliest(model, corrupt_logits),
        },
        traced=traced,
        heads=lost,
        lead=best,
    )


def likeliest(model: TransformerModel, logits: Tensor, most: int = 5) -> list[tuple[str, float]]:
    """The likeliest next tokens with their probabilities."""
    top = logits[0, -1].softmax(-1).topk(most)
    tokens = [str(model.to_string([token])) for token in top.indices.tolist()]
    return list(zip(tokens, top.values.tolist()))


def in_terminal(story: Story, *, coloured: bool) -> Iterator[str]:
    """The findings, part by part, for a terminal."""
    for prompt, answers in story.likeliest.items():
        yield table(
            ("next", "probability"),
            [(repr(token), f"{p:.1%}") for token, p in answers],
            title=f"\n{prompt!r}",
        )
    traced, heads = story.grids()
    yield (
        f"\nShare of the answer that the clean stream brings back when it is put into the run on {story.corrupt!r},"
        f"\nat one position before one block (1 = all of it):\n\n{traced.text(coloured=coloured)}\n\n{story.where()}"
    )
    ranked = ", ".join(f"{name} ({lost:+.2f})" for name, lost in story.ranked())
    yield (
        f"\nHow much {story.answer!r} loses of its lead of {story.lead:.2f} over {story.other!r} without each head:"
        f"\n\n{heads.text(coloured=coloured)}\n\nThe heads that matter most: {ranked}."
    )


def as_page(story: Story) -> str:
    """The findings as one page that needs nothing else."""
    answers = "".join(
        html_table(
            ("next token", "probability"),
            [(repr(token), bar(p, f"{p:.1%}")) for token, p in found],
            title=prompt,
        )
        for prompt, found in story.likeliest.items()
    )
    traced, heads = story.grids()
    ranked = html_table(
        ("head", "loss of lead"),
        [
            (
                name,
                bar(
                    max(lost, 0) / max(story.lead, *(cost for _, cost in story.ranked())),
                    f"{lost:+.2f}",
                ),
            )
            for name, lost in story.ranked()
        ],
    )
    return page(
        "interpose: where a small language model keeps its answer",
        f'<div style="display:flex;flex-wrap:wrap;gap:48px">{answers}</div>',
        section(
            "Which layers and positions carry the answer",
            f"<p>The model runs on <i>{escape.html(story.corrupt)}</i>. Before one block and at one position the "
            f"residual stream of the run on <i>{escape.html(story.clean)}</i> is put in its place. The cell says how "
            f"much of the lead of {escape.html(token_label(story.answer))} over "
            f"{escape.html(token_label(story.other))} that brings back: 1 is all of it.</p>",
            legend(traced.scale, 0.0, traced.limit, unit=traced.unit),
            traced.html(),
            f"<p>{escape.html(story.where())}</p>",
        ),
        section(
            "Which heads the answer needs",
            f"<p>Each head is switched off once in the run on <i>{escape.html(story.clean)}</i>; the cell says how "
            f"much of the lead of {story.lead:.2f} is lost. Red: the head helps; blue: it holds the answer back. What "
            "other heads make up for does not show here.</p>",
            legend(heads.scale, -heads.limit, heads.limit, unit=heads.unit),
            heads.html(),
            "<p>The five that cost most:</p>",
            ranked,
        ),
        section(
            "The same in your own code",
            f"<pre>{escape.html(story.script())}</pre>",
        ),
    )


_SCRIPT = """\
import interpose as ip

model = ip.load("pocket")
clean, corrupt = {clean!r}, {corrupt!r}
_, cache = model.run_with_cache(clean, names_filter="resid_pre")
patch = ip.fill("resid_pre", cache["resid_pre", {layer}], layer={layer}, pos={pos})
without = ip.zero("z", layer={head[0]}, head={head[1]})
for prompt, hooks in ((clean, []), (corrupt, []), (corrupt, [patch]), (clean, [without])):
    logits = model.run_with_hooks(prompt, hooks=hooks)[0, -1]
    print(logits[model.to_single_token({answer!r})] - logits[model.to_single_token({other!r})])
"""


def demo(clean: str, corrupt: str, *, wanted: Wanted, coloured: bool = False) -> Iterator[str]:
    """Investigate two prompts on the pocket model; yields what to print, and writes the page at the end."""
    story = investigate(load("pocket", device="cpu"), clean, corrupt)
    if wanted.python:
        yield story.script().rstrip("\n")
        return
    shown = Shown(
        text="\n".join(in_terminal(story, coloured=coloured)),
        data={"clean": clean, "corrupt": corrupt, "tokens": story.tokens, "answer": story.answer}
        | {"instead": story.other, "lead": story.lead, "likeliest": story.likeliest}
        | {"traced": story.traced.tolist(), "heads": story.heads.tolist()},
        records=[
            {"layer": layer, "pos": pos, "token": story.tokens[pos], "share": share}
            for layer, shares in enumerate(story.traced.tolist())
            for pos, share in enumerate(shares)
        ],
        page=as_page(story),
    )
    yield from give(shown, wanted)
