"""`side_by_side`: what a model writes as it is and steered, from the same prompts and the same draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import interpose as ip
from interpose.render import escape
from interpose.render.html import Markup, html_table
from interpose.results.result import shown

PLAIN = "as it is"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SideBySide(ip.Result):
    """What was written after each prompt, as it is and steered.

    Attributes:
        texts: the prompts.
        written: what came after each, by name: ``{"as it is": [...], "steered": [...]}``, each [prompt].
        edits: the edits of each but the first, as they print.
        protocol: how it was written.
    """

    texts: list[str]
    written: dict[str, list[str]]
    edits: dict[str, list[str]]
    protocol: dict[str, Any]

    def __post_init__(self) -> None:
        if PLAIN not in self.written or set(self.edits) != set(self.written) - {PLAIN}:
            raise ValueError(
                "written has what was written as it is, and edits those of all others."
            )
        if any(len(some) != len(self.texts) for some in self.written.values()):
            raise ValueError(f"there is one continuation for each of {len(self.texts)} prompts.")

    @property
    def title(self) -> str:
        """How many prompts and ways there are."""
        prompts = "1 prompt" if len(self.texts) == 1 else f"{len(self.texts)} prompts"
        return f"{prompts} continued {PLAIN}, and {', '.join(self.edits)}"

    def lines(self) -> list[str]:
        """The edits, how it was written, and which of them changed how many texts."""
        said = "; ".join(
            f"{name.replace('_', ' ')} {shown(x)}" for name, x in self.protocol.items()
        )
        parts = [said] if said else []
        for name, edits in self.edits.items():
            other = sum(a != b for a, b in zip(self.written[name], self.written[PLAIN]))
            parts.append(
                f"{name}: {', '.join(edits)}; {other} of {len(self.texts)} texts are others"
            )
        return parts

    def records(self) -> Iterator[dict[str, Any]]:
        """Every continuation as a dictionary: its prompt, how it was written, its text, whether it is another."""
        for row, prompt in enumerate(self.texts):
            for name, some in self.written.items():
                changed = some[row] != self.written[PLAIN][row]
                yield {"prompt": prompt, "how": name, "text": some[row], "value": int(changed)}

    def names(self) -> list[str]:
        """A column for the prompts, and one for each way."""
        return ["prompt", *self.written]

    def cells(self) -> list[list[str]]:
        """A row for each prompt."""
        return [
            [repr(prompt), *(repr(some[row]) for some in self.written.values())]
            for row, prompt in enumerate(self.texts)
        ]

    def text_body(self, high: int) -> str:
        """Each prompt with what came after it, one way below the other.

        Args:
            high: how many lines there are for it.
        """
        wide = max(map(len, self.written))
        lines = []
        for row, prompt in enumerate(self.texts):
            lines.append(f"\n{prompt!r}")
            lines += [f"  {name:<{wide}}  {some[row]!r}" for name, some in self.written.items()]
        body = "\n".join(lines).split("\n")
        return "\n".join(body if len(body) <= high else [*body[: high - 1], "..."])

    def html_body(self) -> str:
        """A table with a column for each way; from where on it is another text, that is marked."""
        rows = []
        for row, prompt in enumerate(self.texts):
            plain = self.written[PLAIN][row]
            cells = [Markup(f'<span style="white-space:pre-wrap">{escape.html(prompt)}</span>')]
            cells += [_marked(some[row], plain) for some in self.written.values()]
            rows.append(cells)
        return html_table(self.names(), rows)


def _marked(text: str, plain: str) -> Markup:
    """A text with what differs from another marked, from the first difference on."""
    same = next(
        (at for at, (a, b) in enumerate(zip(text, plain)) if a != b), min(len(text), len(plain))
    )
    head, tail = escape.html(text[:same]), escape.html(text[same:])
    tail = f'<mark style="background:#fff8c5">{tail}</mark>' if tail and text != plain else tail
    return Markup(f'<span style="white-space:pre-wrap">{head}{tail}</span>')


@torch.no_grad()
def side_by_side(
    model: ip.TransformerModel,
    texts: str | Sequence[str],
    edits: Any,
    *,
    max_new_tokens: int = 30,
    seed: int | None = None,
    prepend_bos: bool | None = None,
    **options: Any,
) -> SideBySide:
    """Generate from prompts as the model is and with edits, one prompt at a time.

    ```python
    shown = ip.side_by_side(model, "The film was", {"glad": vector.add(2.0), "sad": vector.add(-2.0)})
    shown.save("before_and_after.html")
    ```

    An edit that applies nowhere is an error, also while only some prompts are generated from.

    Args:
        model: a model of transformers that generates.
        texts: a prompt, or several.
        edits: an edit, several that act together, or either of these by name.
        max_new_tokens: how many tokens are written.
        seed: draw tokens with this seed, the same for all ways; by default the likeliest are taken.
        prepend_bos: as in ``generate``.
        **options: other words of transformers' ``generate``.
    """
    prompts = [texts] if isinstance(texts, str) else list(texts)
    if not prompts:
        raise ValueError("give a prompt, or several.")
    named = _named(edits)
    if PLAIN in named:
        raise ValueError(f"{PLAIN!r} is the name of what is written without edits: choose another.")
    given = {"do_sample": seed is not None, "max_new_tokens": max_new_tokens, **options}
    written: dict[str, list[str]] = {PLAIN: [], **{name: [] for name in named}}
    for prompt in prompts:
        tokens = model.to_tokens(prompt, prepend_bos=prepend_bos)
        for name in written:
            if seed is not None:
                torch.manual_seed(seed)
            with model.hooks(named.get(name, [])):
                made = model.generate(tokens, return_type="tokens", **given)
            written[name].append(str(model.to_string(made[0, tokens.shape[1] :])))
    drawn = {} if seed is None else {"seed": seed}
    return SideBySide(
        texts=prompts,
        written=written,
        edits={name: list(map(repr, some)) for name, some in named.items()},
        protocol={"max_new_tokens": max_new_tokens, **drawn},
    )


def _named(edits: Any) -> dict[str, list[Any]]:
    by_name = dict(edits) if isinstance(edits, Mapping) else {"steered": edits}
    found = {
        str(name): list(some) if isinstance(some, (list, tuple)) else [some]
        for name, some in by_name.items()
    }
    if not found or not all(found.values()):
        raise ValueError("give edits to compare with: without any, both sides are the same.")
    return found
