"""Small functions of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.factored_matrix import FactoredMatrix

if TYPE_CHECKING:
    import numpy as np

Value = TypeVar("Value")


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """A numpy array of a tensor on any device, with gradients or not; of an array, list, number or string too.

    bfloat16, which numpy does not have, becomes float32.
    """
    import numpy as np

    if isinstance(tensor, Tensor):
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, (list, tuple)):
        inner = (list, tuple, Tensor)
        return np.array([to_numpy(item) if isinstance(item, inner) else item for item in tensor])
    if isinstance(tensor, (bool, int, float, complex, str, np.generic)):
        return np.array(tensor)
    raise ValueError(
        f"to_numpy takes a tensor, an array, a list, a tuple, a number or a string; got "
        f"{type(tensor).__name__}"
    )


@overload
def get_corner(tensor: Tensor, n: int = 3) -> Tensor: ...


@overload
def get_corner(tensor: FactoredMatrix, n: int = 3) -> FactoredMatrix: ...


def get_corner(tensor: Any, n: int = 3) -> Any:
    """The first ``n`` of each dimension, to look at."""
    return tensor[(slice(n),) * tensor.ndim]


def remove_batch_dim(tensor: Tensor) -> Tensor:
    """Without the first dimension, if that is of length 1."""
    return tensor[0] if tensor.ndim and tensor.shape[0] == 1 else tensor


def transpose(tensor: Tensor) -> Tensor:
    """With the last two dimensions exchanged."""
    return tensor.transpose(-1, -2)


def is_square(x: Tensor) -> bool:
    """Whether this is one matrix with as many rows as columns."""
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def is_lower_triangular(x: Tensor) -> bool:
    """Whether this is one square matrix with nothing above its diagonal."""
    return is_square(x) and bool((x.triu(1) == 0).all())


def repeat_along_head_dimension(tensor: Tensor, n_heads: int, clone_tensor: bool = True) -> Tensor:
    """A stream [batch, pos, d_model] once for each head, [batch, pos, head, d_model].

    Args:
        tensor: the stream.
        n_heads: how many heads.
        clone_tensor: give each head memory of its own, so that one can be changed in place.
    """
    if tensor.ndim != 3:
        raise ValueError(f"a stream is [batch, pos, d_model]; got {list(tensor.shape)}")
    repeated = tensor[:, :, None].expand(-1, -1, n_heads, -1)
    return repeated.clone() if clone_tensor else repeated


def get_cumsum_along_dim(tensor: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """Sums up to each place along a dimension; from the other end with ``reverse``."""
    if not reverse:
        return tensor.cumsum(dim)
    return tensor.flip(dim).cumsum(dim).flip(dim)


def get_offset_position_ids(past_kv_pos_offset: int, attention_mask: Tensor) -> Tensor:
    """The position of each token in its text: padding on the left does not count, padding on the right stays.

    Args:
        past_kv_pos_offset: how many positions were run before; those are left out of the result.
        attention_mask: 1 for text and 0 for padding, [batch, past + pos].
    """
    positions = attention_mask.cumsum(-1) - 1
    return positions.clamp(min=0)[:, past_kv_pos_offset:]


def get_attention_mask(
    tokenizer: Any, tokens: Tensor, prepend_bos: bool, padding_side: str | None = None
) -> Tensor:
    """1 for text and 0 for padding, of the shape of ``tokens``. Only pad tokens at the padded end are padding.

    Args:
        tokenizer: what the tokens are from; without one all is text.
        tokens: token ids [batch, pos].
        prepend_bos: whether texts begin with a BOS token. Where that is the pad token too, the last
            one before a text is its BOS.
        padding_side: ``left`` or ``right``; by default the tokenizer's.
    """
    mask = torch.ones_like(tokens)
    pad = None if tokenizer is None else tokenizer.pad_token_id
    if pad is None:
        return mask
    side = padding_side or tokenizer.padding_side
    if side not in ("left", "right"):
        raise ValueError(f"padding_side is 'left' or 'right'; got {side!r}")
    reached = get_cumsum_along_dim((tokens != pad).long(), -1, reverse=side == "right") > 0
    if side == "left" and prepend_bos and tokenizer.bos_token_id == pad:
        # A text begins one before its first other token, or at the end if it has none.
        following = torch.ones_like(reached)
        following[..., :-1] = reached[..., 1:]
        reached = reached | following
    mask[~reached] = 0
    return mask


def check_structure(t1: Tensor, t2: Tensor, *, verbose: bool = False) -> None:
    """Print whether two matrices rise and fall alike: from row to row and from column to column.

    Args:
        t1: a matrix.
        t2: one of the same shape.
        verbose: print also which entries differ, between which rows and columns.
    """
    if t1.ndim != 2 or t1.shape != t2.shape:
        raise ValueError(
            f"two matrices of one shape are needed; got {list(t1.shape)} and {list(t2.shape)}"
        )
    passed = True
    for what, a, b in (("row", t1, t2), ("column", t1.T, t2.T)):
        falls_a, falls_b = a[:-1] >= a[1:], b[:-1] >= b[1:]
        wrong = (falls_a != falls_b).any(-1).nonzero().flatten().tolist()
        for at in wrong if verbose else ():
            print(f"{what}s {at} and {at + 1}, which entries do not rise:")  # noqa: T201 - its purpose
            print(f"  t1: {falls_a[at].tolist()}\n  t2: {falls_b[at].tolist()}")  # noqa: T201
        if wrong:
            passed = False
            print(f"{what} mismatch: {wrong}")  # noqa: T201
    if passed:
        print("PASSED")  # noqa: T201


def composition_scores(
    left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True
) -> Tensor:
    """How much of two matrices' sizes is left in their product: ``|L R| / (|L| |R|)``, Frobenius norms.

    Args:
        left: matrices such as the OV circuits of earlier heads, [..., a, b].
        right: matrices such as those of later heads, [..., b, c].
        broadcast_dims: every left one with every right one, [*leading of left, *leading of right];
            otherwise leading dimensions go together as in a product.
    """
    if left.rdim != right.ldim:
        raise ValueError(
            f"left {list(left.shape)} and right {list(right.shape)} do not compose: left.rdim is not "
            "right.ldim."
        )
    if broadcast_dims:
        for _ in range(right.ndim - 2):
            left = left.unsqueeze(left.ndim - 2)
        for _ in range(left.ndim - right.ndim):
            right = right.unsqueeze(0)
    return (left @ right).norm() / left.norm() / right.norm()


def get_matrix_corner(matrix: FactoredMatrix | Tensor, n: int = 3) -> Tensor:
    """The first ``n`` of each dimension of a matrix, factored or not, as a tensor."""
    return matrix.get_corner(n) if isinstance(matrix, FactoredMatrix) else get_corner(matrix, n)


def filter_dict_by_prefix(dictionary: dict[str, Value], prefix: str) -> dict[str, Value]:
    """What is below a prefix (``blocks.0``), by the rest of its name."""
    start = prefix if prefix.endswith(".") else f"{prefix}."
    found = dictionary.items()
    return {name.removeprefix(start): value for name, value in found if name.startswith(start)}
