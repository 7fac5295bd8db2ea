"""Find where a training run turns into NaN, by name, in the very step in which it happens.

Run: python examples/nan_guard.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interpose as ip


class Normalise(nn.Module):
    """Divides by the standard deviation, and forgets that it can be zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Rows of mean 0 and variance 1."""
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


def main() -> None:
    """Train with too large a step until something breaks, and say what."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), Normalise(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=3.0)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)

    model = ip.wrap(module)
    with model.hooks([ip.NaNGuard()]):
        for step in range(100):
            optimizer.zero_grad()
            try:
                F.mse_loss(model(x), y).backward()
            except ip.NonFinite as error:
                print(f"step {step}: {error}")
                break
            optimizer.step()

    # All units of the ReLU were zero for some rows: a constant row has no standard deviation.
    _, cache = model.run_with_cache(x, names_filter="1")
    print("rows without any active unit:", int((cache["1"] == 0).all(1).sum()), "of", len(x))


if __name__ == "__main__":
    main()
