"""What guides and courses do from end to end, under the dialect, gives the numbers of TransformerLens 3.5.1.

`demos/` has a script for each, `demos/numbers.json` what they gave there on the same weights, `demos/record.py` how.
"""

from __future__ import annotations

import copy
import json
import types
from typing import Any

import pytest
import torch

from interpose.dialects.transformer_lens import hooked_transformer
from interpose.dialects.transformer_lens.loading import nicknames
from interpose.models import loading
from tests.dialects.transformer_lens.demos.published import published
from tests.dialects.transformer_lens.demos.record import NAMES, NUMBERS, run

THERE = json.loads(NUMBERS.read_text())


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded by their published names, and each demo has its own."""

    def load(name: str, **_: Any) -> Any:
        module, tokenizer = copy.deepcopy(published(nicknames.on_hub(name)))
        return types.SimpleNamespace(module=module, tokenizer=tokenizer, processor=None)

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(hooked_transformer, "as_trained", lambda *_: {})


def differences(here: Any, there: Any, at: str) -> list[str]:
    """Where two findings differ by more than rounding makes."""
    if isinstance(there, list) and isinstance(here, list) and len(here) == len(there):
        return [
            line
            for place, (a, b) in enumerate(zip(here, there))
            for line in differences(a, b, f"{at}[{place}]")
        ]
    numbers = isinstance(there, (int, float)) and isinstance(here, (int, float))
    if numbers and abs(here - there) <= 2e-3 + 2e-3 * abs(there):
        return []
    return [] if here == there else [f"{at}: {here!r} and there {there!r}"]


@pytest.mark.parametrize("name", NAMES)
def test_a_demo_gives_the_numbers_of_transformer_lens(name: str) -> None:
    here = run(name)
    assert not torch.is_inference_mode_enabled()
    assert list(here) == list(THERE[name])
    wrong = [line for key in here for line in differences(here[key], THERE[name][key], key)]
    assert not wrong, "\n".join(wrong[:20])
