"""What a sweep must give, by hand: one forward of the bare module per cell, with raw torch hooks.

Nothing here is interpose's. Blocks are found by their number, parts of blocks by the names that transformers gives
them, and logits are the module's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.bounds import are_near
from tests.models import tiny

LAYERS, LENGTH, FIRST = 3, 13, 5


class Parts(NamedTuple):
    """Where in a block attention's heads enter their output projection, and what adds to the stream after it."""

    z: str | None = "self_attn.o_proj"
    mlp_out: str | None = "mlp"


OPT_POST_NORM = "opt, post-norm"
TYPES: dict[str, Parts] = {
    "gpt2": Parts("attn.c_proj"),
    "llama": Parts(),  # grouped queries
    "qwen2": Parts(),
    "granite": Parts(),
    "mistral": Parts(),  # sliding window
    "starcoder2": Parts(),
    "gemma2": Parts(),
    "gemma3_text": Parts(),
    "gptj": Parts("attn.out_proj"),  # parallel blocks
    "gpt_neox": Parts("attention.dense"),
    "falcon": Parts("self_attention.dense"),
    "phi": Parts("self_attn.dense"),
    "cohere": Parts(),
    "olmo2": Parts(),  # norms behind
    OPT_POST_NORM: Parts("self_attn.out_proj", "fc2"),
    "mixtral": Parts(),  # experts
    "qwen2_moe": Parts(),
    "gpt_oss": Parts(),
    "phimoe": Parts(),
    "deepseek_v3": Parts(),  # latent attention
    "bloom": Parts("self_attention.dense", "mlp.dense_4h_to_h"),  # alibi
    "mpt": Parts("attn.out_proj", "ffn.down_proj"),
    "mamba": Parts(None, None),  # states
    "rwkv": Parts(None, None),
    "jamba": Parts(mlp_out="feed_forward"),
    "qwen3_next": Parts(),
    "recurrent_gemma": Parts("temporal_block.o_proj", "mlp_block"),
}
NO_KV_CACHE = {"mamba", "rwkv", "jamba", "qwen3_next", "recurrent_gemma"}
SLIDING = {"mistral", "starcoder2", "gemma2", "gemma3_text", "gpt_oss"}


def build(name: str, layers: int = LAYERS) -> Any:
    """A tiny module with random weights."""
    if name != OPT_POST_NORM:
        return tiny.build(name, layers=layers)
    chosen = tiny.model_class("opt", "causal")
    config = tiny.shrink(
        chosen.config_class, layers=layers, dropout=0.1, kind="causal", do_layer_norm_before=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = chosen(config)
        tiny.randomise(module)
    return module.eval()


def pair(
    batch: int = 2, length: int = LENGTH, first: int = FIRST, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Clean and corrupted tokens, the same before a position; texts differ there, and the last also further on."""
    draw = torch.Generator("cpu").manual_seed(seed)
    clean = torch.randint(10, 60, (batch, length), generator=draw, device="cpu")
    corrupt = clean.clone()
    corrupt[:, first] = torch.randint(60, 70, (batch,), generator=draw, device="cpu")
    corrupt[-1, (first + length) // 2] = 71
    return clean, corrupt


# Reaching parts of a module.


def blocks(module: nn.Module) -> nn.ModuleList:
    """The stack of blocks: the first list of as many modules as the config has layers."""
    config: Any = module.config
    count = config.get_text_config().num_hidden_layers
    return next(
        part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count
    )


@dataclass(frozen=True)
class Spot:
    """The first value that enters a module, or that leaves it."""

    module: nn.Module
    leaves: bool = False

    @contextmanager
    def through(self, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        """A ``with`` block in which the value passes through a function; None leaves it alone."""

        def enters(_: Any, args: Any, kwargs: Any) -> Any:
            value = args[0] if args else kwargs["hidden_states"]
            new = change(value.clone())
            if new is None:
                return None
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

        def leaves(_: Any, args: Any, output: Any) -> Any:
            whole = isinstance(output, Tensor)
            new = change((output if whole else output[0]).clone())
            return None if new is None else (new if whole else (new, *output[1:]))

        handle = (
            self.module.register_forward_hook(leaves)
            if self.leaves
            else self.module.register_forward_pre_hook(enters, with_kwargs=True)
        )
        try:
            yield
        finally:
            handle.remove()


def spot(module: nn.Module, name: str, kind: str, layer: int) -> Spot | None:
    """A kind of site in a block, if it is there."""
    block = blocks(module)[layer]
    if kind in ("resid_pre", "resid_post"):
        return Spot(block, kind == "resid_post")
    path = getattr(TYPES[name], kind)
    try:
        return Spot(block.get_submodule(path), kind == "mlp_out")
    except AttributeError:
        return None  # a block of another kind


# Runs.


def logits(module: nn.Module, inputs: Mapping[str, Tensor] | Tensor) -> Tensor:
    """The module's own."""
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    with torch.no_grad():
        output = module(**given)
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[no-any-return]


@functools.cache
def some_logits(module: nn.Module) -> Tensor:
    """Of one text: for their size, which says what rounding may do to numbers made of them."""
    return logits(module, pair()[0])


def near(module: nn.Module, found: Tensor, wanted: Tensor) -> bool:
    """Whether numbers made of a module's logits are the same to rounding."""
    return are_near(found, wanted, some_logits(module))


def values(module: nn.Module, inputs: Any, spots: Iterable[Spot]) -> list[Tensor]:
    """What passes at some spots, in one run."""
    found: list[Tensor] = []
    with ExitStack() as stack:
        for place in spots:
            stack.enter_context(place.through(found.append))
        logits(module, inputs)
    return found


class Cell(NamedTuple):
    """One place to change: a part of a spot's value, given as an index."""

    spot: Spot
    part: Any


def at(pos: int) -> Any:
    """All of a position."""
    return (slice(None), pos)


def head(number: int, size: int) -> Any:
    """The columns of a head."""
    return (..., slice(number * size, (number + 1) * size))


def patched(module: nn.Module, base: Any, source: Any, cells: Iterable[Cell]) -> Tensor:
    """The logits [cell, example, pos, d_vocab] of a run per cell, with the source's value in its part."""
    cells = list(cells)
    spots = list(dict.fromkeys(cell.spot for cell in cells))
    there = {place: values(module, source, [place])[0] for place in spots}

    def run(cell: Cell) -> Tensor:
        def change(value: Tensor) -> Tensor:
            value[cell.part] = there[cell.spot][cell.part]
            return value

        with cell.spot.through(change):
            return logits(module, base)

    return torch.stack([run(cell) for cell in cells])


def zeroed(module: nn.Module, base: Any, cells: Iterable[Cell]) -> Tensor:
    """The logits of a run per cell, with zeros in its part."""

    def run(cell: Cell) -> Tensor:
        def change(value: Tensor) -> Tensor:
            value[cell.part] = 0
            return value

        with cell.spot.through(change):
            return logits(module, base)

    return torch.stack([run(cell) for cell in cells])


def telling(changed: Tensor, base: Tensor) -> tuple[int, int]:
    """Two tokens whose difference of last logits the cells move much."""
    effect = (changed - base)[..., -1, :]
    one = int(effect.abs().flatten(0, -2).amax(0).argmax())
    apart = (effect - effect[..., one : one + 1]).abs().flatten(0, -2).amax(0)
    return one, int(apart.argmax())
