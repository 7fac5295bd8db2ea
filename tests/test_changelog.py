"""The changelog is what its fragments say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from scripts import changelog


def test_the_changelog_is_up_to_date() -> None:
    assert changelog.PAGE.read_text() == changelog.page(), "run make changelog"


def test_fragments_are_grouped_by_release_and_kind(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("how to")
    (tmp_path / "b.fix.md").write_text("Mended b,\nin two lines.\n")
    (tmp_path / "a.fix.md").write_text("Mended a.")
    (tmp_path / "c.feature.md").write_text("One.\n\nAnd more.")
    (tmp_path / "d.feature.md").write_text("- Two,\n  longer.\n- Three.")
    for version in ("0.9.0", "0.10.0"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "d.removal.md").write_text(f"Gone in {version}.")
    _, made = changelog.page(tmp_path).split("`changelog.d/`.\n\n")
    assert made == (
        "## Not released yet\n\n### New\n\n- One.\n\n  And more.\n- Two,\n  longer.\n- Three.\n\n"
        "### Fixed\n\n- Mended a.\n- Mended b,\n  in two lines.\n\n"
        "## 0.10.0\n\n### Removed\n\n- Gone in 0.10.0.\n\n"
        "## 0.9.0\n\n### Removed\n\n- Gone in 0.9.0.\n"
    )


@pytest.mark.parametrize("name", ["a.md", "a.news.md", "a.b.fix.md"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(
        ValueError, match=r"is not a fragment: a short text in a file such as a\.fix\.md"
    ):
        changelog.page(tmp_path)
    (tmp_path / name).rename(tmp_path / "a.fix.md").write_text(" \n")
    with pytest.raises(ValueError, match="is not a fragment"):
        changelog.page(tmp_path)


def test_folders_of_releases_are_named_by_versions(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match=r"named by a version, such as 0\.1\.0"):
        changelog.page(tmp_path)


def test_what_is_cited_is_what_is_here() -> None:
    cited = (changelog.ROOT / "CITATION.cff").read_text()
    with (changelog.ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert f"\nversion: {project['version']}\n" in cited
    assert f"\nlicense: {project['license']}\n" in cited
    assert f"\nabstract: {project['description']}\n" in cited
    assert "- name: The interpose authors\n" in cited
