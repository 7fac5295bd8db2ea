"""Experiments that someone else wrote: texts that try to become code, in every field; and what a script may call."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from hypothesis import strategies as st

import interpose as ip

MARK = "OWNED"
ATTACKS = (
    f"0)\nimport os\nopen({MARK!r}, 'w')  #",
    f'"); open("{MARK}", "w"); ("',
    f"'); open('{MARK}', 'w'); ('",
    f"tensors['a'] + str(open('{MARK}', 'w'))",
    f"x' tensors['add.value'] {MARK}",
    f'" tensors["add.value"] \' {MARK}',
    f"\\'); open('{MARK}', 'w') #",
    f"{{open('{MARK}', 'w')}}",
    '"""',
    "'''",
    "\\",
    "\n",
    "\r\n    import os",
    "\u2028import os",
    "\x00",
    "\x1b]0;title\x07",
    "ip.load(__import__('os'))",
    "re.compile torch.tensor replace( tensors[",
)
TEXTS = st.sampled_from(ATTACKS) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
PLACES = st.none() | st.integers(-9, 9) | st.lists(st.integers(-9, 9), min_size=1, max_size=3)
SLICES = st.builds(slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9))
POSITIONS = PLACES | SLICES | TEXTS | st.lists(TEXTS, min_size=1, max_size=2)
NUMBERS = st.floats(width=32) | st.integers(-9, 9)
SITES = TEXTS | TEXTS.map(lambda text: re.compile(re.escape(text), re.IGNORECASE))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Some that are written out, and some that are too large."""
    count = draw(st.sampled_from([0, 1, 3, 17, 40]))
    return torch.arange(float(count)) + draw(st.integers(0, 1))


@st.composite
def edits(draw: st.DrawFn) -> ip.Edit:
    """Edits with hostile texts wherever a text may be."""
    where: dict[str, Any] = {
        "layer": draw(st.none() | st.integers(0, 5)),
        "head": draw(PLACES),
        "pos": draw(POSITIONS),
    }
    if draw(st.booleans()):
        where["exclude"] = {"site": draw(TEXTS), "pos": draw(TEXTS)}
    value = draw(
        NUMBERS
        | tensors()
        | st.dictionaries(TEXTS | st.tuples(TEXTS, st.integers(0, 3)), tensors())
    )
    site = draw(SITES | st.lists(TEXTS, min_size=1, max_size=2))
    made = [
        lambda: ip.zero(site, **where),
        lambda: ip.fill(site, value, **where),
        lambda: ip.add(site, value, strength=0.5, **where),
        lambda: ip.patch(site, {draw(TEXTS): draw(tensors())}, **where),
        lambda: ip.clamp(site, max=draw(NUMBERS), at=(..., draw(SLICES)), **where),
        lambda: ip.knockout(where["layer"], query=draw(TEXTS), key=draw(TEXTS)),
    ]
    return draw(st.sampled_from(made))()


@st.composite
def metrics(draw: st.DrawFn) -> Any:
    """One metric, or several by hostile names."""
    words = TEXTS | st.integers(0, 99) | st.lists(TEXTS, min_size=1, max_size=2)
    one = st.builds(ip.metrics.logit_difference, words, words, pos=st.integers(-3, 3))
    other = st.builds(ip.metrics.probability, words, log=st.booleans())
    each = one | other | st.just(ip.metrics.loss())
    return draw(each | st.dictionaries(TEXTS, each, min_size=1, max_size=2))


@st.composite
def experiments(draw: st.DrawFn) -> ip.Experiment:
    """Experiments with and without a sweep."""
    texts = st.lists(TEXTS, min_size=1, max_size=2) | st.lists(
        st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=2
    )
    words: dict[str, Any] = {
        "model": draw(TEXTS),
        "metrics": draw(metrics()),
        "edits": draw(st.lists(edits(), max_size=3)),
        "prepend_bos": draw(st.none() | st.booleans()),
        "dtype": draw(st.sampled_from([None, "float32", "bfloat16"])),
    }
    if draw(st.booleans()):
        return ip.Experiment(inputs=draw(texts), **words)
    sweep: dict[str, Any] = {"site": draw(TEXTS), "over": draw(TEXTS)}
    if draw(st.booleans()):
        sweep |= {"plan": draw(TEXTS), "pos": draw(TEXTS), "align": draw(TEXTS), "layer": [1]}
    if draw(st.booleans()):
        sweep["edit"] = ip.scale(sweep["site"], draw(NUMBERS))
    words["edits"] = [edit for edit in words["edits"] if edit.where.rows is None]
    return ip.Experiment(clean=draw(texts), corrupt=draw(texts), sweep=sweep, **words)


# What a script may hold: calls and attributes that are its own, and values.

EDITS = "zero fill add patch clamp knockout scale noise mean resample project_out project_cap rotate".split()
METRICS = "logit logit_difference probability rank loss kl".split()
CALLS = {
    *(f"ip.{name}" for name in [*EDITS, "at", "load", "measure", "sweep"]),
    *(f"ip.metrics.{name}" for name in METRICS),
    "model.hooks",
    "torch.tensor",
    "re.compile",
    "float",
    "slice",
    "range",
    "print",
    "replace",
    "load_file",
    "Path",
    "Path(__file__).with_name",
}
DTYPES = {
    f"torch.{name}" for name in ("float32", "float16", "bfloat16", "float64", "int64", "bool")
}
FLAGS = {f"re.{name}" for name in "ASCII DOTALL IGNORECASE MULTILINE VERBOSE".split()}
NAMES = set(
    "ip torch re model clean corrupt texts edits edit metric result tensors site part".split()
)
IMPORTS = {
    "import re",
    "import torch",
    "import interpose as ip",
    "from pathlib import Path",
    "from dataclasses import replace",
    "from safetensors.torch import load_file",
}
PLAIN = (
    ast.Module, ast.Assign, ast.Expr, ast.With, ast.withitem, ast.Constant, ast.List, ast.Tuple, ast.Dict,
    ast.keyword, ast.Load, ast.Store, ast.Starred, ast.UnaryOp, ast.USub, ast.BinOp, ast.BitOr, ast.arguments,
    ast.arg, ast.Call, ast.Attribute, ast.Name, ast.Lambda, ast.Subscript, ast.Import, ast.ImportFrom, ast.alias,
)  # fmt: skip


def must_be_harmless(script: str) -> ast.Module:
    """Refuse a script that does anything besides what scripts of experiments do."""
    tree = ast.parse(script)
    for node in ast.walk(tree):
        assert isinstance(node, PLAIN), ast.dump(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert ast.unparse(node) in IMPORTS
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) in CALLS, ast.unparse(node)
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) in CALLS | DTYPES | FLAGS | {"ip.metrics"}, ast.unparse(node)
        if isinstance(node, ast.Name):
            known = NAMES | {call for call in CALLS if call.isidentifier()} | {"__file__"}
            assert node.id in known, node.id
        if isinstance(node, ast.Subscript):
            assert isinstance(node.value, ast.Name)
            assert node.value.id == "tensors"
            assert isinstance(node.slice, ast.Constant)
        if isinstance(node, ast.Lambda):
            assert ast.unparse(node) == "lambda site, **part: replace(edit, site=site, **part)"
    return tree
