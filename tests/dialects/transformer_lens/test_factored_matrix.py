"""`FactoredMatrix` against the dense product, on random shapes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import FactoredMatrix

CHECKED = settings(max_examples=60, deadline=None, derandomize=True)
LEADING = [((), ()), ((3,), (3,)), ((2, 1), (4,)), ((), (2, 3)), ((1,), (3,))]


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device())


@st.composite
def factored(draw: st.DrawFn, *, square: bool = False) -> tuple[FactoredMatrix, Tensor]:
    """A factored matrix of any shape, with the dense one."""
    size = st.integers(1, 6)
    left, middle, right = draw(size), draw(size), draw(size)
    right = left if square else right
    ahead_a, ahead_b = draw(st.sampled_from(LEADING))
    seed = draw(st.integers(0, 99))
    A, B = random(*ahead_a, left, middle, seed=seed), random(*ahead_b, middle, right, seed=seed + 1)
    return FactoredMatrix(A, B), A @ B


@CHECKED
@given(factored())
def test_it_has_the_shape_and_the_numbers_of_the_product(given_: tuple) -> None:
    matrix, dense = given_
    assert matrix.shape == dense.shape
    assert (matrix.ldim, matrix.rdim, matrix.ndim) == (*dense.shape[-2:], dense.ndim)
    assert matrix.has_leading_dims == (dense.ndim > 2)
    assert matrix.pair == (matrix.A, matrix.B)
    torch.testing.assert_close(matrix.AB, dense)
    torch.testing.assert_close(matrix.T.AB, dense.mT)
    torch.testing.assert_close((matrix * 3).AB, dense * 3)
    torch.testing.assert_close((torch.tensor([3.0]).double() * matrix / 4).AB, dense * 0.75)
    torch.testing.assert_close(matrix.norm(), torch.linalg.matrix_norm(dense))
    torch.testing.assert_close(matrix.get_corner(2), dense[(slice(2),) * dense.ndim])


@CHECKED
@given(factored())
def test_the_decomposition_is_that_of_the_product(given_: tuple) -> None:
    matrix, dense = given_
    U, S, V = matrix.svd()
    rank = min(matrix.ldim, matrix.mdim, matrix.rdim)
    assert S.shape[-1] == U.shape[-1] == V.shape[-1] == rank
    expected = torch.linalg.svdvals(dense)
    torch.testing.assert_close(S, expected[..., :rank])
    torch.testing.assert_close(expected[..., rank:], torch.zeros_like(expected[..., rank:]))
    torch.testing.assert_close(U @ torch.diag_embed(S) @ V.mT, dense)
    for vectors in (U, V):
        eye = torch.eye(rank, dtype=torch.float64).expand(*S.shape, rank)
        torch.testing.assert_close(vectors.mT @ vectors, eye)
    torch.testing.assert_close(matrix.Vh, V)
    torch.testing.assert_close(U @ matrix.collapse_l(), dense)
    torch.testing.assert_close(matrix.collapse_r() @ V.mT, dense)
    even = matrix.make_even()
    torch.testing.assert_close(even.AB, dense)
    torch.testing.assert_close(torch.linalg.matrix_norm(even.A), torch.linalg.matrix_norm(even.B))


@CHECKED
@given(factored(square=True))
def test_eigenvalues_are_those_of_the_product_that_are_not_zero(given_: tuple) -> None:
    matrix, dense = given_
    found = matrix.eigenvalues
    assert found.shape == (*dense.shape[:-2], matrix.mdim)
    torch.testing.assert_close(matrix.BA, matrix.B @ matrix.A)
    # Sums of powers tell a set of eigenvalues, whatever their order and however many are zero.
    power = dense
    for exponent in range(1, 5):
        trace = power.diagonal(dim1=-2, dim2=-1).sum(-1)
        torch.testing.assert_close(found.pow(exponent).sum(-1), trace.to(found.dtype))
        power = power @ dense


@CHECKED
@given(factored(), st.integers(1, 6), st.integers(0, 99))
def test_products_are_those_of_the_dense_matrix(given_: tuple, size: int, seed: int) -> None:
    matrix, dense = given_
    right, left = random(matrix.rdim, size, seed=seed), random(size, matrix.ldim, seed=seed)
    torch.testing.assert_close((matrix @ right).AB, dense @ right)
    torch.testing.assert_close((left @ matrix).AB, left @ dense)
    torch.testing.assert_close(matrix @ right[:, 0], dense @ right[:, 0])
    torch.testing.assert_close(left[0] @ matrix, left[0] @ dense)
    other = FactoredMatrix(right, random(size, 4, seed=seed + 1))
    product = matrix @ other
    torch.testing.assert_close(product.AB, dense @ other.AB)
    assert product.mdim == min(matrix.mdim, matrix.rdim, size)
    assert (matrix @ right).mdim == min(matrix.mdim, matrix.rdim)


def one_index(length: int) -> st.SearchStrategy[object]:
    inside = st.integers(-length, length - 1)
    slices = st.builds(slice, st.none() | inside, st.none() | inside, st.sampled_from([None, 2]))
    return inside | slices | st.lists(inside, min_size=1, max_size=3)


@CHECKED
@given(factored(), st.data())
def test_a_part_is_that_of_the_dense_matrix(given_: tuple, data: st.DataObject) -> None:
    matrix, dense = given_
    *ahead, rows, columns = dense.shape
    lead = tuple(
        data.draw(st.integers(-length, length - 1) | st.builds(slice, st.integers(0, length)))
        for length in ahead
    )
    row, column = data.draw(one_index(rows)), data.draw(one_index(columns))
    # An integer stays a dimension, which for a dense matrix is a list of one.
    listed = [[item] if isinstance(item, int) else item for item in (row, column)]
    expected = dense[lead][..., listed[0], :][..., listed[1]]
    torch.testing.assert_close(matrix[(*lead, row, column)].AB, expected)
    torch.testing.assert_close(matrix[..., row, column].AB[lead], expected)
    torch.testing.assert_close(matrix[lead].AB, dense[lead])
    torch.testing.assert_close(matrix[..., column].AB, dense[..., listed[1]])


def test_leading_dimensions_take_what_torch_takes() -> None:
    matrix = FactoredMatrix(random(3, 4, 5, 2), random(3, 4, 2, 6))
    dense = matrix.AB
    mask = torch.tensor([[True, False, True, False]] * 3)
    pairs = ([0, 2], [1, 3])
    for index in (None, 1, [2, 0], torch.tensor([2, 0]), mask[0:1, :3][0], mask, pairs, (1, None)):
        torch.testing.assert_close(matrix[index].AB, dense[index])
    torch.testing.assert_close(matrix[[0, 2], :, [1, 3]].AB, dense[[0, 2]][:, :, [1, 3]])
    assert matrix.unsqueeze(0).shape == (1, 3, 4, 5, 6)
    torch.testing.assert_close(matrix.unsqueeze(-3).AB, dense.unsqueeze(-3))


def test_the_product_is_never_formed() -> None:
    big = 200_000  # squared, it would need 160 GB
    matrix = FactoredMatrix(torch.randn(big, 2), torch.randn(2, big))
    assert matrix.S.shape == (2,)
    torch.testing.assert_close(matrix.norm(), matrix.S.square().sum().sqrt())
    assert matrix.eigenvalues.shape == (2,)
    assert matrix[[5, 7], :3].AB.shape == (2, 3)
    assert (matrix @ torch.ones(big)).shape == (big,)
    assert (matrix @ matrix).make_even().A.shape == (big, 2)
    assert matrix.get_corner().shape == (3, 3)


def test_a_decomposition_follows_its_factors() -> None:
    A = random(5, 3).requires_grad_()
    matrix = FactoredMatrix(A, random(3, 4, seed=1))
    with torch.no_grad():
        before = matrix.S.clone()
        assert matrix.U is matrix.U  # kept
    matrix.S.sum().backward()  # what was kept without gradients is not used here
    (expected,) = torch.autograd.grad(torch.linalg.svdvals(A @ matrix.B)[:3].sum(), A)
    torch.testing.assert_close(A.grad, expected)
    with torch.no_grad():
        A.mul_(2)
        torch.testing.assert_close(matrix.S, 2 * before)
    with torch.inference_mode():
        assert FactoredMatrix(A * 1, matrix.B).S.shape == (3,)


def test_half_precision_is_decomposed_in_single() -> None:
    matrix = FactoredMatrix(random(4, 2).bfloat16(), random(2, 4).bfloat16())
    dense = matrix.A.float() @ matrix.B.float()
    torch.testing.assert_close(matrix.S, torch.linalg.svdvals(dense)[:2])
    assert matrix.eigenvalues.dtype == torch.complex64
    assert matrix.norm().dtype == torch.float32


def test_the_weights_of_a_model_can_be_factors_and_operands() -> None:
    model = ip.load("pocket")
    OV = FactoredMatrix(model.W_V, model.W_O)
    assert repr(OV) == "FactoredMatrix(shape=[7, 6, 192, 192], mdim=32)"
    full = model.W_E @ OV[2, 3] @ model.W_U
    expected = model.W_E[:4] @ model.W_V[2, 3] @ model.W_O[2, 3] @ model.W_U[:, :4]
    torch.testing.assert_close(full[:4, :4].AB, expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_said() -> None:
    matrix = FactoredMatrix(random(2, 5, 3), random(3, 4))
    cases = [
        (
            lambda: FactoredMatrix(random(5, 3), random(4, 4)),
            "no product of factors [5, 3] and [4, 4]",
        ),
        (lambda: FactoredMatrix(random(3), random(3, 4)), "no product of factors [3] and [3, 4]"),
        (
            lambda: FactoredMatrix(random(2, 5, 3), random(3, 3, 4)),
            "leading dimensions of the factors",
        ),
        (lambda: matrix @ random(5, 4), "cannot multiply [2, 5, 4] @ [5, 4]"),
        (lambda: matrix @ random(5), "cannot multiply [2, 5, 4] @ [5]"),
        (lambda: random(4, 4) @ matrix, "cannot multiply [4, 4] @ [2, 5, 4]"),
        (lambda: random(7, 4, 5) @ matrix, "leading dimensions of the matrices [7, 4, 5]"),
        (lambda: matrix * random(4), "* takes one number; got a tensor [4]"),
        (lambda: matrix.BA, "B @ A needs a square matrix; this one is [2, 5, 4]"),
        (lambda: matrix[0, 5], "there is no row 5: the matrix has 5"),
        (lambda: matrix[..., -5], "there is no column -5: the matrix has 4"),
        (lambda: matrix[0, 0, 0, 0], "4 indices are too many for a matrix [2, 5, 4]"),
        (lambda: matrix[0, [[0, 1]]], "rows are chosen by a list of them"),
        (lambda: matrix[0, None, 1], "None does not index one dimension"),
        (lambda: matrix[torch.ones(2, 5) > 0], "does not index one dimension"),
        (lambda: matrix.unsqueeze(2), "a new one goes to 0 ... 1, or to -4 ... -3"),
    ]
    for wrong, text in cases:
        with pytest.raises((ValueError, IndexError), match=re.escape(text)):
            wrong()
    with pytest.raises(TypeError):
        matrix @ 3
