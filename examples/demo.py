"""A tour in one minute: train two small networks, look inside them, and write what was found to demo.html.

Run: python examples/demo.py   (or `make demo`)
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interpose as ip
from interpose.render import colours, png
from interpose.render.html import bar, html_table, image, page, write
from interpose.render.text import table

KINDS = ("circle", "square", "cross")


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Points on two spirals that wind around each other, and which of the two each is on."""
    turn = torch.rand(count).sqrt() * 3 * torch.pi
    label = torch.arange(count) % 2
    angle = turn + label * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / (3 * torch.pi)
    return points + 0.01 * torch.randn(count, 2), label


def pictures(count: int) -> tuple[Tensor, Tensor]:
    """Outlines of circles, squares and crosses, [count, 1, 12, 12], in many places and sizes, with noise."""
    label = torch.arange(count) % 3
    middle = 5.5 + 2 * torch.rand(count, 2, 1, 1) - 1
    radius = 3.0 + 1.4 * torch.rand(count, 1, 1)
    line = torch.arange(12.0)
    down, across = (
        (line[None, :, None] - middle[:, 0]).abs(),
        (line[None, None, :] - middle[:, 1]).abs(),
    )
    distances = (
        ((down**2 + across**2).sqrt() - radius).abs(),
        (torch.maximum(down, across) - 0.9 * radius).abs(),
        torch.where(
            torch.maximum(down, across) < radius, torch.minimum(down, across), torch.tensor(9.0)
        ),
    )
    chosen = torch.stack(distances)[label, torch.arange(count)]
    images = torch.exp(-((chosen / 0.8) ** 2)) + 0.1 * torch.randn(count, 12, 12)
    return images[:, None], label


def mlp() -> nn.Sequential:
    """Two numbers in, two classes out."""
    return nn.Sequential(
        nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)
    )


class CNN(nn.Module):
    """Two convolutions and a linear head, with names that can be pointed at."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2)
        self.act2 = nn.ReLU()
        self.head = nn.Linear(8 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of circle, square and cross."""
        x = self.act1(self.conv1(x))
        x = self.act2(self.conv2(x))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def train(module: nn.Module, draw: Callable[[int], tuple[Tensor, Tensor]], steps: int) -> None:
    """Fresh data in every step, so there is nothing to overfit."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(steps):
        x, y = draw(128)
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: ip.Model, x: Tensor, y: Tensor, *hooks: ip.Hook) -> float:
    """The share of right answers, with hooks in place."""
    with model.hooks(hooks):
        return float((model(x).argmax(1) == y).float().mean())


class without(ip.Controller):
    """Switches one channel (or unit) of a site off. This is all it takes to write an edit."""

    def __init__(self, site: str, channel: int) -> None:
        super().__init__(site)
        self.channel = channel

    def change(self, value: Tensor, hook: ip.HookPoint) -> None:  # noqa: ARG002
        """The value is a copy: change it in place."""
        value[:, self.channel] = 0.0


@torch.no_grad()
def decision(model: ip.Model, points: Tensor, *hooks: ip.Hook, size: int = 150) -> bytes:
    """What the MLP answers in the plane, red for one class and blue for the other, and points in it."""
    line = torch.linspace(-1.1, 1.1, size)
    plane = torch.cartesian_prod(line, line)[:, [1, 0]]
    with model.hooks(hooks):
        sure = model(plane).softmax(1)[:, 0] * 2 - 1
    palette = colours.table(lambda share: colours.diverging(2 * share - 1))
    pixels = torch.tensor(palette, dtype=torch.uint8)[((sure + 1) * 127.5).long()]
    pixels = pixels.reshape(size, size, 3)
    across, down = ((points + 1.1) / 2.2 * (size - 1)).round().long().unbind(1)
    pixels[down, across] = 255
    return png.encode(pixels.numpy())


def ablation(model: ip.Model, site: str, x: Tensor, y: Tensor) -> list[tuple[int, list[float]]]:
    """Accuracy on each kind of picture without each channel of a site."""
    channels = range(model.sites[site].shape[1])  # type: ignore[index]
    kinds = [(x[y == kind], y[y == kind]) for kind in range(3)]
    return [(c, [accuracy(model, *kind, without(site, c)) for kind in kinds]) for c in channels]


def section(title: str, text: str, *parts: str) -> str:
    """A part of the page."""
    return f"<h2>{escape(title)}</h2><p class=note>{text}</p>" + "".join(parts)


def side_by_side(*captioned: tuple[str, str]) -> str:
    """Pictures next to each other, each under its caption."""
    cells = "".join(
        f'<figure style="margin:0"><figcaption>{escape(caption)}</figcaption>{picture}</figure>'
        for caption, picture in captioned
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:24px">{cells}</div>'


def look_at_mlp() -> list[str]:
    """Train the MLP, then read, check and cut it."""
    module = mlp()
    train(module, spirals, steps=600)
    model, (x, y) = ip.wrap(module), spirals(2000)
    right = accuracy(model, x, y)
    print(f"MLP on two spirals: {right:.1%} right")

    statistics = ip.activation_statistics(model, x.split(250), progress=False)
    health = ip.gradient_health(model, x, loss=lambda output: F.cross_entropy(output, y))
    print(f"{statistics}\n\n{health}\n")

    # Which unit of the first hidden layer matters most? Switch each off in turn.
    left = [accuracy(model, x, y, without("1", unit)) for unit in range(24)]
    worst = min(range(24), key=left.__getitem__)
    cut = f"without unit {worst} of the first Tanh (site '1'): {left[worst]:.1%} right"
    print(f"{cut}\n")
    before, after = decision(model, x[:400]), decision(model, x[:400], without("1", worst))
    planes = side_by_side(
        (f"as trained: {right:.1%} right", image(before, width=300, alt="decision map")),
        (cut, image(after, width=300, alt="decision map after the cut")),
    )
    return [
        section(
            "A small network on two spirals",
            "What it answers at each point of the plane (dots are data), before and after one of its "
            "48 hidden units is switched off by a hook.",
            planes,
        ),
        section(
            "Activations, layer by layer", "Over 2,000 points, from one pass.", statistics.html()
        ),
        section(
            "Does the gradient reach every layer?",
            "Sizes from one forward and one backward pass; the bar is the gradient against that at the "
            "output, on a logarithmic scale.",
            health.html(),
        ),
    ]


def look_at_cnn() -> list[str]:
    """Train the CNN, then see what its channels see and which of them it needs."""
    module = CNN()
    train(module, pictures, steps=300)
    model, (x, y) = ip.wrap(module), pictures(1500)
    right = accuracy(model, x, y)
    print(f"CNN on circles, squares and crosses: {right:.1%} right")

    statistics = ip.activation_statistics(model, x.split(250), unit_axis=1, progress=False)
    health = ip.gradient_health(model, x, loss=lambda output: F.cross_entropy(output, y))
    print(f"{statistics}\n\n{health}\n")

    maps = [
        (KINDS[kind], ip.feature_maps(model, x[y == kind], ["input", "act1", "act2"], columns=4))
        for kind in (0, 2)
    ]
    table_rows = ablation(model, "act2", x, y)
    head = ("channel off", *KINDS)
    print("accuracy without each channel of act2")
    print(
        table(head, [(str(c), *(f"{share:.0%}" for share in shares)) for c, shares in table_rows])
    )
    bars = [
        (f"act2, {c}", *(bar(share, f"{share:.0%}") for share in shares))
        for c, shares in table_rows
    ]
    return [
        section(
            "A convolutional network on drawn shapes",
            f"It tells circles, squares and crosses apart: {right:.1%} right on new pictures. Below: one "
            "picture, and what each channel makes of it after the first and the second convolution.",
            side_by_side(*((kind, found.html()) for kind, found in maps)),
        ),
        section(
            "Which channels does it need?",
            "Share of right answers on each kind of picture with one channel of <code>act2</code> "
            "switched off at a time.",
            html_table(head, bars),
        ),
        section("Activations by channel", "Over 1,500 pictures.", statistics.html()),
        section("Does the gradient reach every layer?", "As for the first network.", health.html()),
    ]


def main() -> None:
    """Train, look, write."""
    torch.set_num_threads(1)  # networks this small gain nothing from more
    torch.manual_seed(0)
    sections = [*look_at_mlp(), *look_at_cnn()]
    path = write(Path("demo.html"), page("interpose: a look inside two networks", *sections))
    print(f"\nThe whole story with pictures: {path.resolve()}")


if __name__ == "__main__":
    main()
