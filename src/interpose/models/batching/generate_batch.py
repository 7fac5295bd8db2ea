"""`generate_batch`: many texts at once by transformers' continuous batching, with hooks and captured rows."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.engine.hooks import all_hooks
from interpose.engine.standing_hooks import HookItem
from interpose.errors import Unsupported
from interpose.models.batching.labelled_rows import BatchResult
from interpose.models.batching.loop import (
    Loop,
    left_as_it_was,
    prove,
    random_state_kept,
    without_shortcuts,
)
from interpose.models.batching.packed_run import PackedRun
from interpose.models.running.rows import read, tokens_of
from interpose.sites.tree import Filter

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

Prompts = Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor]

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_GUARD = threading.Lock()


def generate_batch(
    model: TransformerModel,
    inputs: Prompts,
    *,
    names_filter: Filter = None,
    hooks: Iterable[HookItem] = (),
    fwd_hooks: Iterable[tuple[Any, Any]] = (),
    per_request: bool = False,
    prepend_bos: bool | None = None,
    max_new_tokens: int | None = None,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> BatchResult:
    """Generate many texts at once: requests join and leave a batch of packed tokens as they come and end.

    ```python
    result = generate_batch(model, ["The cat", "One two"], names_filter="blocks.*.hook_resid_post")
    result.text[1], result.sequence("blocks.0.hook_resid_post", 1)
    ```

    Hooks given here and hooks of any scope around see packed values, [1, row, ...], where
    `packed_rows` says whose each row is; edits that mean positions (``pos``, ``phase``) work as in
    `generate` if they are given here. CUDA graphs, compilation and shared prefixes are off while
    anything listens. Other threads may use the model meanwhile, unless its attention is ``eager`` (or
    transformers older than 5.22): then its config names a paged kernel until the end.

    Args:
        model: a decoder; whether its packed texts come out right is tried first, once per model.
        inputs: texts, tokens (a tensor or lists), or what a tokenizer returns; padding is taken off.
        names_filter: sites to capture; every row is kept with its request, position and token.
        hooks: as in `Model.hooks`, for this call; so ``fwd_hooks``.
        fwd_hooks: pairs (site, function).
        per_request: call the hooks given here once per request, with its rows alone, as `generate` would.
        prepend_bos: as in `to_tokens`.
        max_new_tokens: by default what the generation config says, or 20.
        generation_config: by default the model's own.
        continuous_batching_config: transformers' settings; ``use_async_batching`` is always off.
        device: where captured rows go; by default they stay where they are.
        **options: fields of either config: ``do_sample=True``, ``max_batch_tokens=256``.
    """
    root: Any = model.root
    _refuse(root)
    prompts = _prompts(model, inputs, prepend_bos)
    generation = _generation_config(root, generation_config, options)
    if max_new_tokens is None:
        max_new_tokens = generation.max_new_tokens or 20
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is at least 1; got {max_new_tokens}.")
    config = _batching_config(continuous_batching_config, options)
    given = all_hooks(hooks, fwd_hooks, ())
    run = PackedRun(model, names_filter, given, per_request=per_request, device=device)
    with ExitStack() as stack:
        with _GUARD:
            lock = _LOCKS.setdefault(root, threading.RLock())
        # One call at a time on one model: transformers switches the attention kernel in its config.
        stack.enter_context(lock)
        prove(model, config, prompts)
        stack.enter_context(left_as_it_was(root))
        if run.bindings or any(m._forward_hooks or m._forward_pre_hooks for m in root.modules()):
            without_shortcuts(config)
            stack.enter_context(run)
        if config.seed is not None:
            stack.enter_context(random_state_kept())
        loop = Loop(root, generation, config, prompts, max_new_tokens)
        stack.callback(loop.close)
        loop.run()
        outputs = loop.outputs()
    generated = {number: list(output.generated_tokens) for number, output in outputs.items()}
    cache, labels, axes = run.cache(prompts, generated)
    return BatchResult(
        prompts=prompts,
        generated=generated,
        text=_texts(model, prompts, generated),
        logprobs={n: list(output.logprobs) for n, output in outputs.items() if output.logprobs},
        forwards=loop.forwards,
        cache=cache,
        labels=labels,
        axes=axes,
    )


# What goes in.


def _refuse(root: Any) -> None:
    kind = type(root).__name__
    if not hasattr(root, "init_continuous_batching") or getattr(
        root.config, "is_encoder_decoder", False
    ):
        raise Unsupported(
            f"transformers has no continuous batching for {kind}: it needs a decoder with "
            "generate(). Use model.generate(texts)."
        )
    if getattr(root, "_cached_continuous_batching_manager", None) is not None:
        raise Unsupported(
            f"this {kind} keeps a batching manager with settings of its own (persistent_manager=True). "
            "Call model.module.destroy_cached_continuous_batching_manager() first."
        )


def _prompts(
    model: TransformerModel, inputs: Prompts, prepend_bos: bool | None
) -> dict[int, list[int]]:
    rows = read(model, inputs, prepend_bos, truncate=True)
    if not rows:
        raise ValueError("there is no text to go on from: give at least one.")
    return {number: tokens_of(row).tolist() for number, row in enumerate(rows)}


def _texts(
    model: TransformerModel, prompts: dict[int, list[int]], generated: dict[int, list[int]]
) -> dict[int, str] | None:
    if model._tokenizer_or_none() is None:
        return None
    return {number: model._text(prompts[number] + generated[number]) for number in prompts}


def _generation_config(root: Any, given: Any, options: dict[str, Any]) -> Any:
    """A copy of the generation config with options in it; takes those out that it knows."""
    config = copy.deepcopy(root.generation_config if given is None else given)
    for name in [name for name in options if hasattr(config, name)]:
        setattr(config, name, options.pop(name))
    if config.eos_token_id is None:
        config.eos_token_id = -1  # transformers' word for none, here
    if (config.num_return_sequences or 1) != 1 or (config.num_beams or 1) != 1:
        raise Unsupported(
            "continuous batching gives one text per prompt. For several, pass the prompt several times."
        )
    return config


def _batching_config(given: Any, options: dict[str, Any]) -> Any:
    """A copy of the batching config with options in it."""
    from transformers import ContinuousBatchingConfig

    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    for name in options:
        if name not in fields:
            near = difflib.get_close_matches(name, [*fields, *_OURS], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see ContinuousBatchingConfig."
            raise TypeError(f"no argument {name!r}; {hint}")
    if given is None:
        # The user's own attention kernel, rather than a faster one with other rounding.
        ours = {"auto_switch_to_flash": False} if "auto_switch_to_flash" in fields else {}
        config = ContinuousBatchingConfig(**{**ours, **options})
    else:
        config = copy.copy(given)
        for name, value in options.items():
            setattr(config, name, value)
    config.use_async_batching = False  # it feeds tokens after the last one
    return config


_OURS = ("names_filter", "hooks", "fwd_hooks", "per_request", "max_new_tokens", "device")
