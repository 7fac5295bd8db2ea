"""Text in and out with TransformerLens's names, where interpose has another word or none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.generation import options_for
from interpose.dialects.transformer_lens.scratch import writing
from interpose.dialects.transformer_lens.scratch.model import FromScratch
from interpose.dialects.transformer_lens.utilities.losses import lm_cross_entropy_loss
from interpose.dialects.transformer_lens.utilities.tensors import (
    get_attention_mask,
    get_offset_position_ids,
)
from interpose.models.discovery.inputs import probe_inputs
from interpose.models.knowledge import known
from interpose.models.running import masks, padding
from interpose.models.running.text import encodes, is_text, raise_empty, texts_in
from interpose.models.running.trial import first_tensor, trial
from interpose.models.transformer import TransformerModel
from interpose.taps.context import current


class LensText(FromScratch):
    """The part of a `HookedTransformer` that reads and writes text."""

    _prepends_bos: bool | None = None
    _padding_side: str | None = None
    _n_ctx: int | None = None

    @property
    def default_padding_side(self) -> str | None:
        """Where shorter texts of a batch are padded: where ``model.tokenizer`` does."""
        side: str | None = getattr(self._tokenizer_or_none(), "padding_side", self._padding_side)
        return side

    @default_padding_side.setter
    def default_padding_side(self, value: str | None) -> None:
        self._padding_side = value
        own = vars(self).get("tokenizer")
        if own is not None and value is not None:
            self.tokenizer = own_tokenizer(own, value)

    @property
    def default_prepend_bos(self) -> bool | None:
        """Whether texts begin with a BOS token unless said otherwise; ``cfg.default_prepend_bos`` is the same."""
        cfg = vars(self).get("_lens_cfg")  # not made for this: it needs a probe of the model
        return self._prepends_bos if cfg is None else cfg.default_prepend_bos

    @default_prepend_bos.setter
    def default_prepend_bos(self, value: bool | None) -> None:
        self._prepends_bos = value
        if "_lens_cfg" in vars(self):
            vars(self)["_lens_cfg"].default_prepend_bos = value

    def _encode(self, texts: Any, prepend_bos: bool | None, truncate: bool) -> list[list[int]]:
        if prepend_bos is None and self.default_prepend_bos is not None and self._bos() is not None:
            prepend_bos = self.default_prepend_bos
        return super()._encode(texts, prepend_bos, truncate)

    def prepare(
        self,
        input: Any,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
    ) -> dict[str, Tensor]:
        """What the module's forward takes for some texts or tokens.

        A model that reads from left to right gets no mask for padding at the right: no token of a text sees it, and the
        loss is that of all tokens. Of padding at the left it gets one, for texts and for tokens (see `mask_of`).
        """
        if not self._reads_forwards:
            return super().prepare(input, prepend_bos, padding_side, truncate)
        texts = texts_in(input)
        if texts is not None:
            rows = self._encode(texts, prepend_bos, truncate)
            if not all(rows):
                raise_empty(texts, rows)
            input = self._as_batch(rows, padding_side)[0]
        tokens = self._tokens(input)
        mask = self._mask_of(tokens, padding_side, prepend_bos)
        at_left = mask is not None and not bool((mask[:, 0] != 0).all())
        made = self._with_mask(tokens, mask if at_left else None)
        if len(tokens) > 1 and "position_ids" not in made and self._positions_are_looked_at():
            each = torch.arange(tokens.shape[1], device=tokens.device)
            made["position_ids"] = each.expand(len(tokens), -1)
        return made

    def _positions_are_looked_at(self) -> bool:
        """Whether hooks may see embedded positions: then there are to be some for every text, as in old models."""
        if self.is_from_scratch or not (current().scopes or self._handles):
            return False
        return "hook_pos_embed" in self.tree.table.sites and positions_may_be_given(self)

    def _positions_around_holes(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Positions for a call whose mask leaves out tokens inside a text: they are none of it, and do not count."""
        mask = given.get("attention_mask")
        if self._as_transformers or mask is None or mask.ndim != 2 or "position_ids" in given:
            return {}
        counted = get_offset_position_ids(0, mask)
        holes = bool(((counted != padding.positions(mask)) & (mask != 0)).any())
        return {"position_ids": counted} if holes and padding.accepts(self, "position_ids") else {}

    @property
    def _reads_forwards(self) -> bool:
        """Whether no token sees a later one."""
        root: Any = self.root
        return not encodes(self) and bool(getattr(root, "can_generate", lambda: False)())

    def mask_of(self, tokens: Tensor) -> Tensor | None:
        """Which tokens are text. With padding at the left, tokens for padding at the left end are none.

        Where one token is for padding and for beginnings, the last of them begins the text.
        """
        return self._mask_of(tokens)

    def _mask_of(
        self, tokens: Tensor, padding_side: str | None = None, prepend_bos: bool | None = None
    ) -> Tensor | None:
        known = masks.remembered(tokens)
        if known is not None:
            return None if bool(known.all()) else known.long()
        found = self._told_apart(tokens)
        side = padding_side or self.default_padding_side
        if found is not None or side != "left" or tokens.ndim != 2:
            return found
        prepends = self.default_prepend_bos if prepend_bos is None else prepend_bos
        mask = get_attention_mask(self._tokenizer_or_none(), tokens, bool(prepends), side)
        return None if bool(mask.all()) else mask

    def shorten(self, n_ctx: int) -> None:
        """Cut texts to this many tokens; no more than the model has positions for."""
        known = super()._longest_text()
        if known is not None and n_ctx > known:
            raise ValueError(f"n_ctx={n_ctx}, and the model has positions for {known} tokens.")
        self._n_ctx = n_ctx
        cfg: Any = self.cfg
        cfg.n_ctx = n_ctx

    def _longest_text(self) -> int | None:
        return super()._longest_text() if self._n_ctx is None else self._n_ctx

    def loss_fn(
        self,
        logits: Tensor,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """The cross-entropy of next tokens, their mean or each by itself [batch, pos - 1]."""
        return lm_cross_entropy_loss(logits, tokens, attention_mask, per_token)

    def to_tokens(
        self,
        input: Any,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tensor:
        """Token ids [batch, pos] of a text or several; a BOS token comes first unless ``prepend_bos`` is False."""
        made = super().to_tokens(
            input, prepend_bos=prepend_bos, padding_side=padding_side, truncate=truncate
        )
        return made if move_to_device else made.cpu()

    def to_str_tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> list[str] | list[list[str]]:
        """Each token as a string; ``padding_side`` is accepted, for texts are shown without padding."""
        del padding_side
        return super().to_str_tokens(input, prepend_bos)

    def to_single_str_token(self, int_token: int) -> str:
        """One token as a string."""
        return super().to_single_str_token(int_token)

    def get_token_position(
        self,
        single_token: str | int,
        input: Any,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Where a token is in one text; ``padding_side`` is accepted, for one text has no padding."""
        del padding_side
        return super().get_token_position(single_token, input, mode, prepend_bos)

    def to_sentence_pair_tokens(self, first: str, second: str) -> dict[str, Tensor]:
        """What an encoder such as BERT takes for two sentences: ids, mask and which sentence each token is of."""
        pair = self._tokenizer()(first, second, return_tensors="pt")
        return {name: value.to(self.device) for name, value in pair.items()}

    def input_to_embed(
        self,
        input: Any,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        past_kv_cache: Any = None,
    ) -> tuple[Tensor, Tensor, None, Tensor | None]:
        """What enters the first block, the tokens, None (where old models had positions) and the mask, if any.

        Args:
            input: a text, several, or tokens [batch, pos].
            prepend_bos: as in `to_tokens`.
            padding_side: as in `to_tokens`.
            attention_mask: [batch, pos], instead of what padding tells.
            past_kv_cache: what was read before, which is left as it is.
        """
        given = self.prepare(input, prepend_bos, padding_side)
        tokens = given["input_ids"]
        if past_kv_cache is None and attention_mask is None:
            return self(given, stop_at_layer=0), tokens, None, given.get("attention_mask")
        if past_kv_cache is None:
            stream = self(tokens, attention_mask=attention_mask, stop_at_layer=0)
            return stream, tokens, None, attention_mask
        mask = given.get("attention_mask") if attention_mask is None else attention_mask
        mask = torch.ones_like(tokens) if mask is None else mask
        entries = [replace(entry, frozen=True) for entry in past_kv_cache.entries]
        read = replace(past_kv_cache, entries=entries, frozen=True)
        options = {"past_kv_cache": read, "attention_mask": mask, "return_type": None}
        first = "blocks.0.hook_resid_pre"
        _, cache = self.run_with_cache(tokens, names_filter=first, **options)
        return cache[first], tokens, None, read.append_attention_mask(mask)

    def generate(self, input: Any = "", max_new_tokens: int = 10, **options: Any) -> Any:
        """Generate text with transformers' own ``generate``; hooks in scope fire at every step.

        Args:
            input: a text, a list of texts, tokens, or embeddings [batch, pos, d_model]; these come back with those of
                new tokens behind them, unless ``return_type`` says ``tokens`` (the new ones) or ``str``. For any other
                input it may be ``embeds``, too.
            max_new_tokens: how many.
            **options: TransformerLens's (``do_sample``, ``temperature``, ``top_k``, ``stop_at_eos``,
                ``use_past_kv_cache``, ``freq_penalty``, ``return_type``, ...) and those of transformers. With
                ``output_logits`` it is an output of transformers, with ``sequences`` and ``logits``; with
                ``return_input_tokens`` what was written and the tokens it went on from.
        """
        if options.pop("return_input_tokens", False):
            begin = options.get("prepend_bos")
            read = self.to_tokens(input, begin, "left") if is_text(input) else self._tokens(input)
            return self.generate(input, max_new_tokens, **options), read
        embedded = isinstance(input, Tensor) and input.is_floating_point()
        if options.get("return_type") == "embeds" and not embedded:
            options["return_type"] = "tokens"
            return self.embed(self.generate(input, max_new_tokens, **options))
        if self.is_from_scratch:
            return writing.generate(self, input, max_new_tokens, **options)
        options = options_for(options)
        if "stop_strings" in options:
            options.setdefault("tokenizer", self._tokenizer())
        if embedded:
            kind = options.pop("return_type", "embeds")
            given = {"inputs_embeds": input.to(self.device)}
            new = super().generate(
                given, max_new_tokens=max_new_tokens, return_type="tokens", **options
            )
            if kind in ("tokens", "str"):
                return new if kind == "tokens" else self.to_string(new)
            return torch.cat([given["inputs_embeds"], self.embed(new)], dim=1)
        return super().generate(input, max_new_tokens=max_new_tokens, **options)

    def hf_generate(self, input: Any, **options: Any) -> Any:
        """Generate with the options and defaults of transformers."""
        return super().generate(input, **options)

    def generate_stream(
        self, input: Any, max_new_tokens: int = 10, max_tokens_per_yield: int = 25, **options: Any
    ) -> Iterator[Any]:
        """Generate some tokens at a time, and yield each part as tokens [batch, pos].

        The first part has the prompt before it and ``max_tokens_per_yield - 1`` new tokens.
        """
        prepend_bos = options.pop("prepend_bos", None)
        tokens = self.to_tokens(input, prepend_bos) if is_text(input) else self._tokens(input)
        options["return_type"] = "tokens"
        begun, count = False, max(max_tokens_per_yield - 1, 1)
        while max_new_tokens > 0:
            count = min(count if not begun else max_tokens_per_yield, max_new_tokens)
            longer = self.generate(tokens, count, **options)
            new = longer[:, tokens.shape[1] :]
            yield new if begun else longer
            begun = True
            if new.shape[1] < count or bool((new == self._end_token()).any(1).all()):
                return
            tokens, max_new_tokens = longer, max_new_tokens - count

    def _end_token(self) -> int:
        owner = self._tokenizer_or_none() if self.is_from_scratch else self.module.generation_config
        found = getattr(owner, "eos_token_id", None)
        return found if isinstance(found, int) else -1


def own_tokenizer(tokenizer: Any, padding_side: str | None = None) -> Any:
    """A tokenizer as a `HookedTransformer` has it: with a token for padding, its end token if it had none.

    It is a copy, unless there is nothing to change.

    Args:
        tokenizer: anybody's, or None.
        padding_side: where it is to pad; by default where it does.
    """
    if tokenizer is None:
        return None
    end = getattr(tokenizer, "eos_token", None)
    if getattr(tokenizer, "pad_token", "none") is None and end is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = end
    if padding_side not in (None, getattr(tokenizer, "padding_side", None)):
        tokenizer = copy.copy(tokenizer)
        tokenizer.padding_side = padding_side
    return tokenizer


def positions_may_be_given(model: TransformerModel) -> bool:
    """Whether a model computes the same, to the bit, if it is told the positions that it counts by itself."""

    def prove() -> bool:
        inputs = probe_inputs(model.root)
        if not padding.accepts(model, "position_ids") or "input_ids" not in inputs:
            return False
        batch, length = inputs["input_ids"].shape
        told = torch.arange(length, device=inputs["input_ids"].device).expand(batch, -1)
        with trial(model):
            alone = first_tensor(model.module(**inputs))
            return torch.equal(
                alone, first_tensor(model.module(**{**inputs, "position_ids": told}))
            )

    return known(model, "positions may be given", prove, tried=False)


def predictions(model: TransformerModel, tokens: Tensor, logits: Tensor) -> str | list[str]:
    """The likeliest word at the mask; a numbered list of them, if there are several."""
    tokenizer = model.tokenizer
    masked = tokens == tokenizer.mask_token_id
    words = str(tokenizer.decode(logits[masked].argmax(-1))).split(" ")
    return (
        words[0] if len(words) == 1 else [f"Prediction {n}: {word}" for n, word in enumerate(words)]
    )
