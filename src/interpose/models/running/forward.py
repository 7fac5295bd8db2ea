"""`Forward`: what ``model(...)`` means. Text or tokens in, logits or a loss out; or as transformers is called.

Given something by position, a model answers as TransformerLens's do. Given keywords, or a mapping of them as
tokenizers make it, it is the module's own forward, with the module's own output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from interpose.engine.cache import Cache
from interpose.engine.model import Model
from interpose.errors import Unsupported
from interpose.models.running import padding, rows, segment
from interpose.models.running.text import encodes, texts_in
from interpose.models.running.trial import first_tensor

_UNSAID: Any = "what transformers returns, or logits"
_OURS = (
    "return_type",
    "loss_per_token",
    "prepend_bos",
    "padding_side",
    "truncate",
    "start_at_layer",
    "stop_at_layer",
)


class Output(NamedTuple):
    """Logits [batch, pos, d_vocab], and the loss that follows from them."""

    logits: Tensor
    loss: Tensor


class Forward(Model):
    """The part of a model that is called."""

    def __call__(
        self,
        input: Any = None,  # noqa: A002 - TransformerLens's word
        *,
        return_type: str | None = _UNSAID,
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model, with whatever hooks are in scope.

        ```python
        model("The cat sat")                                  # logits [1, pos, d_vocab]
        model(["A text", "and a longer one"], return_type="loss")
        model(tokens, stop_at_layer=3)                        # the residual that enters block 3
        model(**tokenizer("The cat", return_tensors="pt"))    # what transformers returns
        ```

        Args:
            input: a text, a list of texts (padded, the padding masked), tokens [batch, pos] or [pos],
                embeddings [batch, pos, d_model], whatever else the module's first input is (pixels), or a
                mapping of the module's own arguments. For encoder-decoders it is the encoder's.
            return_type: ``logits``, ``loss`` (of next tokens, the mean over those that are no padding),
                ``both``, or None to run for the hooks alone. By default logits, but for a mapping,
                keywords, or ``labels``, whatever the module returns. A model without logits returns its first tensor.
            loss_per_token: a loss for every token after the first, [batch, pos - 1]; 0 at padding.
            prepend_bos: as in `to_tokens`.
            padding_side: as in `to_tokens`.
            truncate: as in `to_tokens`.
            start_at_layer: begin at this block (negative counts from the end), with ``input`` as the residual
                stream there, [batch, pos, d_model]. Blocks before it do not run, and no hook before it fires.
            stop_at_layer: end before this block and return the residual stream there, after the hooks on
                it; ``n_layers`` gives the last block's output.
            attention_mask: [batch, pos], 0 where there is padding.
            **kwargs: other arguments of the module's forward.
        """
        self._beware_of_typos(kwargs, _OURS)
        if return_type not in ("logits", "loss", "both", None, _UNSAID):
            raise ValueError(
                f"return_type is 'logits', 'loss', 'both' or None; got {return_type!r}"
            )
        if loss_per_token and return_type not in ("loss", "both"):
            raise ValueError("loss_per_token goes with return_type='loss' or 'both'.")
        plain = input is None or isinstance(input, Mapping)
        if return_type is _UNSAID and not plain and "labels" not in kwargs:
            return_type = "logits"
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask
        given: dict[str, Any]
        if start_at_layer is not None:
            given = self._start_arguments(input, kwargs)
        elif plain:
            given = {**rows.as_arguments(self, input or {}), **kwargs}
        else:
            given = self._arguments(input, kwargs, prepend_bos, padding_side, truncate)
        if start_at_layer is None and stop_at_layer is None:
            output = super().__call__(**given)
        else:
            part = segment.Segment(self, start_at_layer, stop_at_layer)
            residual = input if start_at_layer is not None else None
            output = part.run(super().__call__, given, residual)
            if part.stopped:
                return output
        if return_type is None or return_type is _UNSAID:
            return None if return_type is None else output
        logits = first_tensor(output)
        if return_type == "logits":
            return logits
        loss = self._loss(output, logits, given, loss_per_token)
        return loss if return_type == "loss" else Output(logits, loss)

    def run_with_cache(self, *args: Any, **kwargs: Any) -> tuple[Any, Cache]:
        """Run the model once and return its output with the values of some sites: see `Model.run_with_cache`.

        With ``return_type=None`` the run ends after the last site asked for, as with ``stop=True``, unless
        gradients or a KV cache of yours need the rest of it.
        """
        given = args[0] if args and isinstance(args[0], Mapping) else {}
        needed = any(
            source.get(name) is not None and source.get(name) is not False
            for source in (given, kwargs)
            for name in ("incl_bwd", "past_key_values", "stop_at_layer")
        )
        if kwargs.get("return_type", _UNSAID) is None and not needed:
            kwargs.setdefault("stop", True)
        return super().run_with_cache(*args, **kwargs)

    # What the module takes.

    def _arguments(
        self,
        given: Any,
        kwargs: dict[str, Any],
        prepend_bos: bool | None,
        padding_side: str | None,
        truncate: bool = True,
    ) -> dict[str, Any]:
        """The module's arguments for an input given by position."""
        mask = kwargs.get("attention_mask")
        if mask is not None:
            mask = kwargs["attention_mask"] = torch.as_tensor(mask).to(self.device)
        words = texts_in(given)
        if words is not None and mask is not None:
            raise TypeError("a text brings its own mask; give tokens with attention_mask.")
        tensor = None if words is not None else torch.as_tensor(given).to(self.device)
        made: dict[str, Any]
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            main = getattr(self.root, "main_input_name", "input_ids")
            if main == "input_ids" and tensor.ndim != 3:
                raise TypeError(
                    "tokens are integers [batch, pos] or [pos], and embeddings [batch, pos, d_model]; got "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}. Tokens as floats: tokens.long()."
                )
            made = {"inputs_embeds" if main == "input_ids" else main: tensor}
            made |= self._mask_arguments(mask) if main == "input_ids" else {}
        elif tensor is not None and (mask is not None or kwargs.get("past_key_values") is not None):
            tokens = self._tokens(tensor)
            # A mask of another shape covers a KV cache too, or has axes of its own.
            fits = mask is not None and mask.shape == tokens.shape
            made = self._with_mask(tokens, mask) if fits else {"input_ids": tokens}
        else:
            made = self.prepare(given, prepend_bos, padding_side, truncate)
            if not any(_is_sense(value) for value in kwargs.values()):
                self.must_have_image(made["input_ids"])
        start = self._decoder_start(made, kwargs) if encodes(self) else {}
        return {**start, **made, **kwargs}

    def _mask_arguments(self, mask: Tensor | None) -> dict[str, Any]:
        """What a mask makes necessary besides itself."""
        if mask is None or mask.ndim != 2 or bool((mask != 0).all()):
            return {}
        return dict(padding.arguments(self, mask, self._filler()))

    def _start_arguments(self, residual: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The module's arguments besides the residual that a run begins with."""
        if not isinstance(residual, Tensor) or not residual.is_floating_point():
            raise TypeError(
                "start_at_layer takes the residual stream there, a floating point tensor [batch, pos, "
                f"d_model], by position; got {_brief(residual)}."
            )
        main = str(getattr(self.root, "main_input_name", "input_ids"))
        if main != "input_ids" and main not in kwargs:
            raise TypeError(f"start_at_layer also needs what this model begins with: {main}=...")
        return {**self._mask_arguments(kwargs.get("attention_mask")), **kwargs}

    def _decoder_start(self, made: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What an encoder-decoder's decoder begins with, if the caller does not say."""
        config: Any = self.module.config
        names = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
        if any(name in kwargs for name in names) or not padding.accepts(self, names[0]):
            return {}
        known = [
            getattr(owner, f"{name}_token_id", None)
            for name in ("decoder_start", "bos", "pad")
            for owner in (config, getattr(self.module, "generation_config", None))
        ]
        token = next((token for token in known if isinstance(token, int)), None)
        if token is None:
            raise ValueError(
                "the config names no token to start decoding with; give decoder_input_ids=..."
            )
        batch = next(iter(made.values())).shape[0]
        return {"decoder_input_ids": torch.full((batch, 1), token, device=self.device)}

    # What is made of its output.

    def _loss(
        self, output: Any, logits: Tensor, given: Mapping[str, Any], per_token: bool
    ) -> Tensor:
        """The cross-entropy of next tokens; with labels, the module's own loss."""
        if given.get("labels") is not None:
            if per_token:
                raise ValueError("with labels the loss is the module's own, one number.")
            own: Tensor = output.loss
            return own
        can_generate = getattr(self.root, "can_generate", lambda: True)
        if not can_generate():
            hint = " Give labels=... for the loss that transformers has for it."
            raise Unsupported(
                f"the loss is that of next tokens, and {type(self.root).__name__} predicts none."
                + (hint if padding.accepts(self, "labels") else "")
            )
        decoder = "decoder_" if encodes(self) else ""
        tokens = given.get(f"{decoder}input_ids")
        if tokens is None:
            raise ValueError(
                f"a loss needs the tokens, and this run has none: give {decoder}input_ids=... too."
            )
        if logits.shape[:-1] != tokens.shape or tokens.shape[1] < 2:
            raise ValueError(
                f"a loss of next tokens needs at least two, and logits for each; got logits of shape "
                f"{tuple(logits.shape)} for {decoder}input_ids of shape {tuple(tokens.shape)}."
            )
        return next_token_loss(logits, tokens, given.get(f"{decoder}attention_mask"), per_token)


def _is_sense(given: Any) -> bool:
    """Whether an argument may be an image or a sound."""
    return isinstance(given, Tensor) and given.is_floating_point()


def _brief(given: Any) -> str:
    """What something is, for errors."""
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return type(given).__name__


def next_token_loss(
    logits: Tensor, tokens: Tensor, mask: Tensor | None = None, per_token: bool = False
) -> Tensor:
    """Cross-entropy of each token with the logits before it, where neither place is padding.

    Args:
        logits: [batch, pos, d_vocab].
        tokens: [batch, pos].
        mask: [batch, pos], 0 where there is padding.
        per_token: a loss for each, [batch, pos - 1] and 0 at padding, instead of their mean.
    """
    if mask is None:
        mask = torch.ones_like(tokens)
    if mask.shape != tokens.shape:
        raise ValueError(
            f"a loss needs a mask of shape {tuple(tokens.shape)}; got {tuple(mask.shape)}."
        )
    real = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    targets = tokens[:, 1:].to(logits.device)
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none")
    losses = losses.where(real.to(losses.device), 0.0)
    return losses if per_token else losses.sum() / real.sum().to(losses.device)
