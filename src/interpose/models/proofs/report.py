"""What `model.check()` found: a table in a terminal, HTML in a notebook, a dictionary for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from interpose.render.html import html_table
from interpose.render.text import table


@dataclass(frozen=True, slots=True)
class Finding:
    """One proof at one site (or, with no site, of the whole model)."""

    promise: str
    site: str
    passed: bool
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All proofs of one model, its sites, and the sites it does not have with the reasons."""

    model: str
    sites: dict[str, tuple[str, tuple[str, ...]]]
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

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "model": self.model,
            "passed": self.passed,
            "seconds": self.seconds,
            "sites": {name: {"kind": k, "axes": list(a)} for name, (k, a) in self.sites.items()},
            "absent": self.absent,
            "missing": list(self.missing),
            "findings": [
                {"promise": f.promise, "site": f.site, "passed": f.passed, "about": f.about}
                for f in self.findings
            ],
        }

    def _rows(self) -> list[tuple[str, str, str]]:
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

    def _title(self) -> str:
        verdict = "every promise holds" if self.passed else "NOT all promises hold"
        reasons = len(set(self.absent.values()))
        return (
            f"{self.model}: {verdict}; {len(self.sites)} sites, {len(self.absent)} absent for "
            f"{reasons} reasons, {len(self.findings)} proofs in {self.seconds:.1f} s"
        )

    def __repr__(self) -> str:
        return table(("promise", "holds", ""), self._rows(), title=self._title())

    def _repr_html_(self) -> str:
        return html_table(("promise", "holds", ""), self._rows(), title=self._title())
