"""Weights refuse to be written to, and are ordinary tensors otherwise."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpose.errors import EditError
from interpose.models.weights.readonly import ReadOnly
from tests.models.wired import wired

WRITES: dict[str, Callable[[Any], Any]] = {
    "setitem": lambda w: w.__setitem__(0, 1.0),
    "zero_": lambda w: w.zero_(),
    "+=": lambda w: operator.iadd(w, 1),
    "/=": lambda w: operator.itruediv(w, 2),
    "**=": lambda w: operator.ipow(w, 2),
    "slice +=": lambda w: operator.iadd(w[0], 1),
    "copy_": lambda w: w.copy_(torch.zeros_like(w)),
    "out": lambda w: torch.add(w, 1, out=w),
    "relu_": torch.relu_,
    "inplace": lambda w: nn.functional.relu(w, inplace=True),
    "module": lambda w: nn.ReLU(inplace=True)(w),
    "init": nn.init.normal_,
    "data": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "data slice": lambda w: w.data.zero_(),
    "slice": lambda w: w[0].zero_(),
    "transpose": lambda w: w.mT.zero_(),
    "reshape": lambda w: w.unsqueeze(0).squeeze(0).zero_(),
    "detach": lambda w: w.detach().fill_(0),
    "unbind": lambda w: w.unbind(0)[0].zero_(),
    "split": lambda w: w.split(1)[0].zero_(),
    "iterate": lambda w: next(iter(w)).zero_(),
    "no-op to": lambda w: w.to(w.dtype).zero_(),
    "foreach": lambda w: torch._foreach_mul_([w], 0.0),
    "fill_diagonal_": lambda w: w[0].fill_diagonal_(0),
    "optimiser": lambda w: _step(w),
}


def _step(weight: Tensor) -> None:
    weight.requires_grad_()
    weight.sum().backward()
    torch.optim.SGD([weight], lr=1.0).step()


@pytest.mark.parametrize("write", WRITES)
def test_writing_is_refused(write: str) -> None:
    model = wired("gpt2")
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    with pytest.raises(EditError, match="read-only"):
        WRITES[write](model.blocks[0].attn.W_Q)
    assert all(torch.equal(state[name], now) for name, now in model.module.state_dict().items())


def test_the_error_says_what_to_write_instead() -> None:
    model = wired("gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(EditError) as caught:
        model.blocks[0].attn.W_Q[0] = 0
    assert str(caught.value) == (
        f"this is a read-only view of {name!r}. To change a copy: .clone() it first.\n"
        f"  To change the model: with torch.no_grad(): model.module.get_parameter({name!r}).copy_(...)"
    )
    with pytest.raises(EditError) as caught:
        model.W_Q[0] = 0
    assert str(caught.value) == (
        f"this is a read-only copy of {name!r} and 1 more, one for each layer. To change a copy: "
        ".clone() it first.\n  To change the model: with torch.no_grad(): "
        f"model.module.get_parameter({name!r}).copy_(...)"
    )
    with pytest.raises(EditError) as caught:
        wired("llama").b_Q[0] = 0
    assert str(caught.value) == (
        "these zeros stand for a bias that the model does not have; nothing reads them. To change a "
        "copy: .clone() it first."
    )


def test_what_the_error_says_works() -> None:
    model = wired("gpt2")
    with torch.no_grad():
        model.module.get_parameter("transformer.h.0.attn.c_attn.weight").copy_(torch.ones(32, 96))
    assert torch.equal(model.blocks[0].attn.W_Q, torch.ones(4, 32, 8))
    mine = model.blocks[0].attn.W_Q.clone()
    mine[0] = 0
    assert type(mine) is Tensor


def test_views_stay_read_only_and_results_are_plain() -> None:
    weight = wired("gpt2").blocks[0].attn.W_Q
    x = torch.randn(3, 32)
    for view in (
        weight[0],
        weight.mT,
        weight[0].T,
        weight.unsqueeze(0),
        weight[:, ::2],
        weight.to("cpu"),
    ):
        assert type(view) is ReadOnly
        assert view.sources == weight.sources
    plain = (
        weight + 1, x @ weight[0], torch.einsum("pm,hmd->phd", x, weight), weight.flatten(),
        weight.clone(), weight.double(), weight.to(torch.float16), weight.sum(), weight.norm(dim=1),
        torch.stack([weight, weight]), torch.linalg.svd(weight).S, weight.max(0).values, -weight,
        weight[[0, 1]], torch.where(weight > 0, weight, 0.0), x.new_zeros(4, 32, 8).copy_(weight),
    )  # fmt: skip
    assert all(type(result) is Tensor for result in plain)
    assert {type(part) for part in weight} == {ReadOnly}
    assert weight.shape == (4, 32, 8)
    assert "ReadOnly" in repr(weight)


def test_gradients_flow_through_expressions_with_weights() -> None:
    weight = wired("gpt2").blocks[0].attn.W_Q
    x = torch.randn(3, 32, requires_grad=True)
    torch.einsum("pm,hmd->phd", x, weight).square().sum().backward()
    plain = weight.clone()
    expected = 2 * torch.einsum(
        "phd,hmd->pm", torch.einsum("pm,hmd->phd", x.detach(), plain), plain
    )
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    assert not weight.requires_grad
    leaf = weight.requires_grad_()
    (leaf[1] * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[1].sum() == 2 * 32 * 8


def test_torch_func_and_mixed_arguments_work() -> None:
    weight = wired("gpt2").blocks[0].attn.W_Q
    x = torch.randn(3, 32)
    found = torch.vmap(lambda w: x @ w)(weight)
    torch.testing.assert_close(found, torch.einsum("pm,hmd->hpd", x, weight))
    assert x.add_(weight[0, :, 0]) is x  # another tensor may be written to


def test_numpy_sees_the_numbers_and_cannot_write_either() -> None:
    weight = wired("gpt2").blocks[0].attn.W_Q
    array = weight.numpy()
    assert array.shape == (4, 32, 8)
    assert array[0, 0, 0] == weight[0, 0, 0].item()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0


def test_copies_and_saved_weights_are_plain_and_small() -> None:
    weight = wired("gpt2").blocks[0].attn.W_Q
    copied = copy.deepcopy(weight)
    loaded = pickle.loads(pickle.dumps(weight))
    file = io.BytesIO()
    torch.save({"W_Q": weight}, file)
    size = file.tell()
    file.seek(0)
    saved = torch.load(file, weights_only=True)["W_Q"]
    for value in (copied, loaded, saved):
        assert type(value) is Tensor
        assert torch.equal(value, weight)
        value.zero_()
    assert weight.abs().max() > 0.05
    assert size < 4 * 32 * 96 * 4  # not the whole fused matrix
