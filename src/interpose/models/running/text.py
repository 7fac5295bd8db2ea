"""`Text`: from strings to tokens and back, with the model's own tokenizer, which stays as it is.

Padding is done here and not by the tokenizer, so that one without a pad token needs none. What a padded
batch needs besides its tokens (mask, positions) is proven on the model: see `padding.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from interpose.engine.model import Model
from interpose.errors import Unsupported
from interpose.models.running import masks, padding

Tokens = Tensor | Sequence[int] | Sequence[Sequence[int]]
"""Token ids as users have them: one text or a batch."""


class Text(Model):
    """The part of a model that deals in strings.

    ```python
    tokens = model.to_tokens(["The cat", "A much longer text"])   # [batch, pos], padded
    model.to_str_tokens("The cat")                                # ["The", " cat"]
    model.to_string(tokens[0])                                    # "The cat" and its padding
    ```
    """

    tokenizer: Any

    # From strings to tokens.

    def to_tokens(
        self,
        input: str | Sequence[str],  # noqa: A002 - TransformerLens's word
        *,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
    ) -> Tensor:
        """Token ids [batch, pos] of a text or of several, padded to one length, on the model's device.

        Which of them are padding is remembered, also of rows and slices, but not of copies: see `mask_of`.

        Args:
            input: a text, or a list of texts.
            prepend_bos: True begins every text with the tokenizer's BOS token, once; False leaves it
                out; None does what the tokenizer does by itself.
            padding_side: ``left`` or ``right``; by default the tokenizer's.
            truncate: cut texts that are longer than the model's context.
        """
        rows = self._encode(_must_be_texts(input), prepend_bos, truncate)
        return self._as_batch(rows, padding_side)[0]

    def prepare(
        self,
        input: str | Sequence[str] | Tokens,  # noqa: A002
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
    ) -> dict[str, Tensor]:
        """What the module's forward takes for some texts or tokens: ``input_ids``, and what padding makes necessary.

        If nothing is padded that is all. Else ``attention_mask`` comes with it, and ``position_ids`` that
        count from each text's first token if padding is on the left, as far as the model needs them. A
        model that computes something else for a padded text all the same is refused.

        Args:
            input: a text, a list of texts, or tokens [batch, pos] or [pos] (whose padding `mask_of` tells).
            prepend_bos: as in `to_tokens`, for texts.
            padding_side: as in `to_tokens`, for texts.
            truncate: as in `to_tokens`, for texts.
        """
        if isinstance(input, (list, tuple)) and not len(input):
            raise ValueError("there is no text: give at least one.")
        texts = texts_in(input)
        if texts is None:
            tokens = self._tokens(input)
            return self._with_mask(tokens, self.mask_of(tokens))
        rows = self._encode(texts, prepend_bos, truncate)
        if not all(rows):
            raise_empty(texts, rows)
        tokens, mask = self._as_batch(rows, padding_side)
        return {"input_ids": tokens} if mask is None else self._with_mask(tokens, mask)

    def _tokens(self, given: Any) -> Tensor:
        """Tokens as the model takes them: [batch, pos], on its device."""
        tokens = torch.as_tensor(given)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        if tokens.ndim != 2 or tokens.dtype == torch.bool or tokens.is_floating_point():
            raise TypeError(
                f"tokens are integers of shape [batch, pos] or [pos]; got {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}."
            )
        self._must_be_in_vocabulary(tokens)
        self._must_have_positions(tokens.shape[1])
        return masks.moved(tokens, self.device)

    def _must_have_positions(self, length: int) -> None:
        """Refuse more tokens than a model that looks positions up has of them; one that computes them goes on."""
        most = getattr(self._text_config(), "max_position_embeddings", None)
        if not isinstance(most, int) or not 0 < most < length:
            return
        anatomy = getattr(self, "anatomy", None)
        if anatomy is not None and anatomy.pos_embed is not None:
            raise ValueError(
                f"a text has {length} tokens, and the model {most} positions. Cut it: tokens[:, -{most}:] are its last."
            )

    def _must_be_in_vocabulary(self, tokens: Tensor) -> None:
        """Refuse tokens that the model has no embedding for. Tokens on another device are not waited for."""
        config = self._text_config()
        if tokens.is_cpu and tokens.numel() and config is getattr(self.module, "config", None):
            size = getattr(
                config, "vocab_size", None
            )  # beside a vision tower, more ids mean something
            low, high = map(int, tokens.aminmax())
            if isinstance(size, int) and (low < 0 or high >= size):
                raise IndexError(
                    f"token {low if low < 0 else high} is not there: the model has tokens 0 to {size - 1}. "
                    "Are these tokens of another tokenizer? model.to_tokens(text) makes this model's."
                )

    def must_have_image(self, tokens: Tensor) -> None:
        """Refuse tokens that stand for images or sound where there are none: nothing else would take their place."""
        config: Any = getattr(self.module, "config", None)
        for word in ("image", "video", "audio"):
            for name in (f"{word}_token_id", f"{word}_token_index"):
                token = getattr(config, name, None)
                if isinstance(token, int) and bool((tokens == token).any()):
                    raise Unsupported(
                        f"some of the tokens stand for {word}s ({token}, {name}), and no {word} is given, so that they "
                        "would run as words. Give both by keyword, as the processor makes them: "
                        f"model.run_with_hooks(**inputs). What takes texts alone takes no {word}s."
                    )

    def _with_mask(self, tokens: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """The arguments for tokens of which some are padding."""
        if mask is None or bool((mask != 0).all()):
            return {"input_ids": tokens} | ({} if mask is None else {"attention_mask": mask})
        filler = int(tokens[mask == 0][0])
        return {"input_ids": tokens} | padding.arguments(self, mask, filler)

    def mask_of(self, tokens: Tensor) -> Tensor | None:
        """Which of some tokens [batch, pos] are text; None if nothing is padded, or if it cannot be told.

        Known of what `to_tokens` made and of views of that (rows, slices). Of other tokens it is told by a token for
        padding alone, at the ends of a row, if the tokenizer has one: GPT-2's has one token for beginnings, ends and
        padding.
        """
        known = masks.remembered(tokens)
        if known is not None:
            return None if bool(known.all()) else known.long()
        return self._told_apart(tokens)

    def _told_apart(self, tokens: Tensor) -> Tensor | None:
        """The mask of tokens by what stands in them."""
        pad = self._pad_alone()
        if pad is None or tokens.ndim != 2 or not bool((tokens == pad).any()):
            return None
        return masks.told_by(pad, tokens)

    def _pad_alone(self) -> int | None:
        """The token that is for padding and for nothing else."""
        tokenizer = self._tokenizer_or_none()
        others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk")]
        pad: int | None = getattr(tokenizer, "pad_token_id", None)
        return None if pad in others else pad

    def _encode(
        self, texts: Sequence[str], prepend_bos: bool | None, truncate: bool
    ) -> list[list[int]]:
        """Token ids of each text, none of them padded."""
        limit = self._longest_text() if truncate else None
        rows = self._ids(texts, special=True, limit=limit)
        if limit is not None and any(len(row) == limit for row in rows):
            self._tell_of_cuts(texts, rows, limit)
        if prepend_bos is None:
            return rows
        bos = self._bos()
        if prepend_bos:
            if bos is None:
                raise ValueError(
                    "the tokenizer has no BOS token to prepend; leave prepend_bos out to do as the "
                    "tokenizer does."
                )
            return [row if row[:1] == [bos] else [bos, *row][:limit] for row in rows]
        if bos is not None and self._adds(bos):
            return [row[1:] if row[:1] == [bos] else row for row in rows]
        return rows

    def _tell_of_cuts(self, texts: Sequence[str], rows: list[list[int]], limit: int) -> None:
        """Warn of texts that were cut: what comes next is then asked of another text."""
        full = [text for text, row in zip(texts, rows) if len(row) == limit]
        longest = max(map(len, self._ids(full, special=True)))
        if longest > limit:
            warnings.warn(
                f"a text of {longest} tokens is cut to the {limit} that the model has positions for; truncate=False "
                "does not cut.",
                stacklevel=4,
            )

    def _ids(
        self, texts: Sequence[str], *, special: bool, limit: int | None = None
    ) -> list[list[int]]:
        tokenizer = self._tokenizer()
        with _as_it_was(tokenizer):
            encoded = tokenizer(
                list(texts),
                add_special_tokens=special,
                padding=False,
                truncation=limit is not None,
                max_length=limit,
                return_attention_mask=False,
                verbose=False,
            )
        return [list(row) for row in encoded["input_ids"]]

    def _adds(self, bos: int) -> bool:
        """Whether the tokenizer begins texts with this token by itself."""
        return (
            self._ids(["a"], special=True)[0][:1] == [bos] != self._ids(["a"], special=False)[0][:1]
        )

    def _bos(self) -> int | None:
        """What begins a text; BERT's kin call it CLS."""
        tokenizer = self._tokenizer()
        for name in ("bos_token_id", "cls_token_id"):
            found = getattr(tokenizer, name, None)
            if found is not None:
                return int(found)
        return None

    def _as_batch(
        self, rows: Sequence[Sequence[int]], padding_side: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows as one tensor, and a mask if some had to be padded."""
        side = padding_side or getattr(self._tokenizer(), "padding_side", "right")
        if side not in ("left", "right"):
            raise ValueError(f"padding_side is 'left' or 'right'; got {side!r}")
        length = max(map(len, rows))
        if min(map(len, rows)) == length:
            return masks.remember(torch.tensor(rows, dtype=torch.long).to(self.device)), None
        pad = self._filler()
        tokens = torch.full((len(rows), length), pad, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for number, row in enumerate(rows):
            where = slice(length - len(row), length) if side == "left" else slice(len(row))
            tokens[number, where] = torch.tensor(row, dtype=torch.long)
            mask[number, where] = 1
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        return masks.remember(tokens, mask), mask

    def _filler(self) -> int:
        """What padding is filled with: a pad token if there is one, else any the model has."""
        tokenizer: Any = self._tokenizer_or_none()
        text = self._text_config()
        size = getattr(text, "vocab_size", None)
        for owner, name in (
            (tokenizer, "pad"),
            (text, "pad"),
            (tokenizer, "eos"),
            (tokenizer, "bos"),
        ):
            found = getattr(owner, f"{name}_token_id", None)
            if isinstance(found, int) and found >= 0 and (size is None or found < size):
                return found
        return 0

    def _longest_text(self) -> int | None:
        """How many tokens fit: the model's positions, or what the tokenizer knows."""
        known = [
            getattr(self._text_config(), "max_position_embeddings", None),
            getattr(self._tokenizer(), "model_max_length", None),
        ]
        found = [n for n in known if isinstance(n, int) and 0 < n < 10**9]  # 10**30: "no limit"
        return min(found, default=None)

    def _text_config(self) -> Any:
        """The config of the part that reads text; None for a module without one."""
        config: Any = getattr(self.module, "config", None)
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    def _tokenizer_or_none(self) -> Any:
        own = vars(self).get("tokenizer")
        return own if own is not None else getattr(vars(self).get("processor"), "tokenizer", None)

    def _tokenizer(self) -> Any:
        found = self._tokenizer_or_none()
        if found is None:
            raise Unsupported(
                "this model was wrapped without a tokenizer, so it takes tokens and not text. Give it "
                "one: ip.wrap(module, tokenizer=...), or call it with a tensor of token ids."
            )
        return found

    # From tokens to strings.

    def to_string(self, tokens: int | Tokens) -> str | list[str]:
        """The text of tokens: a string for one text [pos], a list of strings for a batch [batch, pos]."""
        rows = _plain(tokens)
        if rows and isinstance(rows[0], list):
            return [self._text(row) for row in rows]
        return self._text(rows)

    def _text(self, row: Sequence[int]) -> str:
        return str(self._tokenizer().decode(list(row), clean_up_tokenization_spaces=False))

    def to_str_tokens(
        self,
        input: str | Sequence[str] | int | Tokens,  # noqa: A002
        prepend_bos: bool | None = None,
    ) -> list[str] | list[list[str]]:
        """Each token as a string: a list for one text, a list of lists for several.

        Args:
            input: a text, a list of texts, or tokens ([pos], or a batch; a batch of one is one text).
            prepend_bos: as in `to_tokens`, for texts.
        """
        if isinstance(input, str):
            return self._pieces(self._encode([input], prepend_bos, truncate=True)[0])
        if is_text(input):
            rows = self._encode(_must_be_texts(input), prepend_bos, truncate=True)
            return [self._pieces(row) for row in rows]
        rows = _plain(input)
        if not rows or not isinstance(rows[0], list):
            return self._pieces(rows)  # type: ignore[arg-type]
        found = [self._pieces(row) for row in rows]
        return found[0] if len(found) == 1 else found

    def _pieces(self, row: Sequence[int]) -> list[str]:
        return [self.to_single_str_token(token) for token in row]

    def to_single_token(self, string: str) -> int:
        """The one token that a string is; an error that shows the pieces if it is none or several."""
        found = self._single(string)
        if found is None:
            row = self._ids([string], special=False)[0]
            spaced = None if string[:1].isspace() else self._single(f" {string}")
            meant = "" if spaced is None else f" Did you mean {' ' + string!r}, which is one?"
            raise ValueError(
                f"{string!r} is {len(row)} tokens and not one: {self._pieces(row)}.{meant} Most tokenizers "
                "have words with the space before them (' Paris'); look with to_str_tokens, or give the number."
            )
        return found

    def _single(self, string: str) -> int | None:
        """The one token that a string is, if it is one."""
        row = self._ids([string], special=False)[0]
        if len(row) == 2 and self._pieces(row)[1] == string:
            return row[1]  # a tokenizer that begins every text with a space has put one too many
        return row[0] if len(row) == 1 else None

    def to_answer(self, string: str, before: Tensor) -> int:
        """The token that a string is as what comes next; an error where the same with a space would.

        ``Paris`` after ``The Eiffel Tower is in`` is hardly meant as it stands, where `` Paris`` is another token. A
        number is always taken as it is.

        Args:
            string: the answer.
            before: the tokens that it is to follow, [pos].
        """
        token = self.to_single_token(string)
        if not string[:1].isalnum():
            return token
        spaced = self._single(f" {string}")
        if spaced in (None, token):
            return token
        last = before[-8:].tolist()  # a character may be several tokens
        text = self._tokenizer().decode(last, skip_special_tokens=True)
        if not text or not (text[-1].isalnum() or text[-1] in ".,;:!?)]}"):
            return token
        if self._ids([f"{text} {string}"], special=False)[0][-1] != spaced:
            return token
        raise ValueError(
            f"the answer {string!r} is to follow {text!r}, and {' ' + string!r} is a token, too, which comes after a "
            f"word. Which is meant? Write {' ' + string!r}; or {token}, the number of the token without a space."
        )

    def to_single_str_token(self, token: int) -> str:
        """One token as a string."""
        tokenizer = self._tokenizer()
        text = self._text([int(token)])
        raw = tokenizer.convert_ids_to_tokens(int(token))
        # Decoders of the sentencepiece kind drop the space with which a text begins.
        cut = isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" ")
        return f" {text}" if cut else text

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tokens,  # noqa: A002
        mode: str = "first",
        prepend_bos: bool | None = None,
    ) -> int:
        """Where a token is in a text.

        Args:
            single_token: the token, as a string or an id.
            input: a text, or the tokens of one.
            mode: ``first`` or ``last``, if it is there more than once.
            prepend_bos: as in `to_tokens`, for a text.
        """
        if mode not in ("first", "last"):
            raise ValueError(f"mode is 'first' or 'last'; got {mode!r}")
        if isinstance(input, str):
            row: list[Any] = self._encode([input], prepend_bos, truncate=True)[0]
        else:
            row = _plain(input)
            if len(row) == 1 and isinstance(row[0], list):
                row = row[0]
        if row and isinstance(row[0], list):
            raise ValueError(f"a position is in one text; got a batch of {len(row)}.")
        token = (
            self.to_single_token(single_token) if isinstance(single_token, str) else single_token
        )
        places = [place for place, other in enumerate(row) if other == token]
        if not places:
            raise ValueError(
                f"the token {self.to_single_str_token(token)!r} is not among {self._pieces(row)}."
            )
        return places[0] if mode == "first" else places[-1]


def encodes(model: Model) -> bool:
    """Whether an encoder reads what is given, and a decoder something else."""
    return bool(getattr(getattr(model.module, "config", None), "is_encoder_decoder", False))


def texts_in(given: object) -> list[str] | None:
    """The texts that something is: one, or a list of them; None if it is anything else."""
    if isinstance(given, str):
        return [given]
    several = isinstance(given, (list, tuple)) and given and all(isinstance(x, str) for x in given)
    return list(given) if several else None  # type: ignore[call-overload]


def is_text(given: object) -> bool:
    """Whether something is a text or several."""
    return texts_in(given) is not None


def _must_be_texts(given: object) -> list[str]:
    texts = texts_in(given)
    if texts is None:
        raise TypeError(f"a text or a list of texts is needed; got {given!r}")
    return texts


def raise_empty(texts: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
    """Say which of some texts has no tokens."""
    empty = next(text for text, row in zip(texts, rows) if not row)
    raise ValueError(
        f"the text {empty!r} has no tokens, so there is nothing to run. With prepend_bos=True it would have one."
    )


def _plain(tokens: Any) -> list[Any]:
    """Tokens as a list of integers, or a list of such lists."""
    if isinstance(tokens, int):
        return [tokens]
    listed = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if isinstance(listed, int):
        return [listed]
    return [row.tolist() if hasattr(row, "tolist") else row for row in listed]


@contextmanager
def _as_it_was(tokenizer: Any) -> Iterator[None]:
    """Put back how a fast tokenizer truncates and pads: calling one changes both."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "enable_truncation"):
        yield
        return
    truncation, filling = backend.truncation, backend.padding
    try:
        yield
    finally:
        if backend.truncation != truncation:
            backend.enable_truncation(**truncation) if truncation else backend.no_truncation()
        if backend.padding != filling:
            backend.enable_padding(**filling) if filling else backend.no_padding()
