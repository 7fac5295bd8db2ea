import pytest
import torch
from torch import nn

import interpose as ip
from interpose.monitors.nan_guard import Break, NaNGuard


class Net(nn.Module):
    """Breaks at `log` for negative inputs, and in the backward pass of `root` for ones."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.log = Apply(torch.log)
        self.root = Apply(torch.sqrt)
        self.out = nn.Linear(2, 1)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(2))

    def forward(self, x):
        return self.out(self.root(self.log(self.fc(x))))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


BAD = torch.tensor([[-1.0, 3.0], [3.0, 0.0]])
GOOD = torch.tensor([[3.0, 4.0]])
EDGE = torch.tensor([[1.0, 3.0]])  # log is 0, whose square root has an infinite slope


def test_it_names_the_first_broken_site_and_the_last_whole_one():
    with pytest.raises(ip.NonFinite) as caught:
        ip.wrap(Net()).run_with_hooks(BAD, hooks=[NaNGuard()])
    assert str(caught.value) == (
        "the value at 'log' has 1 NaN and 1 Inf among 4 numbers.\n"
        "  the last finite value before it was at 'fc'"
    )


def test_gradients_are_followed_in_backward_order():
    model, guard = ip.wrap(Net()), NaNGuard()
    with pytest.raises(ip.NonFinite) as caught, model.hooks([guard]):
        model(EDGE).sum().backward()
    assert str(caught.value) == (
        "the gradient at 'log' has 0 NaN and 1 Inf among 2 numbers.\n"
        "  the last finite gradient before it was at 'root'"
    )
    assert guard.first.kind == "gradient"


def test_a_finite_run_passes():
    model, guard = ip.wrap(Net()), NaNGuard()
    for _ in range(2):
        with model.hooks([guard]):
            model(GOOD).sum().backward()
    assert guard.first is None


def test_without_raises_it_writes_the_first_break_down_and_lets_the_model_run():
    model, guard = ip.wrap(Net()), NaNGuard(raises=False)
    output = model.run_with_hooks(BAD, hooks=[guard])
    assert output.isnan().any()
    assert guard.first == Break(
        kind="value", site="log", call=0, nans=1, infs=1, numbers=4, after="fc", parameters=()
    )
    guard.reset()
    assert guard.first is None


def test_a_broken_parameter_is_named():
    module = Net()
    with torch.no_grad():
        module.fc.weight[0, 0] = torch.nan
    with pytest.raises(ip.NonFinite) as caught:
        ip.wrap(module).run_with_hooks(GOOD, hooks=[NaNGuard()])
    assert str(caught.value) == (
        "the value at 'fc' has 1 NaN and 0 Inf among 2 numbers.\n"
        "  no finite value was seen before it: look at the model's inputs too\n"
        "  not finite in this module: weight"
    )


def test_a_broken_loss_is_where_the_gradient_begins():
    model = ip.wrap(nn.Sequential(nn.Linear(2, 1)))
    with pytest.raises(ip.NonFinite) as caught, model.hooks([NaNGuard("0")]):
        (model(GOOD) * torch.inf).sum().backward()
    assert str(caught.value) == (
        "the gradient at '0' has 0 NaN and 1 Inf among 1 numbers.\n"
        "  no finite gradient was seen before it: look at the loss too"
    )


def test_the_pass_before_does_not_count_as_before():
    model, guard = ip.wrap(Net()), NaNGuard(gradients=False)
    model.run_with_hooks(GOOD, hooks=[guard])
    with pytest.raises(ip.NonFinite, match="no finite value was seen before it"):
        model.run_with_hooks(GOOD * torch.nan, hooks=[guard])
    with pytest.raises(ip.NonFinite, match="the last finite value before it was at 'fc'"):
        model.run_with_hooks(BAD, hooks=[guard])


def test_a_later_call_of_a_module_is_numbered():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.grow = Apply(lambda x: x * 1e30)

        def forward(self, x):
            return self.grow(self.grow(x))

    with pytest.raises(ip.NonFinite) as caught:
        ip.wrap(Loop()).run_with_hooks(torch.ones(2), hooks=[NaNGuard()])
    assert str(caught.value) == (
        "the value at 'grow' (call 1) has 0 NaN and 2 Inf among 2 numbers.\n"
        "  the last finite value before it was at 'grow'"
    )


def test_it_needs_no_backward_pass_where_gradients_are_off():
    model = ip.wrap(Net())
    with torch.no_grad(), model.hooks([NaNGuard()]):
        model(GOOD)
    with model.hooks([NaNGuard(gradients=False)]):
        model(GOOD)


def test_integers_are_passed_over():
    ip.wrap(nn.Identity()).run_with_hooks(torch.arange(3), hooks=[NaNGuard(gradients=False)])
