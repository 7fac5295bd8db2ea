"""Promise 5: the whole text of errors, as a user sees them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import interpose as ip


@pytest.fixture
def model() -> ip.Model:
    return ip.wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


def text_of(model: ip.Model, x: Tensor, function, site: str = "1", error=ip.EditShapeError) -> str:
    with pytest.raises(error) as caught:
        model.run_with_hooks(x, fwd_hooks=[(site, function)])
    return str(caught.value)


def wrong(value: Tensor, hook: ip.HookPoint, make) -> object:
    return make(value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda v: v[:, :2],
            (
                "returned shape (3, 2); the model needs (3, 4). Return a tensor of the same shape, "
                "or None to leave the value as it is."
            ),
        ),
        (
            lambda v: v.sum(0, keepdim=True),
            (
                "returned shape (1, 4); the model needs (3, 4). Return a tensor of the same shape, "
                "or None to leave the value as it is."
            ),
        ),
        (
            lambda v: (v * 2).long(),
            (
                "returned torch.int64; the model needs torch.float32, and integer does not stand for "
                "floating point. Convert it with .to(torch.float32)."
            ),
        ),
        (
            lambda v: v > 0,
            (
                "returned torch.bool; the model needs torch.float32, and bool does not stand for "
                "floating point. Convert it with .to(torch.float32)."
            ),
        ),
        (
            lambda v: v.to("meta"),
            "returned a tensor on meta; the value is on cpu. Move it with .to(value.device).",
        ),
        (
            lambda v: (v, None),
            (
                "returned a tuple; the value is a tensor of shape (3, 4). Return a tensor, "
                "or None to leave the value as it is."
            ),
        ),
    ],
)
def test_a_replacement_the_model_cannot_take(model: ip.Model, x: Tensor, make, text: str) -> None:
    line = wrong.__code__.co_firstlineno
    said = text_of(model, x, functools.partial(wrong, make=make))
    assert said == f"hook 'wrong' (test_errors.py, line {line}) at '1' {text}"


def test_a_wrong_gradient_is_named_as_one(model: ip.Model, x: Tensor) -> None:
    output = model.run_with_hooks(x, bwd_hooks=[("1", lambda grad, hook: grad[0])])
    with pytest.raises(ip.EditShapeError, match=r"at '1_grad' returned shape \(4,\)"):
        output.sum().backward()


def test_an_error_in_a_hook_keeps_its_type_and_says_where(model: ip.Model, x: Tensor) -> None:
    def broken(value: Tensor, hook: ip.HookPoint) -> Tensor:
        return value @ value

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model.run_with_hooks(x, fwd_hooks=[("0", broken)])
    line = broken.__code__.co_firstlineno
    assert caught.value.__notes__ == [
        f"raised by hook 'broken' (test_errors.py, line {line}) at site '0'"
    ]


def test_an_error_in_a_gradient_hook_says_where(model: ip.Model, x: Tensor) -> None:
    def broken(grad: Tensor, hook: ip.HookPoint) -> None:
        raise LookupError("not here")

    output = model.run_with_hooks(x, bwd_hooks=[("0", broken)])
    with pytest.raises(LookupError, match="not here") as caught:
        output.sum().backward()
    assert "'broken'" in caught.value.__notes__[0]
    assert "at site '0'" in caught.value.__notes__[0]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.direct = nn.Linear(4, 4)
        self.weights = nn.Linear(4, 4)
        self.maybe = nn.Linear(4, 4)
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = nn.functional.linear(self.direct.forward(x), self.weights.weight)
        return self.cell(self.cell(x))


@pytest.mark.parametrize("site", ["direct", "weights", "maybe"])
def test_a_hook_that_never_fires_says_why(site: str, x: Tensor) -> None:
    said = text_of(ip.wrap(Odd()), x, torch.zeros_like, site, ip.NeverFired)
    assert said == (
        f"hook 'zeros_like' at '{site}' never fired: Linear was not called in 1 forward pass(es).\n"
        "  Its branch was not taken, or the model uses it without calling it "
        "(module.forward(x), module.weight).\n"
        "  Hook the module around it instead.   (what fires: model.scan(inputs); model.sites)"
    )


def test_other_ways_of_never_firing(x: Tensor) -> None:
    model = ip.wrap(Odd())
    said = text_of(model, x, torch.zeros_like, "cell#2", ip.NeverFired)
    assert said == (
        "hook 'zeros_like' at 'cell#2' never fired: Linear was called 2 times: #0 to #1."
    )
    with pytest.raises(ip.NeverFired) as caught, model.hooks([("cell", torch.zeros_like)]):
        pass
    assert str(caught.value) == (
        "hook 'zeros_like' at 'cell' never fired: the model was not called inside the with block."
    )
    with pytest.raises(ip.NeverFired, match="the cache at 'maybe' never fired"):
        model.run_with_cache(x, names_filter=["cell", "maybe"])
    # By pattern, it is enough that one of the sites fires.
    assert list(model.run_with_cache(x, names_filter="*")[1]) == ["cell#0", "cell#1"]
    with pytest.raises(ip.NeverFired, match="at 'maybe' never fired"):
        model.run_with_cache(x, names_filter="may*")


def test_a_place_that_holds_no_tensor_or_several(x: Tensor) -> None:
    model = ip.wrap(Odd())
    with pytest.raises(ip.SiteNotFound) as caught:
        model.run_with_cache(x, names_filter="input.mask")
    assert str(caught.value) == (
        "'input.mask' is not in what Odd gives: no element '.mask': the value has .x"
    )
    with pytest.raises(ip.SiteNotFound, match=r"'input.mask' holds no tensor: it is a NoneType"):
        model.run_with_cache(x, None, names_filter="input.mask")
    lstm = ip.wrap(nn.LSTM(4, 5))
    with pytest.raises(ip.AmbiguousSite) as ambiguous:
        lstm.run_with_cache(x, names_filter="output")
    assert str(ambiguous.value) == (
        "'output' holds 3 tensors; say which one: 'output[0]', 'output[1][0]', 'output[1][1]'."
    )
    with pytest.raises(ip.SiteNotFound, match=r"no element '\[7\]': the value has \[0\], \[1\]"):
        lstm.run_with_cache(x, names_filter="output[7]")


def test_values_without_meaning_outside_are_refused(x: Tensor) -> None:
    model = ip.wrap(nn.Sequential(nn.Linear(4, 2)))
    with (
        pytest.raises(ip.Unsupported, match=r"'0' was reached inside torch.func"),
        model.hooks([ip.zero("0")]),
    ):
        torch.func.vmap(model.module)(x)


def test_every_error_is_also_a_builtin_error() -> None:
    for error in (
        ip.SiteNotFound,
        ip.NothingMatched,
        ip.AmbiguousSite,
        ip.NeverFired,
        ip.EditError,
        ip.StaleValue,
        ip.GradientError,
        ip.Unsupported,
    ):
        assert issubclass(error, ip.InterposeError)
        assert any(base.__module__ == "builtins" for base in error.__mro__[2:-3]) or issubclass(
            error, (KeyError, RuntimeError, ValueError, TypeError)
        )
