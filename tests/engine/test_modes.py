"""Grad modes, autocast and low precision: the same values as without hooks, and edits that take effect."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import interpose as ip

MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_reads_and_edits_in_every_mode(net: nn.Sequential, mode: str, dtype: torch.dtype) -> None:
    if mode == "autocast" and dtype != torch.float32:
        dtype = torch.float32
    net, x = net.to(dtype), torch.randn(2, 4, dtype=dtype)
    model = ip.wrap(net)
    with MODES[mode]():
        bare = net(x)
        output, cache = model.run_with_cache(x)
        assert torch.equal(output, bare)
        assert output.dtype == bare.dtype
        assert torch.equal(cache["0"], net[0](x))
        identity = model.run_with_hooks(x, fwd_hooks=[("**", lambda value, hook: value.add_(0))])
        assert torch.equal(identity, bare)
        right = net[3](net[2](net[1](net[0](x) * 2)))
        assert not torch.equal(right, bare)
        for edit in (
            lambda v, hook: v * 2,
            lambda v, hook: v.mul_(2),
            lambda v, hook: v.float() * 2,
        ):
            assert torch.equal(model.run_with_hooks(x, fwd_hooks=[("0", edit)]), right)
    # What was captured in inference mode is an ordinary tensor outside.
    assert not cache["0"].is_inference()
    cache["0"].requires_grad_().sum().backward()


def test_under_autocast_a_site_has_the_dtype_it_really_has(net: nn.Sequential) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = ip.wrap(net).run_with_cache(
            torch.randn(2, 4), names_filter=["0.input", "0", "2"]
        )
    assert cache["0.input"].dtype == torch.float32
    assert cache["0"].dtype == torch.bfloat16


def test_an_edit_keeps_strides_so_that_kernels_stay_the_same() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split = nn.Identity()
            self.turn = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            part = self.split(x[:, ::2])
            turned = self.turn(part.transpose(0, 1))
            return turned.as_strided((2, 2), turned.stride())

    net, x = Strided(), torch.randn(4, 6)
    seen = []
    net.turn.register_forward_hook(lambda m, a, out: seen.append(out.stride()))
    net(x)
    ip.wrap(net).run_with_hooks(x, fwd_hooks=[("split", lambda v, hook: (v + 0).contiguous())])
    ip.wrap(net).run_with_hooks(x, fwd_hooks=[("turn", lambda v, hook: (v + 0).contiguous())])
    assert seen == [(2, 6)] * 3


def test_check_finite_finds_what_an_edit_broke_and_only_that(net: nn.Sequential) -> None:
    model, x = ip.wrap(net), torch.randn(2, 4)

    def broken(value: Tensor, hook: ip.HookPoint) -> Tensor:
        return value * torch.nan

    assert not model.run_with_hooks(x, fwd_hooks=[("0", broken)]).isfinite().all()
    with pytest.raises(
        ip.NonFinite, match=r"'broken' .* made NaN or Inf at '0'; the value it was given was finite"
    ):
        model.run_with_hooks(x, fwd_hooks=[("0", broken)], check_finite=True)
    x[0, 0] = torch.nan
    model.run_with_hooks(x, fwd_hooks=[("0", lambda value, hook: value * 2)], check_finite=True)
