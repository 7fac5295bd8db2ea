"""Run the tests that depend on a CPU's kernels under every set of instructions that this CPU has (`make cpus`).

torch, MKL and oneDNN choose kernels by what the CPU can, by the number of threads and by the addresses of tensors; each
can be told to take others. What this CPU has not is left out, and named at the end.

    python scripts/cpus.py                          # all of it
    python scripts/cpus.py odd MKL_CBWR=AVX2        # some
    python scripts/cpus.py -- -x tests/engine/test_zoo.py  # what follows -- goes to pytest

It needs torch, transformers and pytest; with pytest-xdist it uses all cores. No installation of interpose is needed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
VARIABLES = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "INTERPOSE_TEST_COPIES", "INTERPOSE_TEST_KERNELS",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A way to run the tests: variables of the environment, and what the CPU needs for it."""

    name: str
    environment: dict[str, str]
    library: str = ""
    flags: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """How many threads each process has."""
        return int(self.environment.get("OMP_NUM_THREADS", "1"))


def _set(variable: str, value: str, library: str, *flags: str) -> Variant:
    return Variant(f"{variable}={value}", {variable: value}, library, flags)


AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
VARIANTS = (
    Variant("as it is", {}),
    Variant("odd", {"INTERPOSE_TEST_COPIES": "odd"}),
    Variant("rows", {"INTERPOSE_TEST_KERNELS": "rows"}),
    _set("ATEN_CPU_CAPABILITY", "default", ""),
    _set("ATEN_CPU_CAPABILITY", "avx2", "", "avx2", "fma"),
    _set("ATEN_CPU_CAPABILITY", "avx512", "", *AVX512),
    _set("MKL_CBWR", "COMPATIBLE", "mkl"),
    _set("MKL_CBWR", "AVX2", "mkl", "avx2"),
    _set("MKL_ENABLE_INSTRUCTIONS", "SSE4_2", "mkl", "sse4_2"),
    _set("ONEDNN_MAX_CPU_ISA", "SSE41", "mkldnn", "sse4_1"),
    _set("ONEDNN_MAX_CPU_ISA", "AVX2", "mkldnn", "avx2"),
    *(
        Variant(f"{n} threads", {"OMP_NUM_THREADS": str(n), "MKL_NUM_THREADS": str(n)})
        for n in (2, 4)
    ),
)


def cpu() -> tuple[str, set[str]]:
    """The CPU's name and what it can; an empty set where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown CPU", set()
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return (name[1] if name else "unknown CPU"), set(flags[1].split() if flags else ())


def why_not(variant: Variant, flags: set[str], has: Callable[[str], bool]) -> str:
    """What is missing for a variant; an empty text if nothing is."""
    if variant.library and not has(variant.library):
        return f"this torch has no {variant.library}"
    missing = [flag for flag in variant.flags if flag not in flags]
    return f"this CPU has no {', '.join(missing)}" if missing else ""


def command(variant: Variant, extra: list[str]) -> list[str]:
    """How pytest is called for one variant: the files that have such tests, in processes if that is possible."""
    files = [word for word in extra if word.startswith("tests")]
    if not files:
        marked = [
            path
            for path in sorted((ROOT / "tests").rglob("test_*.py"))
            if "mark.bits" in path.read_text()
        ]
        files = [str(path.relative_to(ROOT)) for path in marked if _can_import(path)]
        extra = [*extra, *files]
    workers = max(1, (os.cpu_count() or 1) // variant.threads)
    spread = ["-n", str(workers)] if workers > 1 and _there("xdist") else []
    chosen = ["-m", "bits and not exhaustive"]
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *chosen,
        *spread,
        *extra,
    ]


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _can_import(path: Path) -> bool:
    return _there("hypothesis") or "hypothesis" not in path.read_text()


def run(variant: Variant, extra: list[str]) -> tuple[bool, str]:
    """Whether the tests pass, and pytest's last line."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    paths = [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # it is the CPU that is meant
    last = ""
    with subprocess.Popen(
        command(variant, extra), cwd=ROOT, env=environment | variant.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode == 0, last


def main() -> int:
    """All variants that were asked for; the exit status says whether all passed."""
    words = sys.argv[1:]
    extra = words[words.index("--") + 1 :] if "--" in words else []
    asked = words[: words.index("--")] if "--" in words else words
    unknown = set(asked) - {variant.name for variant in VARIANTS}
    if unknown:
        print(
            f"no variant {', '.join(sorted(unknown))}; there are: {', '.join(v.name for v in VARIANTS)}"
        )
        return 2
    if not _there("pytest"):
        print(
            "pytest is missing: pip install pytest; or, for a machine without a network,\n"
            "  pip install --target build/pytest pytest   elsewhere, and here PYTHONPATH=build/pytest"
        )
        return 2
    import torch
    import transformers

    name, flags = cpu()
    libraries = {
        "mkl": torch.backends.mkl.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
    }
    print(f"{name}: torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    print(f"{torch.backends.cpu.get_cpu_capability()} by default, {os.cpu_count()} cores")
    done, left_out, good = [], [], True
    for variant in VARIANTS:
        if asked and variant.name not in asked:
            continue
        reason = why_not(variant, flags, libraries.__getitem__)
        if reason:
            left_out.append(f"  {variant.name}: {reason}")
            continue
        print(f"\n{variant.name}", flush=True)
        started = time.monotonic()
        passed, last = run(variant, extra)
        good &= passed
        done.append(
            f"  {variant.name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - started:.0f} s ({last})"
        )
    print("\nran", *done, sep="\n")
    print("left out", *(left_out or ["  nothing"]), sep="\n")
    return 0 if good and done else 1


if __name__ == "__main__":
    sys.exit(main())
