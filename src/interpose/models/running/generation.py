"""Generating text with hooks on: positions stay absolute, however a model carries what it has read."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.models.running.rows import as_arguments, read, tokens_of
from interpose.models.running.text import encodes, is_text
from interpose.taps.context import Whereabouts, current

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


class Generation:
    """One call of `generate`: where its forward passes begin, and how much of its text stays.

    A KV cache knows how many positions it holds, a state does not. But a pass ends where the text so far
    ends, and that transformers shows, after each step, to whatever decides when to stop: this is one of
    those, and never stops anything.
    """

    def __init__(self, root: nn.Module, prompt: int | None, uncounted: int = 0) -> None:
        self.root = root
        self.prompt = prompt
        self.uncounted = uncounted  # positions that are not among transformers' tokens: embeddings
        self.length: int | None = None  # of the text so far, once a step is done
        self.rows = 0
        self.extra = 0
        self.cache: Any = None
        self.known: list[Any] = []  # its caches: one, and that of its drafts
        self.guidance: Generation | None = None
        self.last = 0  # where the last pass ended
        self.kept: int | None = None

    def __call__(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        """After a step: note how long the text is."""
        self.length, self.rows = tokens.shape[1] + self.uncounted, tokens.shape[0]
        return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

    def whereabouts(self, arguments: Mapping[str, Any], encodes: bool) -> Whereabouts:
        """Where a forward pass is in the text."""
        length, cache = _length(arguments, encodes), _cache(arguments)
        if not self._is_own(cache):  # a text beside it, which starts with no cache
            self.guidance = self.guidance or Generation(self.root, None)
            return self.guidance.whereabouts(arguments, encodes)
        self.cache = cache
        if length is None or self.length is None:  # the prompt, or a part of it
            self.prompt = length if self.prompt is None else self.prompt
            self.extra = max(0, (length or 0) - (self.prompt or 0))  # xlnet's own token at the end
            return Whereabouts(_offset(self.cache, arguments, length), self.prompt, length, self)
        offset = held(self.cache) or max(0, self.length + self.extra - length)
        self.last = offset + length
        return Whereabouts(offset, self.prompt, length, self)

    def _is_own(self, cache: Any) -> bool:
        """Whether a pass with this cache is one over the text, and not of what guides it."""
        if cache is None or any(cache is one for one in self.known):
            return cache is not None or not self.known
        if self.guidance is None or not held(cache):
            self.known.append(cache)
        return self.guidance is None or not held(cache)

    def end(self, output: Any) -> None:
        """The text is done: candidates that were rejected have left the cache."""
        self.kept, self.cache, self.known = held(self.cache) or None, None, []
        if self.guidance is not None:
            self.guidance.end(None)
        tokens = getattr(output, "sequences", output)
        if isinstance(tokens, Tensor) and self.length is not None and len(tokens) == self.rows:
            # Where asking whether to stop would make a device wait, a step too many is run and undone.
            undone = self.length - self.uncounted - tokens.shape[1]
            if undone > 0:
                self.kept = min(self.kept or self.last, self.last - undone)


_HERE: contextvars.ContextVar[Generation | None] = contextvars.ContextVar(
    "generation", default=None
)


def whereabouts(model: TransformerModel, arguments: Mapping[str, Any]) -> Whereabouts:
    """Where in a text a forward pass with these arguments is."""
    here, decodes = _HERE.get(), encodes(model)
    if here is not None and here.root is model.root:  # and not an assistant's
        return here.whereabouts(arguments, decodes)._replace(encodes=decodes)
    cache, length = _cache(arguments), _length(arguments, decodes)
    offset = 0 if cache is None else _offset(cache, arguments, length)
    return Whereabouts(offset, None, length, cache, decodes)


def kept_of(text: Any) -> int | None:
    """How many positions of a text are left of all that passes over it had; None if that is not known."""
    return text.kept if isinstance(text, Generation) else held(text) or None


def held(cache: Any) -> int | None:
    """How many positions there are in a cache; None if it does not say."""
    if cache is None:
        return 0
    if hasattr(cache, "seqlen_offset"):  # xLSTM's
        return int(cache.seqlen_offset)
    if not hasattr(cache, "get_seq_length"):
        return None
    try:
        return int(cache.get_seq_length())
    except ValueError:  # states alone (mamba), which say no more than whether there are any
        return None if cache.has_previous_state() else 0


def parts_run_alone(model: TransformerModel) -> list[tuple[str, nn.Module]]:
    """The parts of a model that `generate` calls by themselves.

    What it hands the work to (what an adapter adapts, BLIP-2's text model), and an encoder, which reads once.
    """
    root: Any = model.root
    own = getattr(type(root), "generate", None)
    hands_on = own is not None and not own.__module__.startswith("transformers.generation.")
    reads = root.get_encoder() if encodes(model) and hasattr(root, "get_encoder") else None
    if not hands_on and reads is None:
        return []
    return [
        (path, part)
        for path, part in model.tree.modules()
        if part is not root
        and (part is reads or (hands_on and hasattr(type(part), "prepare_inputs_for_generation")))
    ]


def _cache(arguments: Mapping[str, Any]) -> Any:
    """What a pass goes on from, whatever its model calls it."""
    names = ("past_key_values", "cache_params", "state", "mems")
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def _offset(cache: Any, arguments: Mapping[str, Any], length: int | None) -> int | None:
    """Where a pass begins, from what it is given alone; None if that cannot be known."""
    found = held(cache)
    if found or cache is None:
        return found
    if arguments.get("cache_position") is not None:
        return int(arguments["cache_position"].reshape(-1)[0])
    position_ids = arguments.get("position_ids")
    if found == 0 and position_ids is not None and length is not None:
        # Some models keep their state inside, and leave the cache they are given empty.
        return 0 if int(position_ids[..., -1].min()) < length else None
    return found


def _length(arguments: Mapping[str, Any], encodes: bool) -> int | None:
    """How many tokens a pass has, those of the decoder where there is an encoder."""
    side = "decoder_" if encodes else ""
    names = (f"{side}input_ids", f"{side}inputs_embeds", "labels" if encodes else "")
    found = next((arguments[name] for name in names if arguments.get(name) is not None), None)
    return int(found.shape[1]) if isinstance(found, Tensor) and found.ndim > 1 else None


def _given(
    model: TransformerModel, texts: Any, prepend_bos: bool | None, padding_side: str | None
) -> dict[str, Any]:
    """What transformers' generate takes. A decoder goes on from the last column, so that no padding may be there."""
    decodes = encodes(model)
    if is_text(texts):
        side = padding_side or ("right" if decodes else "left")
        return model.prepare(texts, prepend_bos=prepend_bos, padding_side=side)
    given = as_arguments(model, texts) if isinstance(texts, Mapping) else model.prepare(texts)
    tokens, mask = given.get("input_ids"), given.get("attention_mask")
    if tokens is not None and mask is None:
        mask = model.mask_of(tokens)
    alone = set(given) <= {"input_ids", "attention_mask", "position_ids"}
    if decodes or mask is None or not alone or bool((mask[:, -1] != 0).all()):
        return given
    rows = read(model, {"input_ids": tokens, "attention_mask": mask})
    return model._with_mask(*model._as_batch([tokens_of(row).tolist() for row in rows], "left"))


def generate(
    model: TransformerModel,
    input: str | list[str] | Tensor | Mapping[str, Any],  # noqa: A002 - TransformerLens's name
    *,
    return_type: str = "input",
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    **options: Any,
) -> Any:
    """What `TransformerModel.generate` does."""
    if return_type not in ("input", "str", "tokens"):
        raise ValueError(f"return_type is 'input', 'str' or 'tokens'; got {return_type!r}")
    given = _given(model, input, prepend_bos, padding_side)
    given.pop("position_ids", None)  # transformers derives them from the mask, step by step
    if "attention_mask" not in given and "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    here = _begun(model, given, options)
    if current().scopes or model.list_hooks():
        # A static cache makes transformers compile the forward, which would not see hooks.
        options.setdefault("disable_compile", True)
        if _takes_criteria(model.module):
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), here]
    token = _HERE.set(here)
    tokens = None
    try:
        module: Any = model.module
        tokens = module.generate(**given, **options)
    finally:
        here.end(tokens)
        _HERE.reset(token)
    asked_for_tokens = return_type == "tokens" or (return_type == "input" and not is_text(input))
    if asked_for_tokens or not isinstance(tokens, Tensor):  # a dict that was asked for stays one
        return tokens
    texts = model._tokenizer().batch_decode(tokens, skip_special_tokens=True)
    return texts if isinstance(input, (list, tuple)) or len(texts) > 1 else texts[0]


def _begun(
    model: TransformerModel, given: Mapping[str, Any], options: Mapping[str, Any]
) -> Generation:
    """A generation, with what is known of its prompt; the first forward pass tells the rest."""
    if encodes(model):
        drafts = ("assistant_model", "prompt_lookup_num_tokens")
        speculates = any(options.get(name) is not None for name in drafts)
        own = given.get("decoder_input_ids")  # else the first pass has the prompt and nothing more
        known = 1 if own is None else int(own.shape[1])
        return Generation(model.root, known if speculates else None)
    tokens, embeds = given.get("input_ids", given.get("inputs")), given.get("inputs_embeds")
    counted = None if tokens is None else int(tokens.shape[1])
    if embeds is None:
        return Generation(model.root, counted)
    length = int(embeds.shape[1])
    return Generation(model.root, length, length - (counted or 0))


def _takes_criteria(module: Any) -> bool:
    """Whether a model's own `generate` is, or hands on to, that of transformers."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    return "stopping_criteria" in inspect.signature(base.generate).parameters
