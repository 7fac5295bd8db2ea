"""How busy is each unit? Mean, spread, sparsity and dead units of a network over a dataset.

Run: python examples/statistics.py [output folder]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import interpose as ip


def main(folder: Path) -> None:
    """Collect statistics of a small network, once without and once with a fault in it."""
    torch.manual_seed(0)
    first = nn.Linear(8, 32)
    module = nn.Sequential(first, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    loader = DataLoader(TensorDataset(torch.randn(2048, 8), torch.zeros(2048)), batch_size=256)
    model = ip.wrap(module)

    # The output of every module, over all batches; the first element of each batch is the input.
    before = ip.activation_statistics(model, loader)
    print(before)

    # A large negative bias switches half of the first layer off for good.
    with torch.no_grad():
        first.bias[:16] -= 50.0
    after = ip.activation_statistics(model, loader, site=["1", "3"])
    dead = after["1"].dead.nonzero().flatten().tolist()
    print(f"\nafter the fault, dead units in '1': {dead}")
    print("written to", after.save(folder / "statistics.html"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
