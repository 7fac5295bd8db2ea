"""docs/mi-crow.md says of every name whether it is there; this walks its table."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from interpose.dialects import mi_crow

PAGE = (Path(__file__).parents[3] / "docs" / "mi-crow.md").read_text()
ROWS = [
    (
        [name.strip("`") for name in re.findall(r"`[^`]+`", line.split("|")[1])],
        line.split("|")[2].strip(),
    )
    for line in PAGE.split("## Every name")[1].splitlines()
    if line.startswith("| `")
]
HERE = "interpose.dialects.mi_crow"


def find(name: str) -> Any:
    """What a dotted name means, without running properties; modules are imported by their paths."""
    first, *rest = name.split(".")
    found: Any = getattr(mi_crow, first)
    while rest and inspect.ismodule(found) and rest[0] in ("hook", "sae"):
        found = importlib.import_module(f"{found.__name__}.{rest.pop(0)}")
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
            found = getattr(found, "fget", getattr(found, "__func__", found))
            assert found.__doc__, f"{name} has no docstring"


def test_the_table_has_every_public_method_and_exported_name() -> None:
    listed = {name for names, status in ROWS if status != "left out" for name in names}
    assert len(listed) > 90
    for module in [*mi_crow.__all__, "mechanistic.sae"]:
        home = importlib.import_module(f"{HERE}.{module}")
        for exported in home.__all__:
            made = getattr(home, exported)
            its = {name for name in listed if name.startswith(f"{module}.{exported}")}
            assert its, f"{module}.{exported} is not in the table"
            if not inspect.isclass(made) or issubclass(made, Exception):
                continue
            for name, held in vars(made).items():
                public = inspect.isfunction(held) or isinstance(held, (classmethod, property))
                bases = {base.__name__ for base in made.__mro__}
                said = {f"{module}.{base}.{name}" for base in bases}
                internal = (held.__doc__ or "") and name in INSIDE
                if public and name[0] != "_" and not internal:
                    assert said & listed, f"{module}.{exported}.{name} is not in the table"


INSIDE = {  # what the dialect itself needs, and mi-crow does not have
    "after", "before", "inputs", "item_of", "is_streaming", "look", "longest", "module_of", "path_of", "registrations",
    "rows", "run_path", "site_of", "tokenizer",
}  # fmt: skip
