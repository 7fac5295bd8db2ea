"""How easily can each layer be thrown off? The worst small step at every site, against a random one.

Run: python examples/perturb_activation.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interpose as ip
from interpose.monitors.adversarial import shift


def main() -> None:
    """Train a small classifier, then push each of its layers."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    x = torch.randn(512, 20)
    y = (x[:, 0] * x[:, 1] > 0).long()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()

    model = ip.wrap(module)

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, y)

    def accuracy(*hooks: ip.Hook) -> float:
        with torch.no_grad():
            output = model.run_with_hooks(x, hooks=hooks)
        return float((output.argmax(1) == y).float().mean())

    print(f"untouched: {accuracy():.0%}")
    _, cache = model.run_with_cache(x, names_filter=["input", "0", "1", "2", "3"])
    for site, value in cache.items():
        step = 0.3 * value.std().item()  # the same share of each layer's own spread
        worst = ip.adversarial(model, x, site=site, loss=loss, step=step)
        signs = torch.randint(0, 2, value.shape) * 2.0 - 1.0
        random = shift(site, step * signs)
        print(f"{site:6} worst step: {accuracy(worst):4.0%}   random step: {accuracy(random):4.0%}")


if __name__ == "__main__":
    main()
