"""How tokens are called, in tables, on axes of pictures and in sentences: the one place that decides it."""

from __future__ import annotations

from interpose.render import escape


def token_label(token: str, pos: int | None = None) -> str:
    """A token as a label: in quotes, so that spaces show, with its position in front where one is given.

    ```python
    token_label(" cat")       # "' cat'"
    token_label(" cat", 4)    # "4 ' cat'"
    ```
    """
    return repr(token) if pos is None else f"{pos} {token!r}"


def token_text(token: str) -> str:
    """A token inside its text, where quotes would be in the way: line ends and the like written out."""
    return escape.terminal(token) or "''"


def cut(label: str, longest: int = 14) -> str:
    """A label with no more than so many letters."""
    return f"{label[: longest - 1]}…" if len(label) > longest else label
