"""Unlearn a shortcut: a reversed gradient keeps features from telling two sources of data apart.

Domain-adversarial training needs one line here: the gradient of a second head is multiplied by -1 where it enters the
shared features, and clipped so that it never outweighs the main task.

Run: python examples/train_with_gradient_control.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interpose as ip


class TwoHeads(nn.Module):
    """Shared features, a head for the task and a head for the source of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.task = nn.Linear(32, 2)
        self.source = nn.Sequential(nn.Identity(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of both heads."""
        shared = self.features(x)
        return self.task(shared), self.source(shared)


def train(hooks: list[ip.Hook]) -> tuple[float, float]:
    """Accuracy of the two heads after 300 steps with some hooks on the backward pass."""
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    task, source = (x[:, 0] > 0).long(), (x[:, 1] > 0).long()
    module = TwoHeads()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    with ip.wrap(module).hooks(hooks):
        for _ in range(300):
            optimizer.zero_grad()
            answers = module(x)
            (F.cross_entropy(answers[0], task) + F.cross_entropy(answers[1], source)).backward()
            optimizer.step()
    with torch.no_grad():
        right = [(a.argmax(1) == b).float().mean() for a, b in zip(module(x), (task, source))]
    return right[0].item(), right[1].item()


def main() -> None:
    """Train both ways and compare."""
    reverse = [ip.scale_grad("source.0", -1.0), ip.clip_grad("source.0", 0.05)]
    for name, hooks in (("plain", []), ("reversed", reverse)):
        task, source = train(list(hooks))
        print(f"{name:9} task {task:.0%}   source told apart {source:.0%}")


if __name__ == "__main__":
    main()
