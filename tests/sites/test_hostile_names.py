"""Names that anyone may have written: read in as many steps as they are long; each of these would take hours else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import interpose as ip
from interpose.sites.grammar import compile_glob, parse_tail
from interpose.sites.tree import ModuleTree

LONG = 50_000


@pytest.mark.parametrize(
    "tail",
    [
        "['" + "\\" * LONG,
        "['" + "\\" * LONG + "x]",
        ".output['" + "\\x" * LONG + '"]',
        "[" * LONG,
        "#1" * LONG,
        "#" + "1" * LONG,
        "[" + "9" * LONG + "]",
        "#1." + "output." * LONG,
        ".input" * LONG + "\n",
        "['" + "'" * LONG,
        '["' + "\\'" * LONG,
    ],
    ids=lambda tail: tail[:12],
)
def test_a_tail_of_many_signs_is_read_at_once(tail: str) -> None:
    found = parse_tail(tail)
    assert found is None or len(found.leaf) == LONG - 1
    net = ip.wrap(nn.Sequential(nn.Linear(1, 1)))
    for name in ("0" + tail, "blocks.0." + tail, tail):
        if found is None:
            with pytest.raises(ip.SiteNotFound, match="no site") as caught:
                net.run_with_cache(torch.ones(1, 1), names_filter=[name])
            assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*a" * 5000 + "*b", "a" * 20_000),
        ("*?" * 5000 + "b", "a" * 20_000),
        ("?*" * 3000 + ".b", "a" * 20_000),
        ("**.a." * 2000 + "b", "a." * 5000 + "a"),
        ("**.*." * 2000 + "b", "a." * 5000 + "a"),
        ("**.*a*a*a." * 500 + "b", ("a" * 50 + ".") * 200 + "a"),
        ("*" * LONG + "b", "a" * LONG),
        ("**." * LONG + "b", "a." * 1000 + "a"),
        ("**.x", "a." * LONG),
        ("*.input" * 1000, "a"),
    ],
    ids=lambda text: text[:10],
)
def test_a_glob_of_many_stars_is_matched_at_once(pattern: str, name: str) -> None:
    assert not compile_glob(pattern).fullmatch(name)
    net = ip.wrap(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(ip.NothingMatched, match="the glob '"):
        net.run_with_cache(torch.ones(1, 1), names_filter=pattern)


def matches(pattern: str, text: str) -> bool:
    """Stars and question marks by dynamic programming, in no case more steps than letters times signs."""
    rows = {0}
    for sign in pattern:
        if sign == "*":
            rows = set(range(min(rows, default=len(text) + 1), len(text) + 1))
        else:
            rows = {at + 1 for at in rows if at < len(text) and sign in ("?", text[at])}
    return len(text) in rows


@settings(derandomize=True, deadline=None, database=None, max_examples=500)
@given(st.text("ab*?", max_size=12), st.text("ab", min_size=1, max_size=12))
def test_what_is_taken_for_good_is_never_missed_in_a_segment(pattern: str, text: str) -> None:
    if pattern not in ("**", ""):
        assert bool(compile_glob(pattern).fullmatch(text)) == matches(pattern, text)


def spans(pattern: list[str], path: list[str]) -> bool:
    """The same for segments: `**` spans many."""
    rows = {0}
    for one in pattern:
        if one == "**":
            rows = set(range(min(rows, default=len(path) + 1), len(path) + 1))
        else:
            rows = {at + 1 for at in rows if at < len(path) and matches(one, path[at])}
    return len(path) in rows


@settings(derandomize=True, deadline=None, database=None, max_examples=500)
@given(
    st.lists(
        st.sampled_from(["**", "*", "a", "b", "a*", "*b", "?", "*a*"]), min_size=1, max_size=8
    ),
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aa"]), min_size=1, max_size=8),
)
def test_what_is_taken_for_good_is_never_missed_across_segments(
    pattern: list[str], path: list[str]
) -> None:
    found = compile_glob(".".join(pattern)).fullmatch(".".join(path))
    assert bool(found) == spans(pattern, path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (r"['a\'b']", "a'b"),
        (r'["a\"b"]', 'a"b'),
        (r"['a\\']", "a\\"),
        (r"['\n\t\x1b\u00e4\U0001f600']", "\n\t\x1bä\U0001f600"),
        (r"['\d\N{DASH}\x\uD']", r"\d\N{DASH}\x\uD"),
        (r"['\U7fffffff']", r"\U7fffffff"),
        ("['\n']", "\n"),
    ],
)
def test_a_key_in_quotes_says_what_python_would(text: str, key: str) -> None:
    tail = parse_tail(text)
    assert tail is not None
    assert tail.leaf == (key,)


class Wide(nn.Module):
    """Many leaves, half of them in one list, all of which run."""

    def __init__(self, count: int) -> None:
        super().__init__()
        half = count // 2
        some = [nn.Sequential(*(nn.Identity() for _ in range(100))) for _ in range(half // 100)]
        self.parts = nn.ModuleList([*some, *(nn.Identity() for _ in range(half))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Counted(dict):  # type: ignore[type-arg]
    """A dictionary that counts how often it is gone through."""

    passes = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.passes += 1
        return super().__iter__()

    def items(self):  # type: ignore[no-untyped-def]
        self.passes += 1
        return super().items()


@pytest.mark.parametrize("leaves", [1_000, 21_000])
def test_listing_many_sites_goes_through_them_once(
    leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ip.wrap(Wide(leaves))
    children = Counted(model.module.parts._modules)
    model.module.parts._modules = children
    sites = model.scan(torch.ones(1))
    assert children.passes <= 40
    seen = sites._seen = Counted(sites._seen)
    walks = 0
    real = ModuleTree.all_names

    def counted(self: ModuleTree):  # type: ignore[no-untyped-def]
        nonlocal walks
        walks += 1
        return real(self)

    monkeypatch.setattr(ModuleTree, "all_names", counted)
    found = dict(sites)
    assert len(found) == 2 + leaves // 200 + leaves
    assert found["parts.3.7"].shape == (1,)
    assert repr(sites).startswith(f"Sites of Wide: {len(found)}")
    assert len(sites.select("parts.*.5")) == leaves // 200
    assert seen.passes <= 2
    assert children.passes <= 80
    assert walks <= 12
