"""A run that begins at some block, with a given residual; and what a whole run passes there, for sweeps too.

The module's own forward runs, so masks, positions and everything around the blocks are its own. Before the
start, tokens that stand for nothing pass through the embedding, blocks hand their input on without running, and
no hook hears any of it. That this gives what the whole run gives is proven first, on a probe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.engine.model import Model
from interpose.errors import EditShapeError, Unsupported
from interpose.models.discovery.anatomy import Block, Endpoint, Tower
from interpose.models.discovery.inputs import probe_inputs
from interpose.models.knowledge import known
from interpose.models.running.trial import first_tensor, trial
from interpose.taps import bypass, context, eager, values
from interpose.taps.tap import given_arguments, named_arguments

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@dataclass(slots=True)
class Here:
    """The run under way: calls made in its thread, and not from inside a user's hook function."""

    thread: int = field(default_factory=threading.get_ident)
    scopes: Any = field(default_factory=lambda: context.current().scopes)
    standing_down: bool = field(default_factory=lambda: context.current().standing_down)

    def is_now(self) -> bool:
        """Whether a call made now belongs to it."""
        now = context.current()
        return (
            threading.get_ident() == self.thread
            and now.scopes == self.scopes
            and now.standing_down == self.standing_down
        )


class Start:
    """A run that begins at a block: a ``with`` block around one call of the model.

    Args:
        model: the model.
        tower: its blocks.
        layer: the block to begin with; ``n_layers`` means after the last.
        residual: the stream there.
        shells: what each block before it returns, without tensors.
    """

    def __init__(
        self, model: Model, tower: Tower, layer: int, residual: Tensor, shells: Sequence[Any]
    ) -> None:
        self.root = model.root
        self.tower = tower
        self.layer = layer
        self.residual = residual
        self.shells = shells
        self.here = Here()
        self.silence: Any = None
        self.begun = False
        self._stack = ExitStack()

    def __enter__(self) -> Start:
        with ExitStack() as stack:
            eager.hold()
            stack.callback(eager.release)
            self._pass_by(stack, self.root, _Silent(self))
            for block, shell in zip(self.tower.blocks[: self.layer], self.shells):
                self._pass_by(stack, block.module, HandOn(self.is_silent, block, shell))
            # First among all hooks: those of users see what the run begins with.
            last = self.tower.blocks[-1].module
            handle = (
                last.register_forward_hook(self._after_last)
                if self.layer == len(self.tower.blocks)
                else self.tower.blocks[self.layer].module.register_forward_pre_hook(
                    self._before, prepend=True, with_kwargs=True
                )
            )
            stack.callback(handle.remove)
            self._stack = stack.pop_all()
        return self

    @staticmethod
    def _pass_by(stack: ExitStack, module: nn.Module, bypasser: bypass.Bypasser) -> None:
        bypass.bypass(module, bypasser)
        stack.callback(bypass.unbypass, module, bypasser)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.close()
        if kind is None and not self.begun:
            raise Unsupported(f"the run never came to block {self.layer}, where it was to begin.")

    def is_silent(self) -> bool:
        """Whether the calls made here and now come before the start of this run."""
        return self.silence is not None and threading.get_ident() == self.here.thread

    def _begin(self, value: Any, endpoint: Endpoint, name: str) -> Any:
        context.stand_up(self.silence)
        self.silence, self.begun = None, True
        there: Tensor = values.element(value, endpoint.tail.leaf)
        if self.residual.shape != there.shape or not self.residual.is_floating_point():
            raise EditShapeError(
                f"start_at_layer={self.layer} was given {self.residual.dtype} of shape "
                f"{tuple(self.residual.shape)}; {name!r} is {there.dtype} of shape {tuple(there.shape)}."
            )
        made = values.settled(self.residual.to(there.device), there)
        return values.swap(value, endpoint.tail.leaf, made)

    def _before(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if not rest or not self.is_silent():
            return None
        endpoint = self.tower.blocks[self.layer].sites["resid_pre"]
        named = named_arguments(module, args, rest[0])
        made = self._begin(named, endpoint, f"blocks.{self.layer}.hook_resid_pre")
        return given_arguments(module, args, rest[0], made)

    def _after_last(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        if not self.is_silent():
            return None
        endpoint = self.tower.blocks[-1].sites["resid_post"]
        return self._begin(output, endpoint, f"blocks.{self.layer - 1}.hook_resid_post")


@dataclass(slots=True, eq=False)
class _Silent:
    """Around the root: hooks hear nothing until the start."""

    start: Start

    def is_wanted(self) -> bool:
        return self.start.here.is_now() and not self.start.begun

    def output(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        self.start.silence = context.stand_down()
        try:
            return forward(*args, **kwargs)
        finally:
            if self.start.silence is not None:
                context.stand_up(self.start.silence)
                self.start.silence = None


@dataclass(slots=True, eq=False)
class HandOn:
    """Around a block before the start: its input is its output.

    Attributes:
        is_wanted: whether a call made now is to be passed by.
        block: around which it stands.
        shell: what the block returns, without tensors.
    """

    is_wanted: Callable[[], bool]
    block: Block
    shell: Any

    def output(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        """The block's output: the stream that came."""
        named = named_arguments(self.block.module, args, kwargs)
        value = values.element(named, self.block.sites["resid_pre"].tail.leaf)
        return values.swap(self.shell, self.block.sites["resid_post"].tail.leaf, value)


# The proof.


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a trial says about starting at a layer; ``problem`` if it cannot be done."""

    shells: tuple[Any, ...] = ()
    """What each block before it returns, without tensors."""
    axes: tuple[int, int] = (0, 1)
    """Which axes of the residual are batch and position."""
    problem: str = ""


def prove(model: TransformerModel, tower: Tower, layer: int, *, with_tokens: bool) -> Proof:
    """Find out, once, whether later blocks need nothing but the residual; refuse if they do.

    Args:
        model: the model.
        tower: its blocks.
        layer: where a run is to begin.
        with_tokens: whether the tokens of the run are known, or others stand for them.
    """

    def find_out() -> Proof:
        with trial(model):
            return _try(model, tower, layer, with_tokens)

    found = known(model, ("start", layer, with_tokens), find_out)
    if found.problem:
        hint = "\n  It may work with the tokens of the run: give input_ids=... too."
        raise Unsupported(
            f"{model.tree.label} cannot start at block {layer} with the residual alone: "
            f"{found.problem}.{'' if with_tokens else hint}"
        )
    return found


def stand_in_tokens(model: Model, *shape: int) -> Tensor:
    """Tokens that mean nothing special, where a forward must have some."""
    token = int(probe_inputs(model.root)["input_ids"].flatten()[0])
    return torch.full(shape, token, dtype=torch.long, device=model.device)


def _try(model: Model, tower: Tower, layer: int, with_tokens: bool) -> Proof:
    inputs = probe_inputs(model.root)
    whole = Passed(tower, arguments=layer)
    with whole.listening():
        expected = first_tensor(model.module(**inputs))
    residual, shells = whole.streams[layer], [whole.shells.get(n) for n in range(layer)]
    axes = (0, 1)
    if not with_tokens:
        batch, length = inputs["input_ids"].shape
        inputs = {**inputs, "input_ids": stand_in_tokens(model, batch, length)}
        sizes = list(residual.shape[:-1])
        if batch not in sizes or length not in sizes:
            return Proof(problem=f"its residual has no axes for batch and position: {sizes}")
        axes = (sizes.index(batch), sizes.index(length))
    part = Passed(tower, arguments=layer)
    try:
        with part.listening(), Start(model, tower, layer, residual, shells):
            found = first_tensor(model.module(**inputs))
    except Exception as error:
        reason = _reason(whole.arguments, part.arguments, with_tokens)
        return Proof(problem=f"{reason} ({type(error).__name__}: {error})")
    size = expected.float().abs().max().clamp_min(1e-12)
    off = float((expected.float() - found.float()).abs().max() / size)
    if off > 16 * torch.finfo(expected.dtype).eps:
        return Proof(problem=_reason(whole.arguments, part.arguments, with_tokens))
    return Proof(shells=tuple(shells), axes=axes)


def _reason(whole: Mapping[str, Tensor], part: Mapping[str, Tensor], with_tokens: bool) -> str:
    others = {
        name.split(".")[0]: None
        for name, value in whole.items()
        if name not in part or value.shape != part[name].shape or not torch.equal(value, part[name])
    }
    if not others:
        return "later blocks read something that earlier ones leave behind"
    source = "on earlier blocks" if with_tokens else "on the tokens or on earlier blocks"
    depends = "depends" if len(others) == 1 else "depend"
    return f"blocks also take {', '.join(map(repr, others))}, which {depends} {source}"


def _nothing(tensor: Tensor) -> Any:  # noqa: ARG001
    return None


class Passed:
    """What passes at the blocks in one forward pass.

    Args:
        tower: the blocks.
        arguments: the block from which on what blocks are given besides the stream is kept; by default nowhere.

    Attributes:
        streams: what enters each block, as far as blocks ran; last what leaves the last, where arguments are kept.
        shells: what each block returns, without tensors.
        sizes: every size of an axis that blocks were given, the batch's left out.
        arguments: by path.
    """

    def __init__(self, tower: Tower, arguments: int | None = None) -> None:
        self.tower = tower
        self.start = arguments
        self.streams: dict[int, Tensor] = {}
        self.shells: dict[int, Any] = {}
        self.sizes: set[int] = set()
        self.arguments: dict[str, Tensor] = {}
        self.thread = threading.get_ident()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A ``with`` block around one forward pass."""
        with ExitStack() as stack:
            eager.hold()
            stack.callback(eager.release)
            for number, block in enumerate(self.tower.blocks):
                # First of all, as runs begin there: what torch's own hooks do comes after.
                handle = block.module.register_forward_pre_hook(
                    self._enters(number, block), prepend=True, with_kwargs=True
                )
                stack.callback(handle.remove)
                handle = block.module.register_forward_hook(self._leaves(number, block))
                stack.callback(handle.remove)
            yield

    def _enters(self, number: int, block: Block) -> Callable[..., None]:
        leaf = block.sites["resid_pre"].tail.leaf

        def enters(module: nn.Module, args: Any, *rest: Any) -> None:
            # torch writes a hook and its with_kwargs flag in two steps, and another thread may come between.
            if not rest or threading.get_ident() != self.thread:
                return
            named = named_arguments(module, args, rest[0])
            self.streams.setdefault(number, values.element(named, leaf).clone())
            for path, tensor in values.leaves(named):
                self.sizes.update(tensor.shape[1:])
                if path != leaf and self.start is not None and number >= self.start:
                    self.arguments.setdefault(".".join(map(str, path)), tensor.clone())

        return enters

    def _leaves(self, number: int, block: Block) -> Callable[..., None]:
        last = number == len(self.tower.blocks) - 1

        def leaves(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            if threading.get_ident() != self.thread:
                return
            self.shells[number] = values.mapped(output, _nothing)
            if last and self.start is not None:
                leaf = block.sites["resid_post"].tail.leaf
                self.streams.setdefault(number + 1, values.element(output, leaf).clone())

        return leaves
