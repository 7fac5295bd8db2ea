"""What several tests share: seeds, and a check that nothing of ours is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Workers share the cores: more threads than cores make all of them crawl. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from interpose.taps import context, eager
from tests import selection
from tests.copies import odd_addresses

# INTERPOSE_TEST_DEVICE=cuda runs the same tests there, where autograd has threads of its own.
torch.set_default_device(os.environ.get("INTERPOSE_TEST_DEVICE", "cpu"))


# INTERPOSE_TEST_COPIES=odd lets copies begin at odd addresses, for kernels that look at them.
ODD = os.environ.get("INTERPOSE_TEST_COPIES") == "odd"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make exhaustive`."""
    selection.mark(items, whole=not any("::" in argument for argument in config.args))


@pytest.fixture(autouse=ODD)
def copies_at_odd_addresses() -> Iterator[None]:
    """Every copy that takes a value's place begins where torch's allocator would put none."""
    with odd_addresses():
        yield


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
