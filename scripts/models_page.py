"""Write docs/models.md: what `model.check()` says about a tiny model of every type in transformers.

    python scripts/models_page.py                       # all types, about five minutes
    python scripts/models_page.py --types llama t5      # only these rows anew
    python scripts/models_page.py --check               # fail if a fresh run gives another page

Nothing on the page depends on time or on the last bits of a number, so two runs give the same text.
"""

from __future__ import annotations

import argparse
import difflib
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # tests.models.tiny builds the models

TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "encoder_decoder": "Encoder-decoders",
    "vision": "Vision encoders",
    "audio": "Audio classifiers",
    "classifier": "Text classifiers",
}
HEAD = ("type", "result", "sites", "attention", "what is wrong", "absent")
MOST = 6  # names of sites after a promise that does not hold
NUMBER = re.compile(r"\b\d+(\.\d+)?e[-+]?\d+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came out for one type."""

    kind: str
    model_type: str
    result: str
    """``pass``, ``fail``, or ``not built``."""
    sites: int = 0
    attention: str = "none"
    """How its inside is reached: ``interface``, ``kernel``, ``softmax``, several, or ``none``."""
    wrong: str = ""
    """Missing sites, failing promises with reasons; or why it was not built."""
    absent: tuple[tuple[str, str], ...] = ()
    """Reason and the sites it explains, in the order of the names."""


def examine(model_type: str, kind: str, *, differences: bool = True) -> Row:
    """Build a tiny model of a type and check it."""
    import interpose as ip
    from tests.models import tiny

    if kind == "causal" and model_type in tiny.UNBUILDABLE:
        reason = plain(tiny.UNBUILDABLE[model_type])
        return Row(kind=kind, model_type=model_type, result="not built", wrong=reason)
    try:
        module = tiny.build(model_type, kind)
    except Exception as error:  # whatever a config or a constructor raises
        return Row(kind=kind, model_type=model_type, result="not built", wrong=raised(error))
    model: Any = ip.wrap(module)
    try:
        report = model.check(tiny.inputs(module), differences=differences)
    except Exception as error:  # the row says so, the others go on
        return Row(kind=kind, model_type=model_type, result="fail", wrong=raised(error))
    reached = {
        part.by for tower in model.anatomy.towers for b in tower.blocks for part in b.attentions
    }
    return Row(
        kind=kind,
        model_type=model_type,
        result="pass" if report.passed else "fail",
        sites=len(report.sites),
        attention=" + ".join(sorted(reached)) or "none",
        wrong="; ".join(faults(report)),
        absent=tuple(reasons(report.absent)),
    )


def faults(report: Any) -> Iterator[str]:
    """Each missing site, and each promise that does not hold, with the first reason given."""
    yield from (f"no {name}" for name in report.missing)
    promises = dict.fromkeys(finding.promise for finding in report.findings)
    for promise in promises:
        bad = [f for f in report.findings if f.promise == promise and not f.passed]
        if bad:
            names = list(dict.fromkeys(short(finding.site) for finding in bad if finding.site))
            more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
            where = f" at {', '.join(names[:MOST])}{more}" if names else ""
            about = plain(NUMBER.sub("…", bad[0].about))
            yield f"{promise}{where}: {about}" if about else f"{promise}{where}"


def reasons(absent: dict[str, str]) -> list[tuple[str, str]]:
    """The absent sites by reason, each name once whatever the block."""
    found: dict[str, dict[str, None]] = {}
    for name, reason in absent.items():
        found.setdefault(plain(reason), {})[short(name)] = None
    return [(reason, ", ".join(names)) for reason, names in found.items()]


def short(name: str) -> str:
    """A site's name without its layer and without `hook_`."""
    return re.sub(r"blocks\.\d+\.", "", name).replace("hook_", "")


def raised(error: Exception) -> str:
    """An exception in one line."""
    return plain(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def plain(text: str) -> str:
    """Text that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "/")[:300]


# The page.


def render(rows: Iterable[Row]) -> str:
    """The whole page."""
    import transformers

    rows = list(rows)
    legend = {reason: None for row in rows for reason, _ in row.absent}
    marks = {reason: f"r{number}" for number, reason in enumerate(sorted(legend), 1)}
    introduction = (
        "# Models\n\n"
        "A tiny model of every causal language model type in transformers "
        f"{transformers.__version__}, and of the usual others, every parameter random, and what "
        "`model.check()` says about it, with central differences. Written by "
        "`python scripts/models_page.py`, never by hand.\n\n"
        "`attention` is how the inside of attention is reached: by transformers' attention "
        "`interface`, by a fused `kernel` call, or by a `softmax` of the model's own. `absent` are "
        "sites that the type does not have, with a reason that is listed at the end.\n"
    )
    parts = [introduction, totals(rows)]
    for kind, title in TITLES.items():
        chosen = [row for row in rows if row.kind == kind]
        if chosen:
            parts.append(f"## {title}\n\n{table(HEAD, (cells(row, marks) for row in chosen))}")
    listed = table(("mark", "why sites are absent"), ((m, reason) for reason, m in marks.items()))
    parts.append(f"## Reasons\n\n{listed}")
    return "\n".join(parts)


def totals(rows: list[Row]) -> str:
    """How many of each kind were built, and how many of those passed."""
    lines = []
    for kind in (*TITLES, "all"):
        results = [row.result for row in rows if kind in (row.kind, "all")]
        if results:
            built = len(results) - results.count("not built")
            counts = (len(results), built, results.count("pass"), results.count("fail"))
            lines.append((TITLES.get(kind, "all"), *map(str, counts)))
    return table(("kind", "types", "built", "pass", "fail"), lines)


def cells(row: Row, marks: dict[str, str]) -> tuple[str, ...]:
    """A row as text."""
    absent = "; ".join(f"{marks[reason]}: {names}" for reason, names in row.absent)
    return (row.model_type, row.result, str(row.sites), row.attention, row.wrong, absent)


def table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    rule = "|" + "---|" * len(head)
    body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(head)} |", rule, *body]) + "\n"


def parse(text: str) -> list[Row]:
    """The rows of a page; the inverse of `render`."""
    _, _, end = text.partition("## Reasons\n")
    reason_of = dict(line[1:-1].split(" | ") for line in lines_of(end))
    reason_of = {mark.strip(): reason.strip() for mark, reason in reason_of.items()}
    found = []
    for kind, title in TITLES.items():
        _, _, section = text.partition(f"## {title}\n")
        for line in lines_of(section.partition("\n## ")[0]):
            name, result, sites, attention, wrong, absent = (
                cell.strip() for cell in line[1:-1].split("|")
            )
            marked = (part.split(": ") for part in absent.split("; ") if part)
            found.append(
                Row(
                    kind=kind,
                    model_type=name,
                    result=result,
                    sites=int(sites),
                    attention=attention,
                    wrong=wrong,
                    absent=tuple((reason_of[mark], names) for mark, names in marked),
                )
            )
    return found


def lines_of(section: str) -> list[str]:
    """The lines of a section's table, without its head."""
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


# Running.


def quiet() -> None:
    """One thread for each process, no warnings from models."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def run(wanted: list[tuple[str, str]], jobs: int) -> dict[tuple[str, str], Row]:
    """Examine types in processes of their own (or in this one, with no jobs), with a progress bar."""
    from tqdm import tqdm

    found = {}
    with tqdm(total=len(wanted), unit="model") as bar:
        for row in _each(wanted, jobs):
            found[row.kind, row.model_type] = row
            bar.set_postfix_str(f"{row.model_type}: {row.result}")
            bar.update()
    return found


def _each(wanted: list[tuple[str, str]], jobs: int) -> Iterator[Row]:
    if jobs == 0:
        yield from (examine(name, kind) for kind, name in wanted)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=quiet) as pool:
        waiting = [pool.submit(examine, name, kind) for kind, name in wanted]
        for future in as_completed(waiting):
            yield future.result()


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or compare it."""
    from tests.models import tiny

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--types", nargs="+", help="only these types; other rows stay")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2); 0 for none")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (docs/models.md)")
    given = parser.parse_args(arguments)
    every = [(kind, name) for kind, names in tiny.KINDS.items() for name in sorted(names)]
    unknown = set(given.types or ()) - {name for _, name in every}
    if unknown:
        parser.error(f"no such types: {', '.join(sorted(unknown))}")
    old = given.page.read_text() if given.page.exists() else ""
    rows = {(row.kind, row.model_type): row for row in parse(old)} if given.types else {}
    rows |= run([(k, n) for k, n in every if not given.types or n in given.types], given.jobs)
    new = render(rows[key] for key in every if key in rows)
    if not given.check:
        given.page.write_text(new)
        return 0
    sys.stdout.writelines(
        difflib.unified_diff(old.splitlines(True), new.splitlines(True), "the page", "a fresh run")
    )
    return int(new != old)


if __name__ == "__main__":
    raise SystemExit(main())
