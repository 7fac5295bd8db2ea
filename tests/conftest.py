"""What several tests share: seeds, and a check that nothing of ours is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Workers share the cores: more threads than cores make all of them crawl. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from interpose.taps import context, eager

# INTERPOSE_TEST_DEVICE=cuda runs the same tests there, where autograd has threads of its own.
torch.set_default_device(os.environ.get("INTERPOSE_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def seeded_and_clean() -> Iterator[None]:
    """Same numbers in every order of tests; no scope and no stance may outlive a test."""
    torch.manual_seed(0)
    yield
    scopes, holders = context.current().scopes, eager._holders
    context._CONTEXT.set(context.Context())
    eager._holders = 0  # one failing test must not fail the others
    assert scopes == ()
    assert holders == 0
