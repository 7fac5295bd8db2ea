"""Writes docs/exports.md: every exported name once, in the groups of `interpose/__init__.pyi`.

python -m scripts.exports_page
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import interpose as ip

PAGE = Path(__file__).parent.parent / "docs" / "exports.md"
HEAD = """# Every name

What `import interpose as ip` has, each once. Written by `python -m scripts.exports_page` from `interpose/__init__.pyi`.
"""


def groups() -> dict[str, list[str]]:
    """The exported names by the comment they stand under."""
    found: dict[str, list[str]] = {}
    for line in (Path(ip.__file__).parent / "__init__.pyi").read_text().splitlines():
        if line.startswith("# "):
            found[line[2:]] = []
        elif found:
            found[list(found)[-1]] += re.findall(r"\w+ as (\w+)", line)
    return found


def about(name: str) -> str:
    """The first sentence of what something says of itself."""
    said = inspect.cleandoc(getattr(ip, name).__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.:]) ", said)[0].rstrip(":.")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for group, names in groups().items():
        rows = [f"- `ip.{name}`: {about(name)}." for name in sorted(names)]
        parts.append("\n".join([f"## {group}", "", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
