"""What several tests share: seeds, and a check that nothing of ours is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

# Workers share the cores: more threads than cores make all of them crawl. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from interpose.taps import context, eager
from tests import selection
from tests.copies import odd_addresses
from tests.kernels import rounding_by_rows

# INTERPOSE_TEST_DEVICE=cuda runs the same tests there, where autograd has threads of its own.
torch.set_default_device(os.environ.get("INTERPOSE_TEST_DEVICE", "cpu"))


# INTERPOSE_TEST_COPIES=odd lets copies begin at odd addresses, for kernels that look at them.
ODD = os.environ.get("INTERPOSE_TEST_COPIES") == "odd"

# INTERPOSE_TEST_KERNELS=rows lets linear maps and attention round by the number of their rows, as some CPUs' do.
BY_ROWS = os.environ.get("INTERPOSE_TEST_KERNELS") == "rows"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make exhaustive`."""
    selection.mark(items, whole=not any("::" in argument for argument in config.args))


@pytest.fixture(autouse=ODD)
def copies_at_odd_addresses() -> Iterator[None]:
    """Every copy that takes a value's place begins where torch's allocator would put none."""
    with odd_addresses():
        yield


@pytest.fixture(autouse=BY_ROWS)
def kernels_that_round_by_rows(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a run gives moves in its last bits with the number of its rows and positions."""
    # TorchScript reads these functions as code, and sharded tensors know them by what they are.
    as_they_are = any(word in request.node.name for word in ("torchscript", "sharded"))
    with nullcontext() if as_they_are else rounding_by_rows():
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
