"""The script behind `make cpus`: what it runs, what it leaves out and says so, and that each way really differs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import interpose as ip
from tests import selection
from tests.bounds import assert_near
from tests.copies import copied, odd_addresses
from tests.kernels import rounding_by_rows

ROOT = Path(__file__).parent.parent


def load() -> Any:
    spec = importlib.util.spec_from_file_location("cpus", ROOT / "scripts" / "cpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpus"] = module
    spec.loader.exec_module(module)
    return module


cpus = load()
BY_NAME = {variant.name: variant for variant in cpus.VARIANTS}


def test_what_a_cpu_or_a_torch_has_not_is_left_out_with_the_reason() -> None:
    old = {"sse4_1", "sse4_2", "avx", "avx2", "fma"}
    reasons = {name: cpus.why_not(v, old, lambda _: True) for name, v in BY_NAME.items()}
    left_out = {name for name, reason in reasons.items() if reason}
    assert left_out == {"ATEN_CPU_CAPABILITY=avx512"}
    assert reasons["ATEN_CPU_CAPABILITY=avx512"].startswith("this CPU has no avx512f, ")
    bare = {name for name, v in BY_NAME.items() if not cpus.why_not(v, set(), lambda _: False)}
    assert bare == {
        "as it is",
        "odd",
        "rows",
        "ATEN_CPU_CAPABILITY=default",
        "2 threads",
        "4 threads",
    }
    missing = cpus.why_not(BY_NAME["MKL_CBWR=COMPATIBLE"], old, lambda name: name != "mkl")
    assert missing == "this torch has no mkl"


def test_it_runs_the_marked_tests_also_without_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = cpus.command(BY_NAME["as it is"], [])
    assert everything[everything.index("-m", 3) + 1] == "bits and not exhaustive"
    assert {"tests/engine/test_zoo.py", "tests/sweeps/test_plans.py"} <= set(everything)
    assert "tests/test_policy.py" not in everything
    monkeypatch.setattr(cpus, "_there", lambda package: package not in ("xdist", "hypothesis"))
    without = cpus.command(BY_NAME["as it is"], ["-x"])
    assert "-n" not in without
    assert "-x" in without
    for path in without:
        if path.startswith("tests/"):
            assert "hypothesis" not in (ROOT / path).read_text()
    one = cpus.command(BY_NAME["odd"], ["-k", "x or " * 100 + "y", "tests/engine/test_modes.py"])
    assert [word for word in one if word.startswith("tests/")] == ["tests/engine/test_modes.py"]


def test_an_unknown_word_says_what_there_is() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "cpus.py"), "even"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout.startswith("no variant even; there are: as it is, odd, rows, ATEN_CPU")


def test_odd_addresses_are_odd_for_raw_torch_and_for_edits() -> None:
    """One element behind a boundary, with the strides and the gradient of the value."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    x, seen = torch.randn(3, 4), []

    def looks(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        seen.append(args[0].data_ptr() % 64)

    net[1].register_forward_pre_hook(looks)
    for edit in (torch.clone, lambda value: value.mul_(1)):
        with odd_addresses():
            ip.wrap(net).run_with_hooks(x, fwd_hooks=[("0", edit)])
    ip.wrap(net).run_with_hooks(x, fwd_hooks=[("0", torch.clone)])
    assert seen == [4, 4, 0]
    value = torch.randn(4, 6, requires_grad=True)
    for view in (value, value.T, value[:, ::2], value[:, :1].expand(4, 3), value[0, 0]):
        with odd_addresses():
            odd = copied(view)
        assert odd.data_ptr() % 64 == 4
        assert odd.stride() == view.stride()
        assert torch.equal(odd, view)
        assert torch.autograd.grad(odd.sum(), value)[0].sum() == view.numel()


@torch.no_grad()
def test_kernels_round_by_the_number_of_rows_and_by_nothing_else() -> None:
    linear, x = nn.Linear(64, 64), torch.randn(8, 64)
    plain = linear(x)
    with rounding_by_rows():
        found = [linear(x[:count]) for count in range(1, 9)]
        assert all(
            torch.equal(linear(x[:count].clone()), found[count - 1]) for count in range(1, 9)
        )
        bare = torch.addmm(linear.bias, x[:2], linear.weight.T)
    assert sum(torch.equal(one, plain[: len(one)]) for one in found) < 4
    assert len({float(one[0, 0]) for one in found}) > 2
    for one in found:
        assert_near(one, plain[: len(one)])
    assert_near(bare, plain[:2])
    assert torch.equal(linear(x), plain)


@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") is not None, reason="the environment has chosen already"
)
def test_a_variable_reaches_torch() -> None:
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {**os.environ, **BY_NAME["ATEN_CPU_CAPABILITY=default"].environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() in ("DEFAULT", "NO AVX")


class Item:
    """What `selection.mark` looks at of a test."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid, self.marks = nodeid, []

    def add_marker(self, marker: Any) -> None:
        self.marks.append(marker)


def test_what_is_kept_is_not_exhaustive_and_a_word_that_no_test_has_is_refused() -> None:
    name = "tests/models/test_check.py::test_every_promise_holds"
    items = [Item(f"{name}[{kind}]") for kind in ("gpt2", "llama", "bloom")]
    selection.mark(items)  # type: ignore[arg-type]
    assert [bool(item.marks) for item in items] == [True, False, False]
    with pytest.raises(pytest.UsageError, match=r"keeps \['bloom'\] of tests/models/test_check.py"):
        selection.mark(items[:2])  # type: ignore[arg-type]
    selection.mark(items[:2], whole=False)  # type: ignore[arg-type]


def test_every_test_that_is_kept_in_part_is_there() -> None:
    for name in selection.KEPT:
        path, function = name.split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name
