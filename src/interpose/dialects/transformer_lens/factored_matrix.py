"""`FactoredMatrix`: a product of two matrices that is never multiplied out.

A head's OV circuit is ``W_V @ W_O``: d_model by d_model, but of rank d_head. Kept as its two factors
it is small, products with it are cheap, and its singular values and eigenvalues come from matrices
of the inner size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

Decomposition = tuple[Tensor, Tensor, Tensor]


class FactoredMatrix:
    """The matrix ``A @ B``, kept as ``A`` [..., ldim, mdim] and ``B`` [..., mdim, rdim].

    ```python
    OV = FactoredMatrix(model.W_V, model.W_O)   # [layer, head, d_model, d_model]
    OV[3, 5].S                                  # singular values of one head's circuit
    (OV @ model.W_U).norm()                     # [layer, head]
    OV[3, 5].AB                                 # the matrix itself
    ```

    Products with tensors and with other factored matrices stay factored; with a vector they are a
    tensor. Leading dimensions of the factors are broadcast against each other, as by ``@``.

    Args:
        A: the left factor.
        B: the right factor.
    """

    def __init__(self, A: Tensor, B: Tensor) -> None:
        if A.ndim < 2 or B.ndim < 2 or A.shape[-1] != B.shape[-2]:
            raise ValueError(
                f"no product of factors {_shown(A)} and {_shown(B)}: a FactoredMatrix needs "
                "[..., ldim, mdim] and [..., mdim, rdim]. Transpose one, or give them in the other order."
            )
        leading = _broadcast(A.shape[:-2], B.shape[:-2], "factors", A, B)
        self.A = A.broadcast_to(leading + A.shape[-2:])
        self.B = B.broadcast_to(leading + B.shape[-2:])
        self.ldim, self.mdim, self.rdim = A.shape[-2], A.shape[-1], B.shape[-1]
        self.shape = torch.Size((*leading, self.ldim, self.rdim))
        self.has_leading_dims = len(leading) > 0
        self._decomposed: tuple[object, Decomposition] | None = None

    def __repr__(self) -> str:
        return f"FactoredMatrix(shape={list(self.shape)}, mdim={self.mdim})"

    @property
    def ndim(self) -> int:
        """How many dimensions the product has."""
        return len(self.shape)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """The two factors, ``(A, B)``."""
        return self.A, self.B

    @property
    def AB(self) -> Tensor:
        """The product itself, [..., ldim, rdim]."""
        return self.A @ self.B

    @property
    def BA(self) -> Tensor:
        """The factors in the other order, [..., mdim, mdim]; it has the product's eigenvalues."""
        if self.ldim != self.rdim:
            raise ValueError(
                f"B @ A needs a square matrix; this one is {list(self.shape)}. Singular values (.S) "
                "exist for any shape."
            )
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        """The transpose, [..., rdim, ldim]."""
        return FactoredMatrix(self.B.transpose(-2, -1), self.A.transpose(-2, -1))

    # Products.

    @overload
    def __matmul__(self, other: FactoredMatrix) -> FactoredMatrix: ...

    @overload
    def __matmul__(self, other: Tensor) -> Any: ...

    def __matmul__(self, other: Tensor | FactoredMatrix) -> Any:
        if isinstance(other, FactoredMatrix):
            self._check_meets(self, other)
            if self.rdim < min(self.mdim, other.mdim):
                return FactoredMatrix(self.AB, other.AB)
            middle = self.B @ other.A
            if self.mdim > other.mdim:
                return FactoredMatrix(self.A @ middle, other.B)
            return FactoredMatrix(self.A, middle @ other.B)
        if not isinstance(other, Tensor):
            return NotImplemented
        self._check_meets(self, other)
        if other.ndim == 1:
            return (self.A @ (self.B @ other)[..., None])[..., 0]
        if self.rdim > self.mdim:
            return FactoredMatrix(self.A, self.B @ other)
        return FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: Tensor | FactoredMatrix) -> Any:
        if isinstance(other, FactoredMatrix):  # only if called by name: `@` asks the left one
            return other @ self
        if not isinstance(other, Tensor):
            return NotImplemented
        self._check_meets(other, self)
        if other.ndim == 1:
            return ((other @ self.A)[..., None, :] @ self.B)[..., 0, :]
        if self.ldim > self.mdim:
            return FactoredMatrix(other @ self.A, self.B)
        return FactoredMatrix(other, self.AB)

    @staticmethod
    def _check_meets(left: Tensor | FactoredMatrix, right: Tensor | FactoredMatrix) -> None:
        rows = right.shape[0] if right.ndim == 1 else (right.shape[-2] if right.ndim else None)
        if left.ndim == 0 or rows is None or left.shape[-1] != rows:
            raise ValueError(
                f"cannot multiply {_shown(left)} @ {_shown(right)}: the last dimension of the left "
                "one is not the number of rows of the right one."
            )
        _broadcast(left.shape[:-2], right.shape[:-2], "matrices", left, right)

    def __mul__(self, scalar: float | Tensor) -> FactoredMatrix:
        return FactoredMatrix(self.A * self._scalar(scalar, "*"), self.B)

    def __rmul__(self, scalar: float | Tensor) -> FactoredMatrix:
        return self * scalar

    def __truediv__(self, scalar: float | Tensor) -> FactoredMatrix:
        return FactoredMatrix(self.A / self._scalar(scalar, "/"), self.B)

    def _scalar(self, given: float | Tensor, sign: str) -> float | Tensor:
        if isinstance(given, Tensor):
            if given.numel() != 1:
                raise ValueError(
                    f"{sign} takes one number; got a tensor {_shown(given)}. For a matrix product "
                    "write @; for anything elementwise, take the product itself: .AB"
                )
            return given.reshape(())
        return given

    # Decompositions. Half precision is computed in float32: LAPACK has nothing for it.

    def svd(self) -> Decomposition:
        """``U`` [..., ldim, k], ``S`` [..., k], ``V`` [..., rdim, k] with ``U @ diag(S) @ V.T`` the matrix.

        ``k`` is the smallest of the three dimensions. The product is not formed: QR of both factors
        leaves a matrix of the inner size to decompose.
        """
        state = _state_of(self.A, self.B)
        if self._decomposed is None or state is None or self._decomposed[0] != state:
            left, from_left = torch.linalg.qr(_wide(self.A))
            right, from_right = torch.linalg.qr(_wide(self.B).transpose(-2, -1))
            core = from_left @ from_right.transpose(-2, -1)
            U, S, Vh = torch.linalg.svd(core, full_matrices=False)
            self._decomposed = state, (left @ U, S, right @ Vh.mH)
        return self._decomposed[1]

    @property
    def U(self) -> Tensor:
        """Left singular vectors, [..., ldim, k]."""
        return self.svd()[0]

    @property
    def S(self) -> Tensor:
        """Singular values, largest first, [..., k]."""
        return self.svd()[1]

    @property
    def V(self) -> Tensor:
        """Right singular vectors as columns, [..., rdim, k]."""
        return self.svd()[2]

    @property
    def Vh(self) -> Tensor:
        """The same as `V`: columns, whatever the name says. TransformerLens has it so, and code relies on it."""
        return self.V

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of a square matrix, complex, [..., mdim]: all of those that are not zero."""
        found: Tensor = torch.linalg.eigvals(_wide(self.BA))
        return found

    def norm(self) -> Tensor:
        """The Frobenius norm of each matrix, [...]."""
        from_left = torch.linalg.qr(_wide(self.A)).R
        from_right = torch.linalg.qr(_wide(self.B).transpose(-2, -1)).R
        core: Tensor = torch.linalg.matrix_norm(from_left @ from_right.transpose(-2, -1))
        return core

    def make_even(self) -> FactoredMatrix:
        """The same matrix with factors of equal size: ``U sqrt(S)`` and ``sqrt(S) V.T``."""
        U, S, V = self.svd()
        root = S.sqrt()
        return FactoredMatrix(U * root[..., None, :], root[..., :, None] * V.transpose(-2, -1))

    def collapse_l(self) -> Tensor:
        """``S V.T`` [..., k, rdim]: the matrix up to a rotation on the left, with the same row products."""
        _, S, V = self.svd()
        return S[..., :, None] * V.transpose(-2, -1)

    def collapse_r(self) -> Tensor:
        """``U S`` [..., ldim, k]: the matrix up to a rotation on the right, with the same column products."""
        U, S, _ = self.svd()
        return U * S[..., None, :]

    # Parts.

    def get_corner(self, k: int = 3) -> Tensor:
        """The first ``k`` of each dimension of the product, to look at."""
        corner = self[(slice(k),) * self.ndim]
        return corner.AB

    def unsqueeze(self, k: int) -> FactoredMatrix:
        """With a new leading dimension of length 1 at ``k``, as `torch.unsqueeze` counts."""
        at = k if k >= 0 else k + self.ndim + 1
        if not 0 <= at <= self.ndim - 2:
            raise IndexError(
                f"unsqueeze({k}) is not among the leading dimensions of {list(self.shape)}; a new one "
                f"goes to 0 ... {self.ndim - 2}, or to {-self.ndim - 1} ... -3."
            )
        return FactoredMatrix(self.A.unsqueeze(at), self.B.unsqueeze(at))

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """A part, still factored. A single row or column keeps its dimension, with length 1."""
        leading, row, column = self._split(index if isinstance(index, tuple) else (index,))
        A, B = self.A[leading], self.B[leading]  # one by one, so that lists do not pair up
        A = A[..., _along(row, self.ldim, "row"), :]
        B = B[..., :, _along(column, self.rdim, "column")]
        return FactoredMatrix(A, B)

    def _split(self, index: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, Any]:
        """An index in three: for the leading dimensions, for rows, for columns."""
        used = sum(_dimensions(item) for item in index)
        dots = [place for place, item in enumerate(index) if item is Ellipsis]
        if used > self.ndim or len(dots) > 1:
            raise IndexError(f"{len(index)} indices are too many for a matrix {list(self.shape)}.")
        at = dots[0] if dots else len(index)
        index = (*index[:at], *[slice(None)] * (self.ndim - used), *index[at + 1 :])
        leading: list[Any] = []
        matrix: list[Any] = []
        reached = 0
        for item in index:
            (matrix if reached >= self.ndim - 2 else leading).append(item)
            reached += _dimensions(item)
            straddles = not matrix and reached > self.ndim - 2
            if straddles or (matrix and _dimensions(item) != 1):
                raise IndexError(
                    f"{item!r} does not index one dimension of a matrix {list(self.shape)}: rows and "
                    "columns take an integer, a slice or a list. For anything else take .AB first."
                )
        return tuple(leading), matrix[0], matrix[1]


def _shown(value: Tensor | FactoredMatrix) -> str:
    return str(list(value.shape))


def _broadcast(
    left: Sequence[int],
    right: Sequence[int],
    what: str,
    a: Tensor | FactoredMatrix,
    b: Tensor | FactoredMatrix,
) -> torch.Size:
    """Two shapes of leading dimensions as one."""
    try:
        return torch.Size(torch.broadcast_shapes(left, right))
    except RuntimeError:
        raise ValueError(
            f"the leading dimensions of the {what} {_shown(a)} and {_shown(b)} do not go together: "
            "each pair must be equal, or one of them 1."
        ) from None


def _wide(value: Tensor) -> Tensor:
    half = value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def _state_of(*factors: Tensor) -> object:
    """What a decomposition is valid for; None if changes of the factors cannot be seen."""
    if any(factor.is_inference() for factor in factors):
        return None
    return torch.is_grad_enabled(), *(factor._version for factor in factors)


def _dimensions(item: Any) -> int:
    """How many dimensions an index takes up."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, bool):
        raise IndexError("a FactoredMatrix has no use for True or False as an index.")
    if getattr(item, "dtype", None) in (torch.bool, bool):
        return int(item.ndim)
    return 1


def _along(index: Any, length: int, what: str) -> Any:
    """An index of rows or columns that leaves the dimension there."""
    if isinstance(index, slice):
        return index
    chosen = torch.as_tensor(index)
    if chosen.ndim > 1:
        raise IndexError(
            f"{what}s are chosen by a list of them; got an index {list(chosen.shape)}."
        )
    if chosen.ndim == 0:
        at = int(chosen)
        if not -length <= at < length:
            raise IndexError(f"there is no {what} {at}: the matrix has {length}.")
        return slice(at % length, at % length + 1)
    return chosen
