"""transformers' continuous batching as one loop in the calling thread, and a proof that a model can do it.

transformers runs it in a thread of its own, which no scope reaches, and turns errors there into failed
requests. Its loop is three calls: prepare, step, update. Here they are made in the calling thread, so
every scope, mode and autocast around holds, no other thread's forward is touched, an error of a hook
arrives as it was raised, and Ctrl-C ends it.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.batching.packed import Packed, Span, packed
from interpose.models.knowledge import known
from interpose.taps.context import stand_down, stand_up

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

_MOST_ROWS = 1024
"""Rows per pass unless asked otherwise: without flash attention every row looks at every request's keys."""

Ear = Callable[[Packed, Tensor, bool], None]
"""Is told the logits [row, d_vocab] of each pass, and whether only rows that a token is drawn from are there."""


class Loop:
    """Requests, and transformers' machinery for them. `run` it once, in `left_as_it_was`."""

    def __init__(
        self,
        root: Any,
        generation: Any,
        config: Any,
        prompts: Mapping[int, Sequence[int]],
        max_new_tokens: int,
    ) -> None:
        self.prompts = prompts
        self.forwards = 0
        _fit(config, list(prompts.values()), max_new_tokens)
        self.manager = root.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        names = self.manager.add_requests(list(prompts.values()), max_new_tokens=max_new_tokens)
        self.numbers = dict(zip(names, prompts))
        with random_state_kept() if config.seed is None else nullcontext():
            try:
                self.processor = self.manager._create_batch_processor()
            except MemoryError:
                if root.device.type == "cpu" and importlib.util.find_spec("psutil") is None:
                    raise Unsupported(
                        "transformers cannot find out how much memory there is without psutil: pip "
                        "install psutil."
                    ) from None
                # Not all requests fit at once: as many as there is memory for, then.
                self.manager.continuous_batching_config.num_blocks = None
                self.processor = self.manager._create_batch_processor()
        keeps = getattr(self.processor.model_runner, "supports_logits_to_keep", None)
        self.cut = bool(keeps is not None and keeps(root))

    def run(self, ear: Ear | None = None) -> None:
        """Forward passes until every request has its tokens."""
        processor, model, idle = self.processor, self.manager.model, 0
        on_card = model.device.type == "cuda"

        def forward(**given: Any) -> Any:
            # transformers 5.22 (utils/generic.py:1068) writes this one into the config while it lasts,
            # where forwards in other threads find it: they would look ahead, and could do so for ever.
            # Masks say the same.
            given.pop("is_causal", None)
            output = model(**given)
            if ear is not None:
                ear(batch, output.logits[0], "logits_to_keep" in given)
            return output

        with torch.no_grad(), torch.cuda.device(model.device) if on_card else nullcontext():
            while processor.has_pending_requests() or not self.forwards:
                if not processor.prepare_next_batch():
                    # transformers 5.9 takes a turn for each request it evicts; more are in vain.
                    idle += 1
                    if idle > len(self.prompts):
                        break
                    continue
                idle, batch = 0, self._batch()
                with packed(batch):
                    processor._generation_step(forward)
                self.forwards += 1
                processor.update_batch()

    def _batch(self) -> Packed:
        """Whose the rows of the next pass are, from what the model will be given."""
        there = self.processor.inputs_and_outputs
        states = there.requests_in_batch
        bounds = there.cumulative_seqlens_q[: len(states) + 1].tolist()
        first = there.position_ids[bounds[:-1]].tolist()
        numbers = [self.numbers[future.state.request_id] for future in states]
        spans = [
            Span(
                request=number,
                start=start,
                length=end - start,
                first=position,
                prompt=len(self.prompts[number]),
                draws=future.has_new_token,
            )
            for number, future, start, end, position in zip(
                numbers, states, bounds, bounds[1:], first
            )
        ]
        return Packed(spans=spans, tokens=there.input_ids[: bounds[-1]].tolist(), cut=self.cut)

    def outputs(self) -> dict[int, Any]:
        """What each request got, by number."""
        found: dict[int, Any] = {}
        while (output := self.manager.get_result(timeout=0)) is not None:
            if output.error is not None:
                raise RuntimeError(f"request {self.numbers[output.request_id]}: {output.error}")
            found[self.numbers[output.request_id]] = output
        missing = sorted(set(self.prompts) - set(found))
        if missing:
            raise RuntimeError(
                f"transformers' scheduler found no room for requests {missing}: they need more cache "
                "than there is. Give it more blocks (num_blocks=...), or shorter texts."
            )
        return {number: found[number] for number in self.prompts}

    def close(self) -> None:
        """Let go of what is not freed by itself."""
        destroy = getattr(self.manager, "destroy", None)  # newer than transformers 5.9
        if destroy is not None:
            destroy()


def without_shortcuts(config: Any) -> None:
    """Every token goes through the modules: no graph is replayed, no prefix is taken from another request."""
    config.use_cuda_graph = False
    config.varlen_compile_config = config.decode_compile_config = None
    config.allow_block_sharing = False
    for name in ("default_compile_level", "use_default_compile_configs"):
        if getattr(config, name, None):
            setattr(config, name, type(getattr(config, name))(0))


def _fit(config: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Memory for these requests, rather than most of what the machine has."""
    if config.max_batch_tokens is None:
        config.max_batch_tokens = min(sum(map(len, prompts)), _MOST_ROWS)
    if config.num_blocks is None:
        page = getattr(config, "page_size", None) or config.block_size
        blocks = sum(-(-(len(prompt) + max_new_tokens) // page) + 1 for prompt in prompts)
        config.num_blocks = (
            blocks + blocks // 4 + 1
        )  # with the margin that its scheduler keeps free


# What must stay as it is.


@contextmanager
def left_as_it_was(root: nn.Module) -> Iterator[None]:
    """Undo what transformers does: it switches the attention kernel in the config, and the model to eval mode."""
    configs = {id(config): config for config in _configs(root)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    training = [(part, part.training) for part in root.modules()]
    try:
        yield
    finally:
        for config, kernel in before:
            config._attn_implementation_internal = kernel
        for part, was in training:
            part.training = was


def _configs(root: nn.Module) -> Iterator[Any]:
    waiting: list[Any] = [part.config for part in root.modules() if hasattr(part, "config")]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "_attn_implementation_internal"):
            yield config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Undo what transformers does: it seeds the process when it makes its processor."""
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(cards)):
        yield


# The proof.


def prove(model: TransformerModel, config: Any, prompts: Mapping[int, Sequence[int]]) -> None:
    """Refuse a model that computes something else for packed tokens: a few tokens are tried, once per model.

    Such models are many (a layer keeps its state elsewhere, a kernel drops an argument), and most of
    them would generate wrong text without a word.
    """
    root = model.root

    def find_out() -> str:
        token = stand_down()
        try:
            return _why_not(root, config, prompts)
        finally:
            stand_up(token)

    why_not = known(model, ("batching", root.dtype, root.device), find_out)
    if why_not:
        raise Unsupported(
            f"{type(root).__name__} cannot be batched continuously: {why_not}. Use "
            "model.generate(texts)."
        )


def _why_not(root: Any, config: Any, prompts: Mapping[int, Sequence[int]]) -> str:
    from transformers import GenerationConfig

    some = list(islice(cycle(token for row in prompts.values() for token in row), 8))
    texts = {0: some[:5], 1: some[5:]}
    logits: dict[int, list[Tensor]] = {0: [], 1: []}

    def ear(batch: Packed, rows: Tensor, cut: bool) -> None:
        for number, span in enumerate(batch.drawing):
            logits[span.request].append(rows[number if cut else span.start + span.length - 1])

    config = copy.copy(config)
    config.num_blocks, config.max_batch_tokens = None, 4
    without_shortcuts(config)
    try:
        with left_as_it_was(root), random_state_kept():
            loop = Loop(root, GenerationConfig(eos_token_id=-1), config, texts, 3)
            try:
                capped = getattr(root.config.get_text_config(), "attn_logit_softcapping", None)
                if capped is not None and "flash" not in root.config._attn_implementation:
                    # Too small a difference to be seen in half precision (transformers 5.22).
                    return (
                        "its attention caps scores, and transformers' paged kernel leaves that out"
                    )
                loop.run(ear)
                outputs = loop.outputs()
            finally:
                loop.close()
    except (MemoryError, torch.OutOfMemoryError, Unsupported):
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0][:200]
        return f"transformers fails with {type(error).__name__}: {first}"
    apart = []
    with left_as_it_was(root), torch.no_grad():
        root.eval()
        for number, text in texts.items():
            tokens = torch.tensor([text + outputs[number].generated_tokens[:-1]]).to(root.device)
            given = {"input_ids": tokens}
            if "position_ids" in inspect.signature(root.forward).parameters:
                given["position_ids"] = torch.arange(tokens.shape[1], device=root.device)[None]
            alone = root(**given).logits[0, len(text) - 1 :].float()
            rows = torch.stack(logits[number]).float()
            apart.append((alone - rows).abs().max() / alone.abs().max())
    worst = float(torch.stack(apart).max())  # NaN if one is
    if worst <= _noise(root):
        return ""
    return f"its logits for packed texts are {worst:.1e} off those for the same texts by themselves"


def _noise(root: Any) -> float:
    """How far logits may be apart by rounding alone, against the largest."""
    if root.dtype not in (torch.float32, torch.float64):
        return 5e-2
    rough = root.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return 1e-2 if rough else 1e-4
