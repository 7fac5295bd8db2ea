"""People's own modules with hook points in them; oracles are raw torch hooks and forwards written by hand."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens.hook_points import (
    HookedRootModule,
    HookPoint,
    LensHandle,
    NamesFilter,
)
from interpose.errors import EditShapeError, GradientError, NeverFired, NothingMatched, SiteNotFound
from tests.leftovers import hooks_on

MADE: list[weakref.ref[HookedRootModule]] = []


class MLP(HookedRootModule):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.hook_mid = nn.Linear(3, 5), HookPoint()
        self.l2, self.hook_out = nn.Linear(5, 3), HookPoint()
        self.hook_never = HookPoint()
        self.setup()
        MADE.append(weakref.ref(self))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.hook_out(self.l2(self.hook_mid(self.l1(x)))) * scale


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.hook_out = nn.Linear(3, 3), HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_out(x + torch.tanh(self.fc(x)))


class Stack(HookedRootModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Part() for _ in range(3)])
        self.hook_loss = HookPoint()
        self.setup()
        MADE.append(weakref.ref(self))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.hook_loss(x.square().sum())


@pytest.fixture(autouse=True)
def nothing_stays_on() -> Iterator[None]:
    """A model that a failing test keeps alive must not fail the next one."""
    yield
    for made in MADE:
        model = made()
        if model is not None:
            model.reset_hooks(including_permanent=True)
    MADE.clear()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 4, 3)


def double(value: Tensor, hook: HookPoint) -> Tensor:
    return value * 2


def nothing(value: Tensor, hook: HookPoint) -> None:
    return None


def by_hand(model: MLP, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The MLP with a change at hook_mid, by a raw torch hook."""
    handle = model.l1.register_forward_hook(lambda module, args, out: change(out))
    try:
        return model(x)
    finally:
        handle.remove()


def test_setup_names_every_module_and_finds_the_hook_points() -> None:
    model = Stack()
    names = [f"blocks.{i}.hook_out" for i in range(3)] + ["hook_loss"]
    assert list(model.hook_dict) == names
    assert list(model.mod_dict) == [name for name, _ in model.named_modules() if name]
    assert model.blocks[1].fc.name == "blocks.1.fc"
    assert list(model.hook_points()) == [model.mod_dict[name] for name in names]
    assert [point.name for point in model.hook_points()] == names
    assert model.blocks[2].hook_out.layer() == 2
    with pytest.raises(ValueError, match="'hook_loss' has no layer number in it"):
        model.hook_loss.layer()
    assert (model.is_caching, model.context_level) == (False, 0)


def test_a_hook_changes_what_comes_after_as_a_raw_hook_does(x: Tensor) -> None:
    model = MLP()
    expected = by_hand(model, x, lambda out: out * 2)
    assert not torch.equal(expected, model(x))

    def in_place(value: Tensor, hook: HookPoint) -> None:
        value.mul_(2)

    def both(value: Tensor, hook: HookPoint) -> Tensor:
        value *= 2
        return value

    for function in (double, in_place, both):
        assert torch.equal(model.run_with_hooks(x, fwd_hooks=[("hook_mid", function)]), expected)
    out = model.run_with_hooks(x, scale=3.0, fwd_hooks=[(lambda name: "mid" in name, double)])
    assert torch.equal(out, expected * 3)


def test_hooks_get_the_hook_point_by_keyword() -> None:
    model, x = Stack(), torch.randn(2, 3)
    seen: list[tuple[int, Any]] = []

    def with_head(value: Tensor, head: int, hook: HookPoint) -> None:
        seen.append((head, hook))

    def with_anything(value: Tensor, **given: Any) -> None:
        seen.append((0, given["hook"]))

    def wrapper(*args: Any, **kwargs: Any) -> None:
        with_head(*args, head=7, **kwargs)

    for function in (partial(with_head, head=3), with_anything, wrapper):
        model.run_with_hooks(x, fwd_hooks=[("blocks.1.hook_out", function)])
    assert [head for head, _ in seen] == [3, 0, 7]
    assert all(hook is model.blocks[1].hook_out for _, hook in seen)


def test_blocks_are_hooked_each_by_its_name() -> None:
    model, x = Stack(), torch.randn(2, 3)
    seen = []

    def zero_the_second(value: Tensor, hook: HookPoint) -> Tensor | None:
        seen.append(hook.layer())
        return torch.zeros_like(value) if hook.layer() == 1 else None

    out = model.run_with_hooks(x, fwd_hooks=[(lambda n: n.endswith("hook_out"), zero_the_second)])
    assert seen == [0, 1, 2]
    assert torch.equal(out, model.blocks[2](torch.zeros_like(x)).square().sum())


def test_hooks_nest_and_come_off_in_levels(x: Tensor) -> None:
    model = MLP()
    before = hooks_on(model)
    plain, twice = model(x), by_hand(model, x, lambda out: out * 2)
    four, eight = (by_hand(model, x, lambda out, by=by: out * by) for by in (4, 8))
    with model.hooks([("hook_mid", double)]) as inside:
        assert inside is model
        assert model.context_level == 1
        with model.hooks([("hook_mid", double)]):
            assert model.context_level == 2
            model.add_hook("hook_mid", double)
            assert [h.context_level for h in model.hook_mid.fwd_hooks] == [1, 2, 2]
            assert torch.equal(model(x), eight)
        assert torch.equal(model(x), twice)
        model.hook_mid.add_hook(double)
        assert torch.equal(model(x), four)
    assert model.context_level == 0
    assert torch.equal(model(x), plain)
    assert hooks_on(model) == before


def test_hooks_from_outside_a_block_stay(x: Tensor) -> None:
    model = MLP()
    model.add_hook("hook_mid", double)
    with model.hooks([("hook_mid", double)]):
        model.add_perma_hook("hook_mid", double)
        assert torch.equal(model(x), by_hand_under(model, x, 8))
    assert [h.is_permanent for h in model.hook_mid.fwd_hooks] == [False, True]
    assert torch.equal(model(x), by_hand_under(model, x, 4))
    model.reset_hooks()
    assert torch.equal(model(x), by_hand_under(model, x, 2))
    model.remove_all_hook_fns(including_permanent=True)
    assert not model.hook_mid.has_hooks()


def by_hand_under(model: MLP, x: Tensor, factor: float) -> Tensor:
    """What the forward gives with hook_mid scaled, without calling any hook point."""
    return model.l2(model.l1(x) * factor)


def test_hooks_are_gone_after_an_exception_in_a_hook_or_in_the_forward(x: Tensor) -> None:
    model = MLP()
    before = hooks_on(model)

    def fail(value: Tensor, hook: HookPoint) -> None:
        model.add_hook("hook_out", double)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        model.run_with_hooks(x, fwd_hooks=[("hook_mid", fail)])
    assert "hook 'fail'" in caught.value.__notes__[0]
    assert "'hook_mid'" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="shapes"):
        model.run_with_hooks(x[..., :2], fwd_hooks=[("hook_mid", double)])
    with pytest.raises(RuntimeError, match="shapes"):
        model.run_with_cache(x[..., :2])
    assert hooks_on(model) == before
    assert model.list_hooks() == {}
    assert model.context_level == 0


def test_nothing_is_put_on_when_one_name_is_wrong(x: Tensor) -> None:
    model = MLP()
    before = hooks_on(model)
    with pytest.raises(SiteNotFound) as missing:
        model.run_with_hooks(x, fwd_hooks=[("hook_mid", double), ("hook_mit", double)])
    assert str(missing.value) == (
        "no hook point 'hook_mit' in MLP.\n"
        "  there are: hook_mid, hook_out, hook_never   (list them: model.hook_dict)\n"
        "  did you mean 'hook_mid'?"
    )
    with pytest.raises(NothingMatched, match=r"the filter '<lambda>' matches no hook point in MLP"):
        model.add_hook(lambda name: False, double)
    with pytest.raises(SiteNotFound):
        model.run_with_cache(x, names_filter=["hook_mid", "nope"])
    with pytest.raises(TypeError, match="'l1' is a Linear, not a HookPoint"):
        model.add_hook("l1", double)
    with pytest.raises(ValueError, match="dir is 'fwd' or 'bwd'"):
        model.add_hook("hook_mid", double, dir="forward")  # type: ignore[arg-type]
    assert hooks_on(model) == before


def test_a_wrong_shape_and_a_hook_that_never_runs_raise(x: Tensor) -> None:
    model = MLP()
    with pytest.raises(EditShapeError, match="'hook_mid'"):
        model.run_with_hooks(x, fwd_hooks=[("hook_mid", lambda value, hook: value[:1])])
    model.hook_mid.add_hook(lambda value, hook: value[:1])
    with pytest.raises(EditShapeError, match="'hook_mid'"):
        model(x)
    model.reset_hooks()
    with pytest.raises(NeverFired, match="'hook_never' never fired"):
        model.run_with_hooks(x, fwd_hooks=[("hook_never", double)])
    model.run_with_hooks(x, fwd_hooks=[(lambda name: True, double)])  # one of them ran
    with pytest.raises(NeverFired), model.hooks([(lambda name: True, double)]):
        pass


def test_prepended_hooks_run_first(x: Tensor) -> None:
    model = MLP()
    model.add_hook("hook_mid", lambda value, hook: value + 1)
    model.add_hook("hook_mid", double, prepend=True)
    assert torch.equal(model(x), model.l2(model.l1(x) * 2 + 1))
    assert model.hook_mid.fwd_hooks[0].user_hook is double
    model.reset_hooks()
    assert torch.equal(model(x), by_hand_under(model, x, 1))


def test_hooks_are_removed_by_level_direction_and_handle(x: Tensor) -> None:
    model = MLP()
    point = model.hook_mid
    first = point.add_hook(double, level=5)
    assert isinstance(first, LensHandle)
    assert first.context_level == 5
    second = point.add_hook(lambda grad, hook: grad, dir="bwd")
    point.add_perma_hook(double)
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (2, 1)
    assert point.has_hooks(level=5)
    assert not point.has_hooks(level=4)
    assert not point.has_hooks("fwd", including_permanent=False, level=4)
    point.remove_hooks("both", level=5)
    assert point.bwd_hooks == [second]
    assert repr(point) == "HookPoint('hook_mid', 1 fwd, 1 bwd)"
    point.add_hook(double)
    point.remove_hooks()
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (1, 1)
    second.hook.remove()
    second.hook.remove()
    assert point.bwd_hooks == []
    point.remove_hooks(including_permanent=True)
    assert repr(point) == "HookPoint('hook_mid')"
    assert torch.equal(model(x), by_hand_under(model, x, 1))


def test_reset_hooks_also_takes_off_those_of_the_block_around_it(x: Tensor) -> None:
    model = MLP()
    with model.hooks([("hook_mid", double)]):
        assert set(model.list_hooks()) == {"hook_mid"}
        model.reset_hooks()
        assert model.list_hooks() == {}
        assert torch.equal(model(x), by_hand_under(model, x, 1))


def test_hooks_can_be_left_on_the_model(x: Tensor) -> None:
    model = MLP()
    model.run_with_hooks(x, fwd_hooks=[("hook_mid", double)], reset_hooks_end=False)
    assert torch.equal(model(x), by_hand_under(model, x, 2))
    assert model.list_hooks(dir="bwd") == {}
    with model.hooks():  # of the same level: ends them
        assert torch.equal(model(x), by_hand_under(model, x, 2))
    assert model.list_hooks() == {}


def test_list_hooks_says_what_is_on() -> None:
    model = MLP()
    model.add_hook("hook_mid", double)
    model.add_perma_hook("hook_out", nothing, dir="bwd")
    assert list(model.list_hooks()) == ["hook_mid", "hook_out"]
    assert list(model.list_hooks(including_permanent=False)) == ["hook_mid"]
    assert list(model.list_hooks(dir="bwd")) == ["hook_out"]
    assert model.list_hooks("hook_mid")["hook_mid"][0].user_hook is double
    assert model.list_hooks(["hook_never"]) == {}


def test_scratch_space_is_kept_until_it_is_cleared(x: Tensor) -> None:
    model = MLP()

    def keep(value: Tensor, hook: HookPoint) -> None:
        hook.ctx["norm"] = value.norm()

    with model.hooks([("hook_mid", keep)]):
        model(x)
    assert torch.equal(model.hook_mid.ctx["norm"], model.l1(x).norm())
    model.run_with_cache(x)
    assert model.hook_mid.ctx
    model.run_with_hooks(x, fwd_hooks=[("hook_mid", keep)], clear_contexts=True)
    assert model.hook_mid.ctx == {}
    model.hook_mid.ctx["a"] = 1
    model.reset_hooks(clear_contexts=False)
    assert model.hook_mid.ctx
    model.reset_hooks()
    assert model.hook_mid.ctx == {}


@pytest.mark.parametrize("as_tuple", [False, True])
def test_backward_hooks_scale_gradients(x: Tensor, as_tuple: bool) -> None:
    model = MLP()
    x.requires_grad_()
    (plain,) = torch.autograd.grad(model(x).sum(), x)

    def triple(grad: Tensor, hook: HookPoint) -> Any:
        assert hook is model.hook_mid
        return (grad * 3,) if as_tuple else grad * 3

    out = model.run_with_hooks(x, bwd_hooks=[("hook_mid", triple)])
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], plain * 3)
    with model.hooks(bwd_hooks=[("hook_mid", triple)]):
        out = model(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], plain * 3)
    model.add_hook("hook_mid", triple, "bwd")
    out = model(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], plain * 3)
    model.reset_hooks()
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], plain)


def test_a_cache_has_every_hook_point_that_was_reached(x: Tensor) -> None:
    model = MLP()
    out, cache = model.run_with_cache(x)
    assert type(cache) is dict
    assert list(cache) == ["hook_mid", "hook_out"]
    assert torch.equal(cache["hook_mid"], model.l1(x))
    assert torch.equal(cache["hook_out"], out)
    assert not cache["hook_mid"].requires_grad
    filters: list[NamesFilter] = ["hook_mid", ["hook_mid"], ("hook_mid",), lambda n: "mid" in n]
    for wanted in filters:
        assert list(model.run_with_cache(x, names_filter=wanted)[1]) == ["hook_mid"]
    assert model.run_with_cache(x, names_filter=[])[1] == {}
    with pytest.raises(NeverFired):
        model.run_with_cache(x, names_filter="hook_never")
    assert model.run_with_cache(x, device="meta")[1]["hook_mid"].is_meta


def test_a_cache_shows_edited_values_and_is_not_changed_later(x: Tensor) -> None:
    class InPlace(MLP):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.hook_mid(self.l1(x)).mul_(0)

    model = InPlace()
    with torch.no_grad(), model.hooks([("hook_mid", double)]):
        out, cache = model.run_with_cache(x)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(cache["hook_mid"], model.l1(x) * 2)

    kept: dict[str, Tensor] = {}
    _, fwd, bwd = MLP.get_caching_hooks(model, cache=kept)  # type: ignore[arg-type]
    with torch.no_grad(), model.hooks([*fwd, ("hook_mid", lambda value, hook: value.zero_())]):
        model(x)
    assert bwd == []
    assert torch.equal(kept["hook_mid"], model.l1(x))


def test_gradients_are_cached_and_parameters_keep_theirs() -> None:
    model, x = Stack(), torch.randn(2, 3)
    _, cache = model.run_with_cache(x, incl_bwd=True)
    names = [f"blocks.{i}.hook_out" for i in range(3)] + ["hook_loss"]
    assert set(cache) == {*names, *(name + "_grad" for name in names)}
    assert all(parameter.grad is None for parameter in model.parameters())
    values = [cache["blocks.0.hook_out"].clone().requires_grad_()]
    values += [model.blocks[1](values[0])]
    values += [model.blocks[2](values[1])]
    expected = torch.autograd.grad(values[2].square().sum(), values)
    for index, grad in enumerate(expected):
        torch.testing.assert_close(cache[f"blocks.{index}.hook_out_grad"], grad)
    assert torch.equal(cache["hook_loss_grad"], torch.ones(()))
    with pytest.raises(GradientError, match="gradients need one number"):
        MLP().run_with_cache(x, incl_bwd=True)
    _, cache = MLP().run_with_cache(x, incl_bwd=lambda out: out.sum())
    assert torch.equal(cache["hook_out_grad"], torch.ones(2, 3))


def test_batch_and_positions_are_cut_where_transformer_lens_has_them(x: Tensor) -> None:
    model = MLP()
    whole = model.run_with_cache(x)[1]["hook_mid"]
    cases: list[tuple[Any, Tensor]] = [
        (1, whole[:, [1]]),
        (-1, whole[:, [-1]]),
        ([0, 2], whole[:, [0, 2]]),
        (slice(1, 3), whole[:, 1:3]),
        ((1, 3), whole[:, 1:3]),
        (torch.tensor([0, 1]), whole[:, :2]),
    ]
    for pos_slice, expected in cases:
        got = model.run_with_cache(x, pos_slice=pos_slice)[1]["hook_mid"]
        assert torch.equal(got, expected)
        assert got.untyped_storage().nbytes() == got.numel() * got.element_size()
    kept, fwd, _ = model.get_caching_hooks(pos_slice=(1, 3))
    model.run_with_hooks(x, fwd_hooks=fwd)
    assert torch.equal(kept["hook_mid"], whole[:, 1:3])
    assert kept["hook_mid"].untyped_storage().nbytes() == 2 * 2 * 5 * 4
    _, cache = model.run_with_cache(x[:1], remove_batch_dim=True, pos_slice=1)
    assert torch.equal(cache["hook_mid"], model.l1(x[:1])[0, [1]])
    with pytest.raises(ValueError, match="remove_batch_dim needs a batch of one"):
        model.run_with_cache(x, remove_batch_dim=True)
    model.hook_mid.pos_dim = 0
    assert torch.equal(model.run_with_cache(x, pos_slice=1)[1]["hook_mid"], whole[[1]])


def test_positions_of_heads_are_the_axis_before_the_heads() -> None:
    class Heads(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook_z, self.hook_pattern = HookPoint(), HookPoint()
            self.setup()

        def forward(self, z: Tensor, pattern: Tensor) -> Tensor:
            return self.hook_z(z).sum() + self.hook_pattern(pattern).sum()

    z, pattern = torch.randn(2, 5, 3, 4), torch.randn(2, 3, 5, 5)
    _, cache = Heads().run_with_cache(z, pattern, pos_slice=2, incl_bwd=True)
    assert torch.equal(cache["hook_z"], z[:, [2]])
    assert torch.equal(cache["hook_pattern"], pattern[:, :, [2]])
    assert cache["hook_z_grad"].shape == (2, 1, 3, 4)
    assert cache["hook_pattern_grad"].shape == (2, 3, 1, 5)


def test_caching_hooks_fill_a_cache_at_every_run() -> None:
    model = Stack()
    mine: dict[str, Tensor] = {}
    cache = model.add_caching_hooks(lambda n: n.endswith("0.hook_out"), True, cache=mine)
    assert cache is mine
    assert model.is_caching
    for x in torch.randn(2, 2, 3):
        model(x).backward()
        assert list(mine) == ["blocks.0.hook_out", "blocks.0.hook_out_grad"]
        assert torch.equal(mine["blocks.0.hook_out"], model.blocks[0](x))
    model.reset_hooks()
    assert not model.is_caching
    model.cache_all(everything := {})
    model.cache_some(some := {}, lambda name: "loss" in name)
    model(torch.randn(2, 3))
    assert (len(everything), list(some)) == (4, ["hook_loss"])


def test_a_cache_whose_hooks_stay_follows_later_runs(x: Tensor) -> None:
    model = MLP()
    _, cache = model.run_with_cache(x, names_filter="hook_mid", reset_hooks_end=False)
    model(x + 1)
    assert torch.equal(cache["hook_mid"], model.l1(x + 1))
    model.reset_hooks()
    model(x)
    assert torch.equal(cache["hook_mid"], model.l1(x + 1))


def test_a_hook_point_that_is_called_twice_is_kept_as_of_its_last_call(x: Tensor) -> None:
    class Twice(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook = HookPoint()
            self.setup()

        def forward(self, x: Tensor) -> Tensor:
            return (self.hook(self.hook(x) * 3) * 5).sum()

    _, cache = Twice().run_with_cache(x, incl_bwd=True)
    assert list(cache) == ["hook", "hook_grad"]
    assert torch.equal(cache["hook"], x * 3)
    assert torch.equal(cache["hook_grad"], torch.full_like(x, 5))


def test_a_model_can_refuse_hooks_everywhere(x: Tensor) -> None:
    class Strict(MLP):
        def check_hooks_to_add(
            self, hook_point: HookPoint, hook_point_name: str, hook: Any, *rest: Any, **more: Any
        ) -> None:
            if hook_point_name == "hook_out":
                raise PermissionError(hook_point_name)

    model = Strict()
    before = hooks_on(model)
    with pytest.raises(PermissionError):
        model.add_hook("hook_out", double)
    with pytest.raises(PermissionError):
        model.run_with_hooks(x, fwd_hooks=[("hook_mid", double), ("hook_out", double)])
    assert hooks_on(model) == before
    model.check_and_add_hook(model.hook_mid, "hook_mid", double)
    assert torch.equal(model(x), by_hand_under(model, x, 2))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_whole_and_have_no_hooks(x: Tensor, copied: Any) -> None:
    model = MLP()
    model.hook_mid.ctx["a"] = 1
    with model.hooks([("hook_mid", double)]):
        other = copied(model)
        model(x)
    assert other.list_hooks() == {}
    assert other.hook_mid.ctx == {"a": 1}
    assert other.hook_dict["hook_mid"] is other.hook_mid is not model.hook_mid
    assert torch.equal(other(x), model(x))
    with other.hooks([("hook_mid", double)]):
        assert torch.equal(other(x), by_hand_under(model, x, 2))
        assert torch.equal(model(x), by_hand_under(model, x, 1))
    other.hook_mid.add_hook(double)
    assert other.hook_mid.fwd_hooks
    assert not model.hook_mid.fwd_hooks
    other.reset_hooks()


def test_nothing_is_added_to_the_state_and_moving_works(x: Tensor) -> None:
    model = MLP()
    assert set(model.state_dict()) == {"l1.weight", "l1.bias", "l2.weight", "l2.bias"}
    assert [name for name, _ in model.named_children()] == [
        "l1", "hook_mid", "l2", "hook_out", "hook_never",
    ]  # fmt: skip
    model.add_hook("hook_mid", double)
    assert model.to(torch.float64) is model
    out, cache = model.run_with_cache(x.double())
    assert cache["hook_mid"].dtype == torch.float64
    assert torch.equal(out, by_hand_under(model, x.double(), 2))


def test_training_goes_on_as_without_hooks(x: Tensor) -> None:
    hooked, plain = MLP(), MLP()
    plain.load_state_dict(hooked.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (hooked, plain)]
    before = plain.l1.weight.clone()
    for _ in range(3):
        for model, optimizer in zip((hooked, plain), optimizers):
            optimizer.zero_grad()
            with model.hooks([("hook_mid", nothing)] if model is hooked else []):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        hooked.run_with_cache(x, incl_bwd=lambda out: out.sum())
    assert not torch.equal(before, plain.l1.weight)
    for one, other in zip(hooked.parameters(), plain.parameters()):
        assert torch.equal(one, other)


def test_threads_do_not_see_each_others_blocks(x: Tensor) -> None:
    model = MLP()
    expected = [by_hand_under(model, x, factor) for factor in (1, 2, 3)]
    inside, done = threading.Barrier(3), threading.Barrier(3)
    got: dict[int, tuple[Any, ...]] = {}

    def run(factor: int) -> None:
        pairs = [("hook_mid", lambda value, hook: value * factor)] if factor > 1 else []
        with model.hooks(pairs):
            inside.wait(20)
            got[factor] = model(x), len(model.hook_mid.fwd_hooks), model.context_level
            model.reset_hooks()
            done.wait(20)

    threads = [threading.Thread(target=run, args=(factor,)) for factor in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for factor in (1, 2, 3):
        out, count, level = got[factor]
        assert torch.equal(out, expected[factor - 1])
        assert (count, level) == (factor > 1, 1)


def test_a_hook_point_works_alone_and_before_setup(x: Tensor) -> None:
    point = HookPoint()
    assert repr(point) == "HookPoint()"
    with pytest.raises(ValueError, match="has no name yet"):
        point.layer()
    point.add_hook(double)
    seen: list[Tensor] = []
    point.add_hook(lambda grad, hook: seen.append(grad), dir="bwd")
    x.requires_grad_()
    point(x).sum().backward()
    assert torch.equal(seen[0], torch.ones_like(x))
    assert torch.equal(x.grad, torch.full_like(x, 2))
    point.add_hook(lambda value, hook: value[0])
    with pytest.raises(EditShapeError):
        point(x)
    point.remove_hooks("both")
    assert point(x) is x

    class Root(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook = HookPoint()
            self.hook.add_hook(double)

        def forward(self, x: Tensor) -> Tensor:
            return self.hook(x)

    root = Root()
    with pytest.raises(RuntimeError, match=r"call self.setup\(\) at the end of its __init__"):
        root.run_with_hooks(x, fwd_hooks=[("hook", double)])
    root.setup()
    assert torch.equal(root.run_with_hooks(x, fwd_hooks=[("hook", double)]), x * 4)
    root.reset_hooks()
    assert torch.equal(root(x), x)


def test_aliases_and_conversions_change_what_a_hook_sees(x: Tensor) -> None:
    class Split:
        def convert(self, value: Tensor) -> Tensor:
            return value.unflatten(-1, (1, 3)).clone()

        def revert(self, value: Tensor) -> Tensor:
            return value.flatten(-2)

    point, names = HookPoint(), []
    point.name = "blocks.3.hook"
    point.enable_reshape(Split())

    def look(value: Tensor, hook: Any) -> None:
        names.append((hook.name, hook.layer(), hook.ctx is point.ctx, tuple(value.shape)))
        value[..., 0] = 0

    point.add_hook(look, alias_names=["a.1", "b.2"])
    out = point(x)
    assert names == [("a.1", 1, True, (2, 4, 1, 3)), ("b.2", 2, True, (2, 4, 1, 3))]
    expected = x.clone()
    expected[..., 0] = 0
    assert torch.equal(out, expected)
    point.remove_hooks()


def test_a_root_inside_a_root_works_by_its_own_names(x: Tensor) -> None:
    class Outer(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()
            self.setup()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    outer = Outer()
    expected = by_hand_under(outer.inner, x, 2)
    hooked = [("inner.hook_mid", double)]
    assert torch.equal(outer.run_with_hooks(x, fwd_hooks=hooked), expected)
    assert torch.equal(outer.inner.run_with_hooks(x, fwd_hooks=[("hook_mid", double)]), expected)
    assert list(outer.inner.run_with_cache(x)[1]) == ["hook_mid", "hook_out"]
    with outer.inner.hooks():
        outer.inner.add_hook("hook_mid", double)
        assert torch.equal(outer(x), expected)
    assert outer.list_hooks() == {}


def test_a_model_with_hooks_on_it_can_be_collected() -> None:
    model = MLP()
    model.add_hook("hook_mid", double)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
