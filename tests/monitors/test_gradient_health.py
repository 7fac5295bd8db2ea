import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import interpose as ip
from interpose.monitors.gradient_health import gradient_health


def deep(activation, depth, *, std=None):
    torch.manual_seed(0)
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(32, 32), activation()]
        if std is not None:
            nn.init.normal_(layers[-2].weight, std=std)
    return nn.Sequential(*layers, nn.Linear(32, 4))


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 4


def loss(output):
    return F.cross_entropy(output, Y)


def test_sizes_are_those_of_raw_torch():
    module = deep(nn.Tanh, 3)
    kept = []
    for part in module:
        part.register_forward_hook(lambda _, args, out: kept.append(out))
    output = module(X)
    gradients = torch.autograd.grad(loss(output), kept)
    kept = [value.detach() for value in kept]
    for part in module:
        part._forward_hooks.clear()
    found = gradient_health(ip.wrap(module), X, loss=loss)
    assert [row.site for row in found.rows] == ["0", "1", "2", "3", "4", "5", "6", "output"]
    last = float(gradients[-1].norm()) / gradients[-1].numel() ** 0.5
    for row, value, gradient in zip(found.rows, kept, gradients):
        size = float(gradient.norm()) / gradient.numel() ** 0.5
        assert row.activation == pytest.approx(float(value.norm()) / value.numel() ** 0.5, rel=1e-5)
        assert row.gradient == pytest.approx(size, rel=1e-5)
        assert row.ratio == pytest.approx(size / last, rel=1e-5)


def test_a_deep_sigmoid_network_vanishes_towards_its_first_layers():
    found = gradient_health(ip.wrap(deep(nn.Sigmoid, 12)), X, loss=loss)
    flags = [row.flag for row in found.rows]
    assert set(flags) == {"", "vanishing"}
    assert flags == sorted(flags, reverse=True)  # from the first layer on, then no more
    assert flags[:8] == ["vanishing"] * 8
    assert found.rows[0].ratio < 1e-8
    assert not found.healthy


def test_a_badly_scaled_deep_linear_network_explodes_and_nothing_vanishes():
    found = gradient_health(ip.wrap(deep(nn.Identity, 16, std=0.6)), X, loss=loss)
    flags = [row.flag for row in found.rows]
    assert set(flags) == {"", "exploding"}
    assert flags == sorted(flags, reverse=True)
    assert found.rows[0].ratio > 1e5
    assert found.flagged[0].site == "0"


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize(
    "module", [deep(nn.ReLU, 4), deep(nn.ReLU, 30, std=(2 / 32) ** 0.5), deep(nn.Tanh, 8, std=0.18)]
)
def test_a_healthy_network_has_no_flag_whatever_the_scale_of_its_loss(module, scale):
    found = gradient_health(ip.wrap(module), X, loss=lambda output: loss(output) * scale)
    assert found.healthy, found


def test_nothing_is_left_behind():
    module = deep(nn.ReLU, 2)
    loss(module(X)).backward()
    before = {name: p.grad.clone() for name, p in module.named_parameters()}
    state = torch.get_rng_state()
    gradient_health(ip.wrap(module), X, loss=loss)
    assert all(torch.equal(p.grad, before[name]) for name, p in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    fresh = deep(nn.ReLU, 2)
    gradient_health(ip.wrap(fresh), X, loss=loss)
    assert all(p.grad is None for p in fresh.parameters())


def test_a_dead_layer_and_a_broken_one_are_told_apart():
    module = deep(nn.ReLU, 2)
    with torch.no_grad():
        module[2].bias.fill_(-1e9)
    found = gradient_health(ip.wrap(module), X, loss=loss)
    assert [row.flag for row in found.rows] == ["vanishing"] * 3 + ["", "", ""]
    assert found.rows[0].gradient == 0
    with torch.no_grad():
        module[2].weight[0, 0] = torch.nan
    found = gradient_health(ip.wrap(module), X, loss=loss)
    assert {row.flag for row in found.rows} == {"not finite"}


def test_a_site_without_a_gradient_says_so():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.aside = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            self.aside(x)
            return self.main(x)

    found = gradient_health(ip.wrap(Aside()), torch.ones(1, 2), loss=lambda output: output.sum())
    rows = {row.site: row for row in found.rows}
    assert (rows["aside"].gradient, rows["aside"].ratio, rows["aside"].flag) == (None, None, "")
    assert "aside   " in repr(found)


def test_a_loss_inside_the_model_is_not_what_layers_are_compared_with():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.loss = deep(nn.ReLU, 2), nn.CrossEntropyLoss()

        def forward(self, x, y):
            return self.loss(self.body(x), y)

    x, y = (
        X.repeat(5000, 1),
        Y.repeat(5000),
    )  # a large batch: each gradient is tiny beside the 1 of the loss
    found = gradient_health(ip.wrap(WithLoss()), x, y, loss=lambda output: output)
    rows = {row.site: row for row in found.rows}
    assert found.healthy
    assert (rows["output"].gradient, rows["output"].ratio) == (1.0, None)
    assert rows["body"].ratio == 1.0
    assert rows["body"].gradient < 1e-5


def test_limits_and_sites_can_be_chosen():
    model = ip.wrap(deep(nn.Tanh, 3))
    assert gradient_health(model, X, loss=loss).healthy
    strict = gradient_health(model, X, loss=loss, site=["0", "6"], vanishing=0.9)
    assert [(row.site, row.flag) for row in strict.rows] == [("0", "vanishing"), ("6", "")]


def test_keywords_go_to_the_model():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x, *, factor):
            return self.fc(x) * factor

    model, x = ip.wrap(Scaled()), torch.ones(1, 2)
    found = gradient_health(model, x, factor=3.0, loss=lambda output: output.sum(), site="fc")
    assert found.rows[0].gradient == 3.0


def test_no_gradient_at_all_is_an_error():
    with torch.no_grad(), pytest.raises((ip.GradientError, ip.NeverFired)):
        gradient_health(ip.wrap(deep(nn.ReLU, 1)), X, loss=loss)


def test_the_result_prints_shows_and_saves_itself(tmp_path):
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        module[0].weight.fill_(2.0)
        module[1].weight.fill_(1e5)
    found = gradient_health(ip.wrap(module), torch.ones(1, 1), loss=lambda out: 3 * out.sum())
    assert repr(found) == (
        "Gradient health of 3 sites: 1 exploding\n"
        "site    activation  gradient  ratio  flag\n"
        "0       2           3e+05     1e+05  exploding\n"
        "1       2e+05       3         1\n"
        "output  2e+05       3         1"
    )
    assert "1e+05" in found._repr_html_()
    assert f"<h1>{found.title}</h1>" in found.save(tmp_path / "x.html").read_text()
    rows = json.loads(found.save(tmp_path / "x.json").read_text())["rows"]
    assert rows[0]["flag"] == "exploding"
    healthy = gradient_health(ip.wrap(nn.Linear(1, 1)), torch.ones(1, 1), loss=torch.sum)
    assert healthy.title == "Gradient health of 1 sites: nothing to report"
