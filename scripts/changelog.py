"""Write CHANGELOG.md from the fragments in changelog.d/: ``python -m scripts.changelog``.

Fragments of what is not released yet lie in the folder itself; those of a release in a folder named by its version.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE, FRAGMENTS = ROOT / "CHANGELOG.md", ROOT / "changelog.d"
KINDS = {"feature": "New", "change": "Changed", "removal": "Removed", "fix": "Fixed"}
_HEAD = """\
# Changelog

What users can see, newest first. `make changelog` makes this page from the fragments in `changelog.d/`.
"""


def page(folder: Path = FRAGMENTS) -> str:
    """The changelog of a folder of fragments."""
    releases = [path for path in folder.iterdir() if path.is_dir()]
    sections = [_section("Not released yet", folder)]
    sections += [_section(path.name, path) for path in sorted(releases, key=_version, reverse=True)]
    return "\n".join([_HEAD, *filter(None, sections)])


def _version(path: Path) -> list[int]:
    if not re.fullmatch(r"\d+(\.\d+)*", path.name):
        raise ValueError(
            f"{path} is not a release: folders here are named by a version, such as 0.1.0."
        )
    return [int(part) for part in path.name.split(".")]


def _section(title: str, folder: Path) -> str:
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        name, *kind = path.name.removesuffix(".md").split(".")
        text = path.read_text("utf-8").strip()
        if len(kind) != 1 or kind[0] not in KINDS or not text:
            raise ValueError(
                f"{path} is not a fragment: a short text in a file such as {name}.fix.md; kinds are {', '.join(KINDS)}."
            )
        listed = text.startswith("- ")  # a fragment of several points has them as a list
        found[kind[0]].append(text if listed else "- " + textwrap.indent(text, "  ").strip())
    parts = [f"### {KINDS[kind]}\n\n" + "\n".join(texts) for kind, texts in found.items() if texts]
    return f"## {title}\n\n" + "\n\n".join(parts) + "\n" if parts else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
