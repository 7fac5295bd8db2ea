"""What do the channels of a convolution see? Sobel-like filters on a drawn circle, as pictures.

Run: python examples/feature_maps.py [output folder]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import interpose as ip


def circle(size: int = 32) -> Tensor:
    """A bright ring on a dark ground, [1, 1, size, size]."""
    line = torch.linspace(-1.0, 1.0, size)
    radius = (line[:, None] ** 2 + line[None, :] ** 2).sqrt()
    return torch.exp(-(((radius - 0.6) / 0.12) ** 2))[None, None]


def main(folder: Path) -> None:
    """Show edges in eight directions, then what pooling leaves of them."""
    edges = nn.Conv2d(1, 8, 3, padding=1, bias=False)
    module = nn.Sequential(edges, nn.ReLU(), nn.MaxPool2d(4))
    line = torch.tensor([-1.0, 0.0, 1.0])
    with torch.no_grad():
        for channel, angle in enumerate(torch.arange(8) * torch.pi / 4):
            edges.weight[channel, 0] = line[None, :] * angle.cos() + line[:, None] * angle.sin()

    maps = ip.feature_maps(ip.wrap(module), circle(), ["0", "1", "2"], columns=8)
    print(maps)
    strongest = maps["2"].values.flatten(1).argmax(1)
    for channel, place in enumerate(strongest.tolist()):
        print(
            f"channel {channel} ({45 * channel:3} degrees) peaks at row {place // 8}, column {place % 8}"
        )
    print("written to", maps.save(folder / "feature_maps.png"))
    print("written to", maps.save(folder / "feature_maps.html"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
