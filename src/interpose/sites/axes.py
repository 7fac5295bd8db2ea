"""Which sequence each axis of a value counts. Everything that speaks of positions asks here, and nowhere else.

A text is counted twice in attention: by its queries, which are the tokens of this forward pass, and by
its keys, which are all tokens that can be looked at, those a cache has kept too. Keys of cross attention
are an encoder's positions. Towers beside the text (an encoder, images, sound) count sequences of their
own, which come whole in every pass.
"""

from __future__ import annotations

_COUNTS = {
    "pos": "queries",
    "query": "queries",
    "key": "keys",
    "encoder_pos": "encoder",
    "patch": "patches",
    "frame": "audio",
}
_TOWERS = {"encoder": "encoder", "vision": "patches", "audio": "audio"}
TEXT = ("queries", "keys")
"""The sequences that are the text: what is generated goes on from them."""


def sequence_of(axis: str, site: str = "", *, encodes: bool = True) -> str | None:
    """What an axis of a site's value counts: queries, keys, encoder, patches, audio; None if no positions.

    Args:
        axis: its name.
        site: the canonical name of the site.
        encodes: whether an encoder reads something else than the text that is written.
    """
    found = _COUNTS.get(axis)
    tower = _TOWERS.get(site.partition(".")[0].rstrip("_0123456789"))
    own = tower is not None and (encodes or tower != "encoder")
    return tower if found in TEXT and own else found


def position_axis(axes: tuple[str, ...]) -> int | None:
    """The axis that ``pos`` of an edit means: the first that counts a sequence."""
    return next((at for at, name in enumerate(axes) if name in _COUNTS), None)


def key_axis(axes: tuple[str, ...]) -> int | None:
    """The axis of what is looked at, in scores and patterns: the one after the queries'."""
    if "query" not in axes:
        return None
    return next((at for at, name in enumerate(axes) if name in ("key", "encoder_pos")), None)


def told_by_size(sequence: str | None, size: int, offset: int, length: int | None) -> str | None:
    """What an axis counts in a pass that goes on from a cache: keys, if it has more entries than the pass has tokens.

    Latent attention keeps what keys and values are made of, and makes those of all positions in every pass.

    Args:
        sequence: what it counts in a pass over a whole text.
        size: how many entries it has.
        offset: the position of the forward pass's first token.
        length: how many tokens the pass has, if that is known.
    """
    return "keys" if sequence == "queries" and offset and size > (length or size) else sequence


def first_position(
    sequence: str | None, size: int, offset: int, length: int | None, *, last: bool = False
) -> int:
    """The position of an axis's first entry.

    Args:
        sequence: what it counts.
        size: how many entries it has.
        offset: the position of the forward pass's first token.
        length: how many tokens the pass has, if that is known.
        last: whether the value may have the last tokens of the pass only.
    """
    if sequence not in TEXT:
        return 0
    end = offset + (size if length is None else length)
    if sequence == "keys":
        return max(0, end - size)  # a sliding cache has dropped some; a static one has room left
    return max(offset, end - size) if last else offset
