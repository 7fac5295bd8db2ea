"""A part of a forward pass: the blocks from one layer to another, in the module's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.errors import EditShapeError, NeverFired, Unsupported
from interpose.models.discovery.anatomy import Endpoint, Tower
from interpose.models.reach.lenses import Swapped
from interpose.models.running import padding
from interpose.models.running.start import Here, Start, prove, stand_in_tokens
from interpose.sites.tree import Site
from interpose.taps import context, eager, values
from interpose.taps.tap import named_arguments

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


class Stopped(BaseException):
    """Ends a run before a block. Caught by the run that raised it, and by nothing that catches Exception."""

    def __init__(self, here: Here, residual: Tensor) -> None:
        self.here = here
        self.residual = residual


class Segment:
    """The blocks from one layer to another.

    Args:
        model: the model.
        first: the block to begin with; None for the whole beginning.
        end: the block before which to stop; None for the whole rest.
    """

    def __init__(self, model: Any, first: int | None, end: int | None) -> None:
        asked = "stop_at_layer" if first is None else "start_at_layer"
        self.model = model
        self.tower = _stack_of(model, asked)
        self.first = _layer_in(self.tower, first, "start_at_layer")
        self.end = _layer_in(self.tower, end, "stop_at_layer")
        self.stopped = False
        stream = model.tree.table.sites.get("blocks.0.hook_resid_pre")
        self.turned = stream is not None and isinstance(stream.lens, Swapped)
        """Whether the blocks have positions before texts, unlike what is given and returned here."""
        if self.first is not None and self.end is not None and self.end < self.first:
            raise ValueError(f"stop_at_layer={end} comes before start_at_layer={first}.")

    def run(self, call: Callable[..., Any], given: dict[str, Any], residual: Tensor | None) -> Any:
        """Call the module: its output, or the residual if it ended before."""
        if given.get("past_key_values") is not None:
            raise Unsupported("a part of a run would leave your past_key_values half filled.")
        with ExitStack() as stack:
            if self.first is not None and residual is not None:
                given = self._begin_with(self._turn(residual), given, stack)
            here = stack.enter_context(stopping(self.tower, self.end))
            try:
                output = call(**given)
            except Stopped as stop:
                if stop.here is not here:
                    raise
                self.stopped = True
                return self._turn(stop.residual)
        if self.end is not None:
            raise Unsupported(
                f"the run never came to block {self.end}, before which it was to stop."
            )
        return output

    def _turn(self, residual: Tensor) -> Tensor:
        """From the order of the sites to that of the blocks, or back."""
        return residual.transpose(0, 1) if self.turned and residual.ndim > 1 else residual

    def _begin_with(
        self, residual: Tensor, given: dict[str, Any], stack: ExitStack
    ) -> dict[str, Any]:
        model, first = self.model, self.first
        assert first is not None
        if (
            torch.is_grad_enabled()
            and model.training
            and getattr(model.root, "is_gradient_checkpointing", False)
        ):
            raise Unsupported(
                "start_at_layer under gradient checkpointing: the backward pass would recompute the block "
                "without the residual you gave. Call module.gradient_checkpointing_disable() first."
            )
        main = getattr(model.root, "main_input_name", "input_ids")
        with_tokens = not {main, "input_ids", "inputs_embeds"}.isdisjoint(given)
        proof = prove(model, self.tower, first, with_tokens=with_tokens)
        if not with_tokens:
            if residual.ndim <= max(proof.axes) + 1:
                raise EditShapeError(
                    f"the residual stream is [batch, pos, d_model]; got {tuple(residual.shape)}."
                )
            batch, length = (residual.shape[axis] for axis in proof.axes)
            given = {"input_ids": stand_in_tokens(model, batch, length), **given}
        if padding.accepts(model, "use_cache", outright=False):
            given = {"use_cache": False, **given}  # earlier layers would have nothing to keep
        self._refuse_hooks_before(first)
        stack.enter_context(Start(model, self.tower, first, residual, proof.shells))
        return given

    def _refuse_hooks_before(self, first: int) -> None:
        """Say why a hook of this run cannot fire, instead of that it did not."""
        early = {id(part) for block in self.tower.blocks[:first] for part in block.module.modules()}
        runs: list[Any] = [
            scope for scope in context.current().scopes if getattr(scope, "single_run", False)
        ]
        for binding in (b for run in runs if run.model is self.model for b in run.bindings):
            for listener in binding.listeners:
                site: Site = listener.site
                named = site.canonical.startswith("blocks.") and (site.layer or 0) < first
                named = named or site.kind in ("embed", "pos_embed") or id(site.module) in early
                if named and listener.outright and binding.hook.enabled:
                    raise NeverFired(
                        f"{binding.hook.label} at {site.name!r} cannot fire: with "
                        f"start_at_layer={first} nothing before block {first} is computed."
                    )


def _stack_of(model: TransformerModel, asked: str) -> Tower:
    """The blocks that layers are counted in: those whose sites are called ``blocks.0`` and so on."""
    towers: list[Tower] = model.anatomy.towers
    for tower in towers:
        if tower.prefix == "":
            return tower
    there = ", ".join(f"{tower.prefix}blocks" for tower in towers) or "no stack of blocks at all"
    raise Unsupported(
        f"{asked} counts the blocks of one stack; {model.tree.label} has {there}.\n  To stop early, name "
        "what you want: model.run_with_cache(..., names_filter=[...], stop=True)"
    )


def _layer_in(tower: Tower, layer: int | None, asked: str) -> int | None:
    """A layer counted from the front."""
    count = len(tower.blocks)
    if layer is None:
        return None
    if not -count <= layer <= count:
        raise IndexError(f"{asked}={layer}: this model has blocks 0 to {count - 1}.")
    return layer + count if layer < 0 else layer


@contextmanager
def stopping(tower: Tower, layer: int | None) -> Iterator[Here]:
    """A ``with`` block in which a run ends with `Stopped` before a block, after the hooks on its input.

    Layer ``n_layers`` means after the last block and the hooks on its output; None never stops.
    """
    here = Here()
    if layer is None:
        yield here
        return

    def stop(value: Any, endpoint: Endpoint) -> None:
        if here.is_now():
            for scope in context.current().scopes:
                scope.stopped = True  # type: ignore[attr-defined] # what the stop cuts off is nobody's error
            raise Stopped(here, values.element(value, endpoint.tail.leaf))

    def before(module: nn.Module, args: Any, *kwargs: Any) -> None:
        if kwargs:  # torch writes a hook and its with_kwargs flag in two steps
            stop(named_arguments(module, args, kwargs[0]), tower.blocks[layer].sites["resid_pre"])

    def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        stop(output, tower.blocks[-1].sites["resid_post"])

    if layer == len(tower.blocks):
        handle = tower.blocks[-1].module.register_forward_hook(after)
    else:
        module = tower.blocks[layer].module
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    eager.hold()
    try:
        yield here
    finally:
        eager.release()
        handle.remove()
