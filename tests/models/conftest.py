"""What tests of transformers models share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """One, unless the environment says more: models this small are faster so, and docs/models.md is made so."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield
    torch.set_num_threads(before)
