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
    """Train on data with one bad row in it, and find both the layer and the row."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16, bias=False), nn.ReLU(), Normalise(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    x = torch.randn(640, 4)
    x[391] = 0.0  # a measurement that was never made
    y = x.sum(1, keepdim=True)

    model = ip.wrap(module)
    guard = ip.NaNGuard()
    batch = x
    with model.hooks([guard]):
        for step, batch in enumerate(x.split(64)):
            optimizer.zero_grad()
            try:
                F.mse_loss(model(batch), y[step * 64 : step * 64 + 64]).backward()
            except ip.NonFinite as error:
                print(f"step {step}: {error}")
                break
            optimizer.step()

    # What went into the layer that broke? Run the batch again and look just before it.
    assert guard.first is not None
    _, cache = model.run_with_cache(batch, names_filter=f"{guard.first.site}.input")
    constant = cache[f"{guard.first.site}.input"].std(-1) == 0
    print("rows that are constant there:", constant.nonzero().flatten().tolist(), "of this batch")


if __name__ == "__main__":
    main()
