"""`check()` on an accelerator: tiny models of several mechanisms, float32 and bfloat16.

python -m benchmarks.device_proofs
"""

from __future__ import annotations

import sys

import torch

import interpose as ip
from tests.models import tiny

TYPES = (
    "gpt2",
    "llama",
    "gemma2",
    "olmo2",
    "bloom",
    "gptj",
    "gpt_neox",
    "falcon",
    "mixtral",
    "deepseek_v3",
    "mamba",
)


def main() -> int:
    device = torch.accelerator.current_accelerator()
    failed = 0
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kind in TYPES:
        for dtype in (torch.float32, torch.bfloat16):
            module = tiny.build(kind).to(device, dtype)
            inputs = {name: value.to(device) for name, value in tiny.inputs(module).items()}
            report = ip.wrap(module).check(inputs)
            failed += not report.passed
            print(
                f"{kind:12} {dtype!s:15} {'passes' if report.passed else 'FAILS'}  {report.seconds:.1f} s"
            )
            for finding in [f for f in report.findings if not f.passed][:4]:
                print("     ", finding.promise, finding.site, finding.about[:120])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
