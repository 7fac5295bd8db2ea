"""docs/transformer-lens.md says of every name whether it is there; this walks its table."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import interpose.dialects.transformer_lens as tl

PAGE = (Path(__file__).parents[3] / "docs" / "transformer-lens.md").read_text()
ROWS = [
    (
        [name.strip("`") for name in re.findall(r"`[^`]+`", line.split("|")[1])],
        line.split("|")[2].strip(),
    )
    for line in PAGE.split("## Every name")[1].splitlines()
    if line.startswith("| `")
]


def find(name: str) -> Any:
    """What a dotted name means, without running properties."""
    first, *rest = name.split(".")
    found: Any = getattr(tl, first)
    for part in rest:
        found = (
            inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        )
    return found


@pytest.mark.parametrize(
    ("names", "status"), ROWS, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_every_name_of_the_table_is_what_the_table_says(names: list[str], status: str) -> None:
    assert status in ("there", "differs", "left out")
    for name in names:
        if status == "left out":
            with pytest.raises(AttributeError):
                find(name)
        else:
            found = find(name)
            doc = (
                found.fget.__doc__ if isinstance(found, property) else getattr(found, "__doc__", "")
            )
            assert doc or not callable(found), f"{name} has no docstring"


def test_at_most_five_rows_are_left_out_and_the_table_is_whole() -> None:
    assert sum(status == "left out" for _, status in ROWS) <= 5
    listed = {name for names, _ in ROWS for name in names}
    assert len(listed) > 200
    for module in ("utilities", "patching", "head_detector", "evals"):
        inside = {name.split(".")[1] for name in listed if name.startswith(f"{module}.")}
        public = set(getattr(getattr(tl, module), "__all__", inside))
        assert inside <= public


def test_weights_and_flags_can_be_read_from_a_model() -> None:
    model = tl.HookedTransformer.from_pretrained("pocket", device="cpu")
    absent = {"W_gate"}  # this model's MLPs have no gate
    for name in {
        n.split(".")[1] for names, _ in ROWS for n in names if n.startswith("HookedTransformer.")
    }:
        found = inspect.getattr_static(tl.HookedTransformer, name)
        if isinstance(found, property) and name not in absent:
            assert getattr(model, name) is not None, name


def test_exported_names_are_sorted_and_importable() -> None:
    assert tl.__all__ == sorted(tl.__all__)
    for name in tl.__all__:
        assert getattr(tl, name) is not None
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        tl.nothing  # noqa: B018
