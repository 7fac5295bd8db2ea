"""Every code block of the README and the docs runs, top to bottom, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dialects.transformer_lens.test_studies import STUDIES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str, str | None]]:
    """Each python block with where it is and, if a text block follows at once, what it must print."""
    fences = list(FENCE.finditer(text))
    found = []
    for number, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        after = fences[number + 1] if number + 1 < len(fences) else None
        printed = None
        if (
            after is not None
            and after[1] == "text"
            and not text[fence.end() : after.start()].strip()
        ):
            printed = after[2]
        # Blank lines before it, so that errors name the right line of the page.
        before = text.count("\n", 0, fence.start()) + 1
        found.append((f"line {before}", "\n" * before + fence[2], printed))
    return found


@pytest.mark.bits
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run_and_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for where, code, printed in blocks(page.read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page.name, "exec"), namespace)
        if printed is None:
            assert out.getvalue() == "", (
                f"{page.name}, {where} prints something the page does not show"
            )
        else:
            got, shown = (
                [line.rstrip() for line in text.splitlines()] for text in (out.getvalue(), printed)
            )
            if not same_text("\n".join(got), "\n".join(shown)):
                assert got == shown, f"{page.name}, {where}"
    for name in re.findall(r"!\[[^]]*\]\((pictures/[^)]+)\)", page.read_text()):
        drawn = (tmp_path / name).read_text()
        assert same_picture(drawn, (page.parent / name).read_text()), f"{name} is drawn anew"


NUMBER = re.compile(r"-?\d+\.\d+")
PRINTED = re.compile(r"-?\d+\.(\d+)(?:e([+-]?\d+))?")
MOST_DIGITS = 5
"""Of a number in a page: fewer than two CPUs agree on."""


def same_text(got: str, shown: str) -> bool:
    """Whether two texts are the same, but for one in the last digit of a rounded number: CPUs round differently."""
    found = [list(PRINTED.finditer(text)) for text in (got, shown)]
    words = [PRINTED.sub("0.", text).split() for text in (got, shown)]
    return words[0] == words[1] and all(
        len(a[1]) == len(b[1])
        and abs(float(a[0]) - float(b[0])) < 1.5 * 10.0 ** (int(b[2] or 0) - len(b[1]))
        for a, b in zip(*found)
    )


def test_one_in_the_last_digit_is_rounding_and_more_is_not() -> None:
    shown = "layer 3  0.25  -0.001  1.9e-10\n"
    for same in ("layer 3  0.26  -0.001  1.9e-10\n", "layer 3  0.25  0.000  1.8e-10\n"):
        assert same_text(same, shown)
    for other in ("0.27  -0.001  1.9e-10", "0.25  -0.003  1.9e-10", "0.25  -0.001  1.9e-09"):
        assert not same_text(f"layer 3  {other}\n", shown)
    assert not same_text(shown.replace("3", "4"), shown)
    assert not same_text(shown.replace("0.25", "0.251"), shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_print_rounded_numbers(page: Path) -> None:
    for fence in FENCE.finditer(page.read_text()):
        for number in PRINTED.finditer(fence[2] if fence[1] == "text" else ""):
            digits = number[0].split("e")[0].lstrip("-0.").replace(".", "")
            assert len(digits) <= MOST_DIGITS, f"{page.name} prints {number[0]}: round it"


def same_picture(one: str, other: str) -> bool:
    """Whether two pictures have the same labels, and numbers that differ by rounding at most."""
    found = [list(map(float, NUMBER.findall(text))) for text in (one, other)]
    close = len(found[0]) == len(found[1]) and all(abs(a - b) < 0.1 for a, b in zip(*found))
    letters = [re.sub(r"#[0-9a-f]{6}", "", NUMBER.sub("", text)) for text in (one, other)]
    return close and letters[0] == letters[1]


def test_the_pages_have_code_to_run() -> None:
    assert len(blocks((ROOT / "README.md").read_text())) >= 1
    assert sum(len(blocks(page.read_text())) for page in PAGES) >= 20


def test_a_wrong_output_in_a_page_is_found() -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    ((_, code, printed),) = blocks(page)
    assert (code.strip(), printed) == ("print(1 + 1)", "3\n")


# The studies are run, once each, by the test that looks at what they find.
@pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if example.name not in STUDIES],
    ids=lambda example: example.name,
)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_examples_are_short_enough_to_read_at_once() -> None:
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) < 60, example.name


def test_every_link_in_the_pages_leads_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_another_picture_is_found() -> None:
    drawn = (ROOT / "docs" / "pictures" / "circuit_heads.svg").read_text()
    assert same_picture(drawn, drawn.replace('fill="#ffffff"', 'fill="#fffffe"'))
    assert not same_picture(drawn, drawn.replace("0.26", "0.56"))
    assert not same_picture(drawn, drawn.replace("layer / head", "head / layer"))
