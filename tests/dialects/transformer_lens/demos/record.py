"""Writes down what the demos give under TransformerLens 3.5.1, into ``numbers.json``.

Where TransformerLens 3.5.1 is installed: ``PYTHONPATH=src:. python -m tests.dialects.transformer_lens.demos.record``.
The scripts are run as they are but for their import lines, in which the dialect's name gives way to TransformerLens's.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
DIALECT = "interpose.dialects.transformer_lens"
NUMBERS = HERE / "numbers.json"
OTHERS = {"__init__", "published", "record"}
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in OTHERS)


def run(name: str, package: str = DIALECT) -> dict[str, Any]:
    """What a demo finds, as plain lists, numbers and words.

    Args:
        name: of the script.
        package: what its import lines name.
    """
    source = (HERE / f"{name}.py").read_text().replace(DIALECT, package)
    scope: dict[str, Any] = {"__name__": name}
    torch.manual_seed(0)
    exec(compile(source, f"{name}.py", "exec"), scope)
    return {key: plain(value) for key, value in scope["demo"]().items()}


def plain(value: Any) -> Any:
    """Tensors as lists, numbers rounded to seven places."""
    if isinstance(value, torch.Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, complex):
        return [round(value.real, 7), round(value.imag, 7)]
    return round(value, 7) if isinstance(value, float) else value


def main() -> None:
    """Record the demos that are named, or all."""
    version = importlib.metadata.version("transformer_lens")
    assert version == "3.5.1", version
    found = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name in sys.argv[1:] or NAMES:
        found[name] = run(name, "transformer_lens")
    lines = [f" {json.dumps(name)}: {json.dumps(found[name])}" for name in NAMES if name in found]
    NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as hub:
        # Before transformers is imported: it reads these once.
        os.environ |= {"HF_HUB_CACHE": hub, "HF_HUB_OFFLINE": "1"}
        from tests.dialects.transformer_lens.demos.published import write_hub

        write_hub(Path(hub))
        main()
