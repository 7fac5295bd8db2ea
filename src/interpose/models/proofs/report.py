"""What `model.check()` found: a table in a terminal, HTML in a notebook, a dictionary for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from interpose.results.result import Result


@dataclass(frozen=True, slots=True)
class Finding:
    """One proof at one site (or, with no site, of the whole model)."""

    promise: str
    site: str
    passed: bool
    about: str


@dataclass(frozen=True, slots=True)
class Proven:
    """A site that there is: its kind, and what its axes are."""

    kind: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Result):
    """All proofs of one model, its sites, and the sites it does not have with the reasons."""

    SAID: ClassVar[tuple[str, ...]] = ("passed",)

    model: str
    sites: dict[str, Proven]
    absent: dict[str, str]
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    missing: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether every proof held and no site that this kind of model should have is missing."""
        return not self.missing and all(finding.passed for finding in self.findings)

    def failures(self) -> dict[str, str]:
        """What failed, by site."""
        return {f.site: f"{f.promise}: {f.about}" for f in self.findings if not f.passed}

    def records(self) -> Iterator[dict[str, Any]]:
        """Every proof as a dictionary; its value is whether it held."""
        for found in self.findings:
            place = {"promise": found.promise, "site": found.site}
            yield {**place, "value": found.passed, "about": found.about}

    def top(self, k: int = 10) -> list[dict[str, Any]]:
        """The first proofs, those that failed before the others."""
        return sorted(self.records(), key=lambda record: record["value"])[:k]

    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return ("promise", "holds", "")

    def cells(self) -> list[tuple[str, str, str]]:
        """A row for each promise."""
        rows = []
        for promise in dict.fromkeys(finding.promise for finding in self.findings):
            found = [f for f in self.findings if f.promise == promise]
            bad = [f for f in found if not f.passed]
            about = found[0].about if len(found) == 1 else f"{len(found)} proofs"
            if bad:
                about = f"{len(bad)} of {len(found)} failed: {bad[0].site} {bad[0].about}"
            rows.append((promise, "no" if bad else "yes", about[:110]))
        if self.missing:
            rows.append(("the sites of its kind", "no", ", ".join(self.missing)[:110]))
        return rows

    @property
    def title(self) -> str:
        """The verdict, in a line."""
        verdict = "every promise holds" if self.passed else "NOT all promises hold"
        reasons = len(set(self.absent.values()))
        absent = f"{len(self.absent)} absent for {reasons} reason{'s' * (reasons != 1)}"
        return (
            f"{self.model}: {verdict}; {len(self.sites)} sites, {absent if reasons else 'none absent'}, "
            f"{len(self.findings)} proofs in {self.seconds:.1f} s"
        )
