"""Does the gradient reach the first layer? The same deep network with three activations.

Run: python examples/gradient_health.py [output folder]
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interpose as ip


def deep(activation: type[nn.Module], depth: int = 10) -> nn.Sequential:
    """Linear layers of width 64 with PyTorch's own initialisation."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(64, 64), activation()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def main(folder: Path) -> None:
    """Compare, and save the worst as a page."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(128, 64, generator=generator), torch.arange(128) % 10

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, y)

    for activation in (nn.Sigmoid, nn.Tanh, nn.ReLU):
        health = ip.gradient_health(ip.wrap(deep(activation)), x, loss=loss)
        print(
            f"{activation.__name__:8} first layer gets {health.rows[0].ratio:.1e} of the gradient"
        )
        print(f"         {health.title}")

    # Layers of width 64 keep the gradient's size if their weights have a standard deviation of (2 / 64) ** 0.5.
    module = deep(nn.ReLU)
    for part in module:
        if isinstance(part, nn.Linear):
            nn.init.kaiming_normal_(part.weight)
    health = ip.gradient_health(ip.wrap(module), x, loss=loss)
    print("\nReLU with He initialisation:")
    print(health)
    print("written to", health.save(folder / "gradient_health.html"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
