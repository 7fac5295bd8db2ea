"""The small functions, against hand-written loops and torch's own."""

from __future__ import annotations

import math
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import interpose as ip
from interpose.dialects.transformer_lens import FactoredMatrix, HookedTransformer, utilities, utils
from interpose.errors import Unsupported

CHECKED = settings(max_examples=60, deadline=None, derandomize=True)


# Names.


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (("q", 3), "blocks.3.attn.hook_q"),
        (("k", 6, "a"), "blocks.6.attn.hook_k"),
        (("k6",), "blocks.6.attn.hook_k"),
        (("value", 0), "blocks.0.attn.hook_v"),
        (("z", -1), "blocks.-1.attn.hook_z"),
        (("pattern", 1, "attn"), "blocks.1.attn.hook_pattern"),
        (("attn", 1), "blocks.1.attn.hook_pattern"),
        (("pattern", 1, "ln1"), "blocks.1.attn.hook_pattern"),
        (("attn_logits", 1), "blocks.1.attn.hook_attn_scores"),
        (("result", "2"), "blocks.2.attn.hook_result"),
        (("post", 3), "blocks.3.mlp.hook_post"),
        (("post", 0, "mlp"), "blocks.0.mlp.hook_post"),
        (("mlp_pre", 0), "blocks.0.mlp.hook_pre"),
        (("mid", 2), "blocks.2.mlp.hook_mid"),
        (("resid_pre", 3), "blocks.3.hook_resid_pre"),
        (("resid_post3",), "blocks.3.hook_resid_post"),
        (("hook_resid_mid", 3, "b"), "blocks.3.hook_resid_mid"),
        (("attn_out", 2), "blocks.2.hook_attn_out"),
        (("mlp_out", 2), "blocks.2.hook_mlp_out"),
        (("q_input", 2), "blocks.2.hook_q_input"),
        (("out", 2, "attention"), "blocks.2.attn.hook_out"),
        (("scale", 2, "ln1"), "blocks.2.ln1.hook_scale"),
        (("scale4ln2",), "blocks.4.ln2.hook_scale"),
        (("normalized", 27, "ln2"), "blocks.27.ln2.hook_normalized"),
        (("scale",), "ln_final.hook_scale"),
        (("normalized",), "ln_final.hook_normalized"),
        (("embed",), "hook_embed"),
        (("pos_embed",), "hook_pos_embed"),
        (("pattern",), "attn.hook_pattern"),
        (("resid_pre",), "hook_resid_pre"),
        (("blocks.3.hook_resid_pre",), "blocks.3.hook_resid_pre"),
        (("hook_embed",), "hook_embed"),
    ],
)
def test_short_forms_become_names(asked: tuple[Any, ...], name: str) -> None:
    assert utilities.get_act_name(*asked) == name


def test_the_names_are_sites_of_a_model() -> None:
    model = ip.load("pocket")
    names = "q k v z pattern attn_scores pre post resid_pre resid_mid resid_post attn_out mlp_out"
    asked = [utilities.get_act_name(name, 3) for name in names.split()]
    asked += [utilities.get_act_name(name) for name in ("embed", "pos_embed", "scale")]
    _, cache = model.run_with_cache("The cat", names_filter=asked)
    assert set(cache) == set(asked)


# Tensors.


def test_everything_becomes_numpy() -> None:
    weight = nn.Parameter(torch.tensor([1.5, 2.0]))
    for given_ in (
        weight,
        weight.bfloat16(),
        [1.5, 2.0],
        (1.5, 2.0),
        np.array([1.5, 2.0]),
        list(weight),
    ):
        found = utilities.to_numpy(given_)
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, [1.5, 2.0])
    assert utilities.to_numpy(np.float32(3)).shape == utilities.to_numpy(True).shape == ()
    np.testing.assert_array_equal(utilities.to_numpy(torch.tensor([1 + 2j]).conj()), [1 - 2j])
    with pytest.raises(ValueError, match="got range"):
        utilities.to_numpy(range(3))


def test_parts_and_shapes() -> None:
    value = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(utilities.get_corner(value, 2), value[:2, :2, :2])
    matrix = FactoredMatrix(torch.randn(5, 2), torch.randn(2, 5))
    torch.testing.assert_close(utilities.get_corner(matrix).AB, matrix.AB[:3, :3])
    torch.testing.assert_close(utilities.get_matrix_corner(matrix, 2), matrix.AB[:2, :2])
    assert torch.equal(utilities.get_matrix_corner(value, 1), value[:1, :1, :1])
    assert torch.equal(utilities.remove_batch_dim(value[:1]), value[0])
    assert utilities.remove_batch_dim(value) is value
    assert torch.equal(utilities.transpose(value), value.permute(0, 2, 1))
    assert utilities.is_square(value[0, :, :3])
    assert not utilities.is_square(value[0])
    assert not utilities.is_square(value[:, :2, :2])
    assert utilities.is_lower_triangular(torch.ones(3, 3).tril())
    assert not utilities.is_lower_triangular(torch.ones(3, 3).tril(1))
    heads = utilities.repeat_along_head_dimension(value, 5)
    assert heads.shape == (2, 3, 5, 4)
    heads[:, :, 0] = 0  # each head has its own memory
    assert torch.equal(heads[:, :, 3], torch.arange(24.0).reshape(2, 3, 4))
    assert utilities.repeat_along_head_dimension(value, 5, clone_tensor=False).stride(2) == 0
    backwards = utilities.get_cumsum_along_dim(value, 1, reverse=True)
    assert torch.equal(backwards[:, 1], value[:, 1] + value[:, 2])
    assert torch.equal(utilities.get_cumsum_along_dim(value, 1), value.cumsum(1))
    named = {"blocks.1.w": 1, "blocks.10.w": 2, "blocks.1": 3, "blocks.1.attn.q": 4}
    for prefix in ("blocks.1", "blocks.1."):
        assert utilities.filter_dict_by_prefix(named, prefix) == {"w": 1, "attn.q": 4}


def test_structure_is_compared_between_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    rising = torch.tensor([[0, 1, 2], [1, 2, 3]])
    utilities.check_structure(rising, rising**2)
    assert capsys.readouterr().out == "PASSED\n"
    utilities.check_structure(rising, torch.tensor([[0, 1, 2], [1, 0, 3]]), verbose=True)
    assert capsys.readouterr().out == (
        "rows 0 and 1, which entries do not rise:\n"
        "  t1: [False, False, False]\n  t2: [False, True, False]\nrow mismatch: [0]\n"
        "columns 0 and 1, which entries do not rise:\n"
        "  t1: [False, False]\n  t2: [False, True]\ncolumn mismatch: [0]\n"
    )
    with pytest.raises(ValueError, match=re.escape("got [2, 3] and [2, 2]")):
        utilities.check_structure(rising, rising[:, :2])


def test_composition_is_a_ratio_of_norms() -> None:
    left = FactoredMatrix(torch.randn(2, 3, 5, 2), torch.randn(2, 3, 2, 6))
    right = FactoredMatrix(torch.randn(4, 6, 2), torch.randn(4, 2, 5))
    scores = utilities.composition_scores(left, right)
    assert scores.shape == (2, 3, 4)
    for layer, head, later in np.ndindex(2, 3, 4):
        a, b = left.AB[layer, head], right.AB[later]
        torch.testing.assert_close(
            scores[layer, head, later], (a @ b).norm() / (a.norm() * b.norm())
        )
    paired = utilities.composition_scores(left[0], right[:3], broadcast_dims=False)
    torch.testing.assert_close(paired, scores[0, range(3), range(3)])
    with pytest.raises(ValueError, match=r"left.rdim is not\s+right.ldim"):
        utilities.composition_scores(right, right)


# Padding. The oracle is a loop over one row.


def mask_by_hand(row: list[int], pad: int, bos: int, prepend_bos: bool, side: str) -> list[int]:
    row = row if side == "left" else row[::-1]
    start = next((at for at, token in enumerate(row) if token != pad), len(row))
    if side == "left" and prepend_bos and bos == pad and start > 0:
        start -= 1
    mask = [0] * start + [1] * (len(row) - start)
    return mask if side == "left" else mask[::-1]


TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=3)
SIDES = st.sampled_from(["left", "right"])


@CHECKED
@given(TOKENS, st.integers(0, 1), st.booleans(), SIDES, st.booleans())
def test_padding_is_at_one_end(
    rows: list[list[int]], pad: int, prepend_bos: bool, side: str, given_side: bool
) -> None:
    other = {"left": "right", "right": "left"}[side]
    tokenizer = SimpleNamespace(
        pad_token_id=pad, bos_token_id=0, padding_side=other if given_side else side
    )
    found = utilities.get_attention_mask(
        tokenizer, torch.tensor(rows), prepend_bos, side if given_side else None
    )
    assert found.tolist() == [mask_by_hand(row, pad, 0, prepend_bos, side) for row in rows]


def test_without_a_tokenizer_all_is_text() -> None:
    assert (
        utilities.get_attention_mask(None, torch.zeros(2, 3).long(), True).tolist() == [[1] * 3] * 2
    )


@CHECKED
@given(st.integers(0, 3), st.integers(0, 2), st.integers(1, 4), st.integers(0, 3))
def test_positions_count_text(ahead: int, behind: int, length: int, offset: int) -> None:
    mask = torch.tensor([[0] * ahead + [1] * length + [0] * behind])
    by_hand = [0] * ahead + list(range(length)) + [length - 1] * behind
    assert utilities.get_offset_position_ids(offset, mask).tolist() == [by_hand[offset:]]


@pytest.mark.parametrize(("pad", "side"), [(0, "left"), (9, "left"), (0, "right")])
def test_a_beginning_is_taken_off(pad: int, side: str) -> None:
    texts = [[5, 6, 0, 7], [8]]
    padding = [[], [pad] * 3]
    rows = [[*p, 0, *t] if side == "left" else [0, *t, *p] for p, t in zip(padding, texts)]
    wanted = [p + t if side == "left" else t + p for p, t in zip(padding, texts)]
    tokenizer = SimpleNamespace(pad_token_id=pad, bos_token_id=0, padding_side=side)
    found = utilities.get_tokens_with_bos_removed(tokenizer, torch.tensor(rows))
    assert found.tolist() == wanted
    if side == "left":
        with pytest.raises(ValueError, match="does not begin with the BOS token"):
            utilities.get_tokens_with_bos_removed(tokenizer, torch.tensor([[3, 4, 5]]))
    tokenizer.bos_token_id = None
    assert utilities.get_tokens_with_bos_removed(tokenizer, found) is found
    assert utilities.get_input_with_manually_prepended_bos("<s>", ["a", "b"]) == ["<s>a", "<s>b"]
    assert utilities.get_input_with_manually_prepended_bos(None, "a") == "a"


# Slices.


@pytest.mark.parametrize(
    ("asked", "index", "mode"),
    [
        (None, slice(None), "identity"),
        (3, 3, "int"),
        (-1, -1, "int"),
        (np.int64(2), 2, "int"),
        (np.array(2), 2, "int"),
        (torch.tensor(2), 2, "int"),
        ((4,), slice(4), "slice"),
        ((1, 5), slice(1, 5), "slice"),
        ((1, None), slice(1, None), "slice"),
        ((1, 6, 2), slice(1, 6, 2), "slice"),
        (slice(2, 4), slice(2, 4), "slice"),
        ([4, 0], [4, 0], "array"),
        ([2], [2], "array"),
        (np.array([1, 3]), [1, 3], "array"),
        (torch.tensor([1, 3]), [1, 3], "array"),
        (torch.arange(6) > 3, [4, 5], "array"),
    ],
)
def test_a_slice_chooses_as_an_index_does(asked: Any, index: Any, mode: str) -> None:
    value = torch.randn(6, 2, 6)
    chosen = utilities.Slice(asked)
    assert chosen.mode == mode
    assert torch.equal(chosen.apply(value), value[index])
    assert torch.equal(chosen.apply(value, dim=-1), value[..., index])
    kept = [index] if mode == "int" else index
    np.testing.assert_array_equal(chosen.indices(6) % 6, np.atleast_1d(np.arange(6)[index]))
    assert torch.equal(utilities.Slice.unwrap(asked).apply(value, 2), value[..., kept])
    assert utilities.Slice.unwrap(chosen) is chosen


def test_a_slice_says_what_it_is_and_what_it_is_not() -> None:
    assert repr(utilities.Slice((1, 5))) == "Slice(slice(1, 5, None), mode='slice')"
    for wrong in (True, "x", 1.5, torch.tensor(True), torch.tensor(1.5), np.bool_(True), (), {}):
        with pytest.raises(ValueError, match="no choice of positions"):
            utilities.Slice(wrong)
    with pytest.raises(ValueError, match="give max_ctx"):
        utilities.Slice((1, 2)).indices()


# Losses and sampling.


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_of_next_tokens(masked: bool) -> None:
    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]) if masked else None
    each, counted = torch.zeros(2, 4), []
    for row, at in np.ndindex(2, 4):
        if mask is None or (mask[row, at] and mask[row, at + 1]):
            each[row, at] = nn.functional.cross_entropy(logits[row, at], tokens[row, at + 1])
            counted.append(each[row, at])
    found = utilities.lm_cross_entropy_loss(logits, tokens, mask, per_token=True)
    torch.testing.assert_close(found, each)
    mean = utilities.lm_cross_entropy_loss(logits, tokens, mask)
    torch.testing.assert_close(mean, torch.stack(counted).mean())
    with pytest.raises(ValueError, match=re.escape("logits [2, 5, 7] are not of tokens [2, 4]")):
        utilities.lm_cross_entropy_loss(logits, tokens[:, 1:])


def test_the_loss_is_the_models_own() -> None:
    model = ip.load("pocket")
    tokens = model.to_tokens("The cat sat on the mat.")
    found = utilities.lm_cross_entropy_loss(model(tokens, return_type="logits"), tokens)
    torch.testing.assert_close(found, model(tokens, return_type="loss"))


def test_accuracy_counts_next_tokens() -> None:
    tokens = torch.tensor([[3, 1, 2, 0]])
    logits = nn.functional.one_hot(torch.tensor([[1, 0, 0, 3]]), 4).float()
    assert utilities.lm_accuracy(logits, tokens, per_token=True).tolist() == [[True, False, True]]
    assert float(utilities.lm_accuracy(logits, tokens)) == pytest.approx(2 / 3)


def shares(logits: list[float], count: int = 4000, **kwargs: Any) -> torch.Tensor:
    drawn = utilities.sample_logits(torch.tensor([logits] * count), **kwargs)
    return torch.bincount(drawn, minlength=len(logits)) / count


def test_tokens_are_drawn_as_often_as_they_should_be() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    near = {"atol": 0.03, "rtol": 0}
    torch.testing.assert_close(shares(logits.tolist()), logits.softmax(-1), **near)
    torch.testing.assert_close(
        shares(logits.tolist(), temperature=2.0), (logits / 2).softmax(-1), **near
    )
    two = torch.tensor([1.0, -torch.inf, 2.0, -torch.inf]).softmax(-1)
    torch.testing.assert_close(shares(logits.tolist(), top_k=2), two, **near)
    first, second, _, _ = logits.softmax(-1).sort(descending=True).values.tolist()
    torch.testing.assert_close(shares(logits.tolist(), top_p=first + second / 2), two, **near)
    assert shares(logits.tolist(), top_p=first / 2).tolist() == [0, 0, 1, 0]
    said = torch.tensor([[2, 2, 0, 3]] * 4000)
    fewer = (logits / 2 - torch.tensor([0.5, 0, 1.0, 0.5])).softmax(-1)
    found = shares(logits.tolist(), temperature=2.0, freq_penalty=0.5, tokens=said)
    torch.testing.assert_close(found, fewer, **near)
    again = torch.tensor([0.5, 0.0, 1.0, -2.0]).softmax(-1)
    found = shares(logits.tolist(), repetition_penalty=2.0, tokens=said)
    torch.testing.assert_close(found, again, **near)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 2.0]])
    assert utilities.sample_logits(logits, temperature=0.0).tolist() == [1, 0]
    said = logits.argmax(-1, keepdim=True)
    found = utilities.sample_logits(logits, temperature=0.0, repetition_penalty=9.0, tokens=said)
    assert found.tolist() == [2, 2]
    assert logits.tolist() == [[1.0, 3.0, 2.0], [5.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"top_k": 0}, "top_k is 1 or more; got 0"),
        ({"top_p": 0.0}, "top_p is in (0, 1]; got 0.0"),
        ({"top_p": 1.5}, "top_p is in (0, 1]; got 1.5"),
        ({"temperature": -1.0}, "temperature is 0 or more; got -1.0"),
        ({"freq_penalty": 1.0}, "give tokens=, [batch, pos]"),
        ({"repetition_penalty": 1.2}, "give tokens=, [batch, pos]"),
        (
            {"repetition_penalty": -1.0, "tokens": torch.zeros(1, 1).long()},
            "is more than 0; got -1.0",
        ),
    ],
)
def test_sampling_refuses_what_makes_no_sense(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        utilities.sample_logits(torch.randn(1, 5), **kwargs)


def test_a_table_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(
        ModuleNotFoundError, match=r"logits_to_df needs pandas, .*: pip install pandas"
    ):
        utilities.logits_to_df(logits)
    stand_in = ModuleType("pandas")
    stand_in.DataFrame = lambda columns: columns  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    tokenizer = SimpleNamespace(decode=lambda ids: f"t{ids[0]}")
    table = utilities.logits_to_df(logits, tokenizer, top_k=2)
    assert list(table) == ["token_index", "token_string", "logit", "log_prob", "probability"]
    assert table["token_index"] == [1, 2]
    assert table["token_string"] == ["t1", "t2"]
    total = math.exp(0) + math.exp(1) + math.exp(2)
    assert table["probability"] == pytest.approx([math.exp(2) / total, math.exp(1) / total])
    assert "token_string" not in utilities.logits_to_df(logits)
    with pytest.raises(ValueError, match=re.escape("[d_vocab]; got [2, 3]")):
        utilities.logits_to_df(logits.expand(2, 3))


def test_activations_are_what_they_are_called() -> None:
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(utilities.gelu_new(x), tanh)
    torch.testing.assert_close(utilities.gelu_fast(x), tanh)
    torch.testing.assert_close(utilities.solu(x), x * x.exp() / x.exp().sum())


# Statistics.


def test_standard_errors_are_numpys() -> None:
    x = torch.randn(3, 7, dtype=torch.float64)
    for dim in (0, 1):
        by_hand = np.std(utilities.to_numpy(x), axis=dim, ddof=1) / np.sqrt(x.shape[dim])
        np.testing.assert_allclose(
            utilities.to_numpy(utilities.standard_error(x, dim=dim)), by_hand
        )
    with pytest.raises(ValueError, match="at least 2 samples are needed along dim -1; there are 1"):
        utilities.standard_error(x[:, :1])
    with pytest.raises(TypeError, match=r"got torch.int64"):
        utilities.standard_error(torch.arange(3))


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_an_interval_is_percentiles_of_resamples(statistic: str) -> None:
    x = torch.randn(2, 9, dtype=torch.float64)
    generator = torch.Generator(device="cpu").manual_seed(5)
    drawn = [torch.randint(0, 9, (n, 9), generator=generator, device="cpu") for n in (8, 8, 4)]
    number = utilities.to_numpy(x)
    for low, high, row in zip(
        *utilities.bootstrap_ci(
            x,
            statistic=statistic,
            confidence=0.8,
            n_resamples=20,
            generator=torch.Generator(device="cpu").manual_seed(5),
            chunk_size=8,
        ),
        number,
    ):
        values = [getattr(np, statistic)(row[index]) for part in drawn for index in part.tolist()]
        np.testing.assert_allclose([float(low), float(high)], np.percentile(values, [10, 90]))
    assert torch.equal(utilities.bootstrap_ci(x)[0], utilities.bootstrap_ci(x)[0])


def test_intervals_hold_what_they_promise() -> None:
    x = torch.randn(400, 60, dtype=torch.float64)
    low, high = utilities.bootstrap_ci(x, confidence=0.9, n_resamples=300)
    held = ((low < 0) & (high > 0)).float().mean()
    assert 0.84 < held < 0.94


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
def test_a_p_value_counts_choices_of_signs(alternative: str) -> None:
    effects = torch.tensor([0.9, -0.2, 0.4, 0.4, 1.1, -0.3])
    at_least = 0
    for choice in np.ndindex(*[2] * 6):
        mean = sum((-e if flip else e) for e, flip in zip(effects.tolist(), choice)) / 6
        own = sum(effects.tolist()) / 6
        further = {"two-sided": abs(mean) - abs(own), "greater": mean - own, "less": own - mean}
        at_least += further[alternative] > -1e-9
    found = utilities.sign_flip_permutation_pvalue(effects, alternative=alternative)
    assert float(found) == pytest.approx(at_least / 64)
    drawn = utilities.sign_flip_permutation_pvalue(
        torch.stack([effects, -effects]).T, dim=0, alternative=alternative, exact_max_n=1
    )
    other = {"greater": "less", "less": "greater"}.get(alternative, alternative)
    turned = utilities.sign_flip_permutation_pvalue(effects, alternative=other)
    torch.testing.assert_close(drawn, torch.stack([found, turned]), atol=0.05, rtol=0)


@CHECKED
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.sampled_from([0.5, 0.9, 0.95]))
def test_the_ends_of_a_rate_leave_the_tails(successes: list[bool], confidence: float) -> None:
    found = utilities.success_rate_ci(successes, confidence=confidence)
    n, k = len(successes), sum(successes)

    def chance(counts: range, rate: float) -> float:
        return sum(math.comb(n, i) * rate**i * (1 - rate) ** (n - i) for i in counts)

    assert found.point_estimate == k / n
    assert (found.n_trials, found.n_successes, found.confidence) == (n, k, confidence)
    tail = pytest.approx((1 - confidence) / 2)
    assert found.ci_low == 0 if k == 0 else chance(range(k, n + 1), found.ci_low) == tail
    assert found.ci_high == 1 if k == n else chance(range(k + 1), found.ci_high) == tail


def test_statistics_refuse_what_makes_no_sense() -> None:
    x = torch.randn(5)
    cases = [
        (
            lambda: utilities.bootstrap_ci(x, statistic="max"),
            "statistic is one of mean, median; got 'max'",
        ),
        (
            lambda: utilities.bootstrap_ci(x, confidence=1.5),
            "confidence is between 0 and 1; got 1.5",
        ),
        (lambda: utilities.bootstrap_ci(x, n_resamples=0), "got 0 and 256"),
        (lambda: utilities.bootstrap_ci(x[:0]), "at least 1 samples are needed"),
        (lambda: utilities.bootstrap_ci(x[0]), "at least 1 samples are needed"),
        (lambda: utilities.sign_flip_permutation_pvalue(x, alternative="more"), "got 'more'"),
        (lambda: utilities.sign_flip_permutation_pvalue(x, n_permutations=0), "got 0"),
        (lambda: utilities.success_rate_ci([]), "successes is empty"),
        (lambda: utilities.success_rate_ci([True], confidence=0.0), "got 0.0"),
    ]
    for wrong, text in cases:
        with pytest.raises(ValueError, match=re.escape(text)):
            wrong()


# Prompts.


def test_an_answer_is_looked_up_after_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    model = ip.load("pocket")
    prompt, answer = "The Eiffel Tower is in the city of", " Paris, in"
    utilities.test_prompt(prompt, answer[1:], model, top_k=2)
    said = capsys.readouterr().out
    tokens = model.to_tokens(prompt + answer)
    start = model.to_tokens(prompt).shape[1]
    pieces = model.to_str_tokens(prompt + answer)
    assert len(pieces) > start + 1  # an answer of several tokens
    logits = model(tokens, return_type="logits")[0]
    ranks = []
    lines = [f"Tokenized prompt: {pieces[:start]}", f"Tokenized answer: {pieces[start:]}"]
    for at in range(start, len(pieces)):
        order = logits[at - 1].argsort(descending=True).tolist()
        ranks.append((pieces[at], order.index(int(tokens[0, at]))))
        lines.append("Performance on answer token:")
        shown = [
            (f"Rank: {ranks[-1][1]}", int(tokens[0, at])),
            ("Top 0", order[0]),
            ("Top 1", order[1]),
        ]
        for what, token in shown:
            logit, prob = logits[at - 1, token], logits[at - 1].softmax(-1)[token]
            piece = model.to_single_str_token(token)
            lines.append(f"{what:<12} Logit: {logit:6.2f}  Prob: {prob:7.2%}  Token: |{piece}|")
    lines.append(f"Ranks of the answer tokens: {ranks}")
    assert said.splitlines() == lines


def test_several_answers_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    model = ip.load("pocket")
    prompt = "When John and Mary went to the shop, John gave a bag to"
    utilities.test_prompt(prompt, ["Mary", " John"], model, print_details=False, prepend_bos=True)
    said = capsys.readouterr().out
    order = (
        model(prompt, prepend_bos=True, return_type="logits")[0, -1]
        .argsort(descending=True)
        .tolist()
    )
    ranks = [(name, order.index(model.to_single_token(name))) for name in (" Mary", " John")]
    assert ranks[0][1] < ranks[1][1]
    assert said == f"Ranks of the answer tokens: {[ranks]}\n"
    utilities.test_prompt("The", "cat", model, prepend_space_to_answer=False, print_details=False)
    assert "(' " not in capsys.readouterr().out
    with pytest.raises(ValueError, match="no answer"):
        utilities.test_prompt("The", [], model)


# Data.


class Texts:
    """A dataset as far as tokenizing goes."""

    def __init__(self, columns: dict[str, list[Any]], batch: int = 1000) -> None:
        self.features, self.batch, self.format = columns, batch, {}

    def remove_columns(self, names: list[str]) -> Texts:
        left = {name: column for name, column in self.features.items() if name not in names}
        return Texts(left, self.batch)

    def map(
        self, function: Any, *, batched: bool, remove_columns: list[str], **kwargs: Any
    ) -> Texts:
        assert batched
        (column,) = remove_columns
        texts = self.features[column]
        parts = [texts[at : at + self.batch] for at in range(0, len(texts), self.batch)]
        made = Texts(
            {"tokens": [row for part in parts for row in function({column: part})["tokens"]]}
        )
        made.format = kwargs
        return made

    def set_format(self, **kwargs: Any) -> None:
        self.format |= kwargs


@pytest.mark.parametrize("bos", [True, False])
def test_texts_become_rows_of_tokens(bos: bool) -> None:
    tokenizer = ip.load("pocket").tokenizer
    texts = ["The cat sat on the mat. " * 9, "A dog", "", "The Eiffel Tower is in Paris."]
    before = (tokenizer.pad_token, len(tokenizer))
    dataset = Texts({"text": texts, "meta": [1, 2, 3, 4]})
    found = utilities.tokenize_and_concatenate(dataset, tokenizer, max_length=8, add_bos_token=bos)
    eos = tokenizer.eos_token_id
    stream: list[int] = []
    for number, text in enumerate(texts):
        stream += ([eos] if number else []) + tokenizer(text)["input_ids"]
    width = 7 if bos else 8
    rows = [stream[at : at + width] for at in range(0, len(stream) - width + 1, width)]
    assert len(rows) > 5
    assert found.features == {
        "tokens": [[tokenizer.bos_token_id, *row] if bos else row for row in rows]
    }
    assert found.format == {"num_proc": 10, "type": "torch", "columns": ["tokens"]}
    assert (tokenizer.pad_token, len(tokenizer)) == before


def test_what_does_not_fill_a_row_is_padded_if_it_is_all() -> None:
    tokenizer = ip.load("pocket").tokenizer
    short = Texts({"text": ["A dog"]})
    kwargs: dict[str, Any] = {"max_length": 9, "streaming": True, "set_format": False}
    found = utilities.tokenize_and_concatenate(short, tokenizer, **kwargs)
    ids = tokenizer("A dog")["input_ids"]
    assert found.features["tokens"] == [[0, *ids, *[0] * (8 - len(ids))]]
    assert found.format == {}
    with pytest.raises(ValueError, match="max_length=1 leaves no room"):
        utilities.tokenize_and_concatenate(short, tokenizer, max_length=1)
    bare = SimpleNamespace(eos_token_id=1, bos_token_id=None)
    with pytest.raises(ValueError, match="no BOS token; add_bos_token=False does without"):
        utilities.tokenize_and_concatenate(short, bare)
    with pytest.raises(ValueError, match="no EOS token to put between texts"):
        utilities.tokenize_and_concatenate(short, SimpleNamespace(eos_token_id=None))


def test_datasets_are_asked_for_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no dataset 'mnist'. There are: openwebtext, "):
        utilities.get_dataset("mnist")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(
        ModuleNotFoundError, match=r"get_dataset needs datasets, .*pip install datasets"
    ):
        utilities.get_dataset("pile")
    stand_in = ModuleType("datasets")
    stand_in.load_dataset = lambda name, **kwargs: (name, kwargs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    wanted = ("NeelNanda/pile-10k", {"split": "train", "data_dir": "x"})
    assert utilities.get_dataset("pile", data_dir="x") == wanted


class Program:
    """What a torch file may hold besides tensors."""


def test_files_are_loaded_by_their_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pth")
    torch.save(Program(), tmp_path / "b.pth")
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.pth").read_bytes())
    (tmp_path / "a.json").write_text('{"x": 1}')
    asked: list[Any] = []

    def download(repo: str, name: str, **kwargs: Any) -> str:
        asked.append((repo, kwargs))
        return str(tmp_path / name)

    stand_in = ModuleType("huggingface_hub")
    stand_in.hf_hub_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", stand_in)
    fetch = utilities.download_file_from_hf
    assert fetch("me/it", "a.pth")["w"].tolist() == [1, 1]
    assert asked == [("me/it", {"subfolder": None, "cache_dir": None})]
    assert fetch("me/it", "a.json", subfolder="deep", revision="main") == {"x": 1}
    assert asked[1] == ("me/it", {"subfolder": "deep", "cache_dir": None, "revision": "main"})
    assert fetch("me/it", "a.bin") == str(tmp_path / "a.bin")
    assert fetch("me/it", "a.bin", force_is_torch=True)["w"].tolist() == [1, 1]
    with pytest.raises(Exception, match="Weights only load failed") as caught:
        fetch("me/it", "b.pth")
    assert "weights_only=False" in caught.value.__notes__[0]
    assert isinstance(fetch("me/it", "b.pth", weights_only=False), Program)


# Everything together.


EXPECTED = (
    "get_act_name test_prompt to_numpy get_corner Slice tokenize_and_concatenate lm_cross_entropy_loss "
    "lm_accuracy sample_logits logits_to_df remove_batch_dim composition_scores get_matrix_corner "
    "get_dataset download_file_from_hf get_device print_gpu_mem gelu_new gelu_fast solu "
    "LocallyOverridenDefaults USE_DEFAULT_VALUE transpose is_square is_lower_triangular "
    "check_structure get_attention_mask get_offset_position_ids get_cumsum_along_dim "
    "repeat_along_head_dimension filter_dict_by_prefix temporarily_swap_parameter bootstrap_ci "
    "standard_error sign_flip_permutation_pvalue success_rate_ci"
)


def test_every_name_is_there_under_both_names_of_the_module() -> None:
    assert set(EXPECTED.split()) <= set(utilities.__all__)
    assert utils.__all__ == utilities.__all__
    for name in utilities.__all__:
        found = getattr(utilities, name)
        assert getattr(utils, name) is found
        if callable(found):
            assert found.__doc__, name


# Defaults and parameters.


def test_defaults_hold_for_a_while() -> None:
    model = ip.load("pocket")
    texts = ["The cat", "The cat sat on the mat"]
    right, left = model.to_tokens(texts), model.to_tokens(texts, padding_side="left")
    assert not torch.equal(right, left)
    with utilities.LocallyOverridenDefaults(model, padding_side="left"):
        assert torch.equal(model.to_tokens(texts), left)
        with utilities.LocallyOverridenDefaults(model, padding_side=utilities.USE_DEFAULT_VALUE):
            assert torch.equal(model.to_tokens(texts), left)
    with (
        pytest.raises(ZeroDivisionError),
        utilities.LocallyOverridenDefaults(model, padding_side="left"),
    ):
        1 / 0  # noqa: B018 - to leave by an error
    assert torch.equal(model.to_tokens(texts), right)


def test_defaults_of_the_dialects_own_models_hold_for_a_while() -> None:
    model = HookedTransformer.from_pretrained("pocket")
    texts = ["The cat", "The cat sat on the mat"]
    own = model.to_tokens(texts)
    wanted = model.to_tokens(texts, prepend_bos=False, padding_side="left")
    assert own.shape != wanted.shape
    with utilities.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="left"):
        assert torch.equal(model.to_tokens(texts), wanted)
    assert torch.equal(model.to_tokens(texts), own)


def test_defaults_that_are_not_there_are_refused() -> None:
    cfg, tokenizer = (
        SimpleNamespace(default_prepend_bos=True),
        SimpleNamespace(padding_side="right"),
    )
    model = SimpleNamespace(cfg=cfg, tokenizer=tokenizer)
    with utilities.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="left"):
        assert (cfg.default_prepend_bos, tokenizer.padding_side) == (False, "left")
    assert (cfg.default_prepend_bos, tokenizer.padding_side) == (True, "right")
    with pytest.raises(ValueError, match="no such default: 'device'"):
        utilities.LocallyOverridenDefaults(model, device="cpu")
    with pytest.raises(ValueError, match="padding_side is 'left', 'right' or None; got 'up'"):
        utilities.LocallyOverridenDefaults(model, padding_side="up")
    del cfg.default_prepend_bos
    both = utilities.LocallyOverridenDefaults(model, padding_side="left", prepend_bos=True)
    with pytest.raises(Unsupported, match=r"no cfg.default_prepend_bos"), both:
        pass
    assert tokenizer.padding_side == "right"  # what was set before the error is back
    with utilities.LocallyOverridenDefaults(SimpleNamespace(tokenizer=None), padding_side="left"):
        pass


def test_a_parameter_has_other_numbers_for_a_while() -> None:
    module = nn.Linear(3, 2)
    weight, before = module.weight, module.weight.detach().clone()
    x = torch.randn(4, 3)
    own = module(x)
    with utilities.temporarily_swap_parameter(weight, before * 2) as swapped:
        assert swapped is module.weight
        torch.testing.assert_close(module(x), 2 * own - module.bias)
    assert torch.equal(weight, before)
    leaving = utilities.temporarily_swap_parameter(weight, before * 2)
    with pytest.raises(ZeroDivisionError), leaving:
        1 / 0  # noqa: B018 - to leave by an error
    assert module.weight is weight
    assert torch.equal(weight, before)
    cases = [
        (weight, before[:1], "the parameter is [2, 3]"),
        (weight, before.double(), "torch.float64"),
        (before, before, "take the parameter itself"),
        (weight, 3.0, "the new value is a tensor; got float"),
    ]
    for parameter, value, text in cases:
        error = pytest.raises((TypeError, ValueError), match=re.escape(text))
        with error, utilities.temporarily_swap_parameter(parameter, value):
            pass


def test_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.delenv("TRANSFORMERLENS_ALLOW_MPS", raising=False)
    assert utilities.get_device() == "cpu"
    monkeypatch.setenv("TRANSFORMERLENS_ALLOW_MPS", "1")
    assert utilities.get_device() == "mps"
    with pytest.raises(RuntimeError, match="no GPU"):
        utilities.get_best_available_cuda_device(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ([5, 9, 7][i], 10))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 2**29)
    assert utilities.get_device() == "cuda"
    assert utilities.get_best_available_device(SimpleNamespace(device="cuda")) == torch.device(
        "cuda:1"
    )
    assert utilities.get_best_available_device(SimpleNamespace(device="cpu")) == torch.device("cpu")
    utilities.print_gpu_mem("after")
    assert capsys.readouterr().out == "after ~ 1.50 GiB allocated on GPU.\n"
