"""Site names: the grammar alone, against random module trees, and what wrong names are told."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import interpose as ip
from interpose.sites.grammar import Tail, compile_glob, is_glob, parse_tail, spell
from interpose.sites.tree import ModuleTree

settings.register_profile("grammar", derandomize=True, deadline=None, database=None)
CHECKED = settings(settings.get_profile("grammar"), max_examples=200)

# Tails.

IDENTIFIERS = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,5}", fullmatch=True)
KEYS = st.integers(-3, 12) | IDENTIFIERS | st.text(max_size=6)
TAILS = st.builds(
    Tail,
    call=st.none() | st.integers(0, 20),
    port=st.sampled_from(["input", "output"]),
    leaf=st.lists(KEYS, max_size=4).map(tuple),
)


@CHECKED
@given(TAILS)
def test_a_tail_reads_back_as_it_is_written(tail):
    assert parse_tail(str(tail)) == tail


@CHECKED
@given(st.text(alphabet="#.[]'\"0123 inputox*-", max_size=16))
def test_what_reads_as_a_tail_means_the_same_when_written_again(text):
    tail = parse_tail(text)
    if tail is not None:
        assert parse_tail(str(tail)) == tail


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        ("", Tail()),
        (".output", Tail()),
        (".input", Tail(port="input")),
        ("#2", Tail(call=2)),
        ("#2.input", Tail(call=2, port="input")),
        ("[0]", Tail(leaf=(0,))),
        ("[-1]", Tail(leaf=(-1,))),
        ("#1[0]", Tail(call=1, leaf=(0,))),
        (".output[1][0]", Tail(leaf=(1, 0))),
        (".input.hidden", Tail(port="input", leaf=("hidden",))),
        (".input[0].x['odd key']", Tail(port="input", leaf=(0, "x", "odd key"))),
        ('.output["odd key"]', Tail(leaf=("odd key",))),
        (".output.output", Tail(leaf=("output",))),
    ],
)
def test_a_tail_says_which_call_which_port_and_which_element(text, tail):
    assert parse_tail(text) == tail


@pytest.mark.parametrize(
    "text",
    [".weight", ".inputs", "x", "#", "#x", "#-1", "#1x", "[", "[x]", "[0", "[0]x", ".input..x"],
)
def test_what_is_no_tail_reads_as_none(text):
    assert parse_tail(text) is None


def test_paths_into_containers_are_spelled_the_way_one_writes_them():
    assert spell((1, "logits", "odd key", -1)) == "[1].logits['odd key'][-1]"


# Globs.


def matches(pattern: list[str], path: list[str]) -> bool:
    """A glob against a path, segment by segment."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return matches(pattern[1:], path) or (bool(path) and matches(pattern, path[1:]))
    return bool(path) and fits(pattern[0], path[0]) and matches(pattern[1:], path[1:])


def fits(pattern: str, text: str) -> bool:
    """A pattern within one segment, character by character."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return fits(pattern[1:], text) or (bool(text) and fits(pattern, text[1:]))
    return bool(text) and pattern[0] in ("?", text[0]) and fits(pattern[1:], text[1:])


SEGMENTS = st.text(alphabet="ab1_+[", min_size=1, max_size=3)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=5)
PATTERNS = st.lists(
    st.sampled_from(["**", "*", "a*", "?", "*b", "?b", "a?*"]) | SEGMENTS, min_size=1, max_size=5
)


@CHECKED
@given(PATTERNS, PATHS)
def test_a_glob_matches_what_a_segment_by_segment_matcher_does(pattern, path):
    found = compile_glob(".".join(pattern)).fullmatch(".".join(path)) is not None
    assert found == matches(pattern, path)


@CHECKED
@given(PATHS, st.data())
def test_a_glob_made_from_a_name_matches_that_name(path, data):
    pattern = list(path)
    at = data.draw(st.integers(0, len(path) - 1))
    upto = data.draw(st.integers(at, len(path)))
    pattern[at:upto] = data.draw(st.sampled_from([["**"], ["*"] * (upto - at), path[at:upto]]))
    assert compile_glob(".".join(pattern)).fullmatch(".".join(path))


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("*", ["a", "b", "c"]),
        ("a.*", ["a.x"]),
        ("a.**", ["a", "a.x", "a.x.c"]),
        ("**.c", ["c", "b.c", "a.x.c"]),
        ("**", ["a", "b", "c", "a.x", "b.c", "a.x.c"]),
        ("**.**", ["a", "b", "c", "a.x", "b.c", "a.x.c"]),
        ("**.**.c", ["c", "b.c", "a.x.c"]),
        ("**.x.**", ["a.x", "a.x.c"]),
        ("?.?.?", ["a.x.c"]),
        ("*a", ["a"]),
    ],
)
def test_one_star_stays_in_a_segment_and_two_span_many(pattern, hits):
    names = ["a", "b", "c", "a.x", "b.c", "a.x.c"]
    assert [name for name in names if compile_glob(pattern).fullmatch(name)] == hits


def test_brackets_are_never_a_glob():
    assert all(map(is_glob, ["layer*.0", "conv?", "**.act"]))
    assert not any(map(is_glob, ["lstm.output[1][0]", "cell#2", "a[bc]"]))


# Names against random trees.


class Node(nn.Module):
    """A module with children of any name; calling it calls them in turn."""

    def forward(self, x):
        for part in self._modules.values():
            x = part(x)
        return x


class Leaf(Node):
    """A module without children."""

    def forward(self, x):
        return x + 1


NAMES = st.sampled_from(["a", "b", "0", "1", "conv", "input", "output", "module", "fc_1"])


@st.composite
def trees(draw, depth=3, wrapped=True):
    """A random tree: shared modules, children called input or output, transparent wrappers."""
    made: list[nn.Module] = []

    def node(depth):
        if made and draw(st.integers(0, 5)) == 5:
            return draw(st.sampled_from(made))
        names = draw(st.lists(NAMES, unique=True, max_size=3 if depth else 0))
        module: nn.Module = Node() if names else Leaf()
        for name in names:
            module._modules[name] = node(depth - 1)
        if wrapped and draw(st.integers(0, 5)) == 5:
            module = within(module)
        made.append(module)
        return module

    root = Node()
    for name in draw(st.lists(NAMES, unique=True, min_size=1, max_size=4)):
        root._modules[name] = node(depth - 1)
    return within(root) if wrapped and draw(st.booleans()) else root


def within(module: nn.Module) -> nn.Module:
    """What `torch.compile` makes of a module, as far as names go."""
    outer = Node()
    outer._modules["_orig_mod"] = module
    return outer


def bare(module: nn.Module) -> nn.Module:
    while "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]
    return module


def paths(module: nn.Module, path: str = "", full: str = ""):
    """Every name of every module: without wrapper segments, with them, and the module."""
    prefix = full
    while "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]
        prefix = f"{prefix}._orig_mod" if prefix else "_orig_mod"
    yield path, prefix, module
    for name, child in module._modules.items():
        yield from paths(
            child, f"{path}.{name}" if path else name, f"{prefix}.{name}" if prefix else name
        )


@CHECKED
@given(trees())
def test_every_name_of_a_module_leads_to_it(root):
    tree = ModuleTree(root)
    listed = list(tree.all_names())
    assert [(path, id(module)) for path, module in listed] == [
        (path, id(module)) for path, _, module in paths(root)
    ]
    for path, full, module in paths(root):
        assert tree.site(path).module is module
        assert tree.site(full).module is module
        assert tree.site(full).stem == path
        assert tree.site(full).tail == Tail()


@CHECKED
@given(trees())
def test_the_torch_name_of_a_module_leads_to_it(root):
    tree = ModuleTree(root)
    for name, module in root.named_modules(remove_duplicate=False):
        assert tree.site(name).module is bare(module)


@CHECKED
@given(trees())
def test_selecting_everything_lists_each_module_once_by_its_first_name(root):
    tree = ModuleTree(root)
    sites = [site for site, _ in tree.select(None)]
    first: dict[int, str] = {}
    for path, _, module in paths(root):
        first.setdefault(id(module), path)
    assert {id(site.module): site.path for site in sites} == first
    assert len(sites) == len(first)
    assert len({site.name for site in sites}) == len(sites)


@CHECKED
@given(trees())
def test_a_listed_name_leads_back_to_its_site(root):
    tree = ModuleTree(root)
    for site, outright in tree.select(None):
        found = tree.site(site.name)
        assert (found.module, found.tail, found.canonical) == (site.module, site.tail, site.name)
        assert not outright


@CHECKED
@given(
    trees(),
    st.builds(
        Tail,
        call=st.none() | st.integers(0, 2),
        port=st.sampled_from(["input", "output"]),
        leaf=st.lists(st.integers(0, 2), max_size=2).map(tuple),
    ),
)
def test_a_canonical_name_leads_back_to_its_place_also_beside_children_called_input(root, tail):
    tree = ModuleTree(root)
    spelled: dict[str, object] = {}
    for path, module in tree.modules():
        if not path and tail.call is not None:
            continue  # the root is called once in a run
        name = tree.spell(path, tail)
        found = tree.site(name)
        assert (found.module, found.tail) == (module, tail), f"{name!r} is not {path!r} {tail}"
        assert name not in spelled
        spelled[name] = module


@CHECKED
@given(trees())
def test_the_names_of_a_shared_module_share_a_canonical_name(root):
    tree = ModuleTree(root)
    names: dict[int, list[str]] = {}
    for path, _, module in paths(root):
        names.setdefault(id(module), []).append(path)
    for known in names.values():
        sites = [tree.site(path) for path in known]
        assert len({site.canonical for site in sites}) == 1
        assert [site.name for site in sites] == known
        assert [known[0], *tree.other_names(known[0])] == known


@CHECKED
@given(trees(wrapped=False))
def test_a_child_called_input_or_output_wins_over_the_port(root):
    tree = ModuleTree(root)
    for path, module in tree.modules():
        for port in ("input", "output"):
            site = tree.site(f"{path}.{port}" if path else port)
            child = module._modules.get(port)
            assert site.module is (module if child is None else child)
            assert site.tail == (Tail(port=port) if child is None else Tail())


@CHECKED
@given(trees(), PATTERNS)
def test_a_glob_selects_the_first_names_that_match_it(root, pattern):
    tree = ModuleTree(root)
    pattern = [segment.replace("[", "0") for segment in pattern]
    if not is_glob(".".join(pattern)):
        pattern[0] = "*"
    first: dict[int, str] = {}
    for path, _, module in paths(root):
        first.setdefault(id(module), path)
    wanted = [path for path in first.values() if path and matches(pattern, path.split("."))]
    if wanted:
        assert [site.path for site, _ in tree.select(".".join(pattern))] == wanted
    else:
        with pytest.raises(ip.NothingMatched):
            tree.select(".".join(pattern))


@CHECKED
@given(trees(), st.sampled_from(["a", "b", "0", "1"]))
def test_regexes_and_callables_range_over_the_listed_names(root, ending):
    tree = ModuleTree(root)
    wanted = [site.name for site, _ in tree.select(None) if site.name.endswith(ending)]
    for accepts in (re.compile(f"{ending}$"), lambda name: name.endswith(ending)):
        if wanted:
            assert [site.name for site, _ in tree.select(accepts)] == wanted
        else:
            with pytest.raises(ip.NothingMatched):
                tree.select(accepts)


@CHECKED
@given(trees(), st.data())
def test_a_name_with_one_wrong_letter_is_refused_and_mended(root, data):
    tree = ModuleTree(root)
    names = [path for path, _, _ in paths(root) if "conv" in path.split(".")]
    if not names:
        return
    segments = data.draw(st.sampled_from(names)).split(".")
    at = segments.index("conv")
    wrong = ".".join([*segments[:at], "cnov", *segments[at + 1 :]])
    with pytest.raises(ip.SiteNotFound) as error:
        tree.site(wrong)
    right = ".".join([*segments[:at], "conv", *segments[at + 1 :]])
    assert f"no site {wrong!r} in Node." in str(error.value)
    assert f"did you mean {right!r}?" in str(error.value)


@settings(CHECKED, max_examples=150)
@given(trees())
def test_a_hook_at_every_listed_name_runs_at_that_module(root):
    model = ip.wrap(root)
    seen = {}

    def note(value, hook):
        seen[hook.name] = hook.module

    hooks = [(site.name, note) for site, _ in model.tree.select(None)]
    model.run_with_hooks(torch.zeros(1), fwd_hooks=hooks)
    assert seen == {site.name: site.module for site, _ in model.tree.select(None)}


class Layer(nn.Module):
    """Returns a tuple and has a part called output, as many transformer layers do."""

    def __init__(self):
        super().__init__()
        self.output = nn.ReLU()

    def forward(self, x):
        return self.output(x), x


class Keeping(ip.Detector):
    def read(self, value, hook):
        self.seen = [*getattr(self, "seen", []), value.tolist()]


def test_a_call_of_a_part_called_output_can_be_named():
    tree = ModuleTree(nn.Sequential(Layer()))
    assert tree.site("0.output#1").module is tree.root[0].output
    assert tree.site("0.output#1").tail == Tail(call=1)


def test_a_cache_key_names_the_same_tensor_to_a_hook_also_beside_a_part_called_output():
    model = ip.wrap(nn.Sequential(Layer()))
    x = torch.tensor([-1.0])
    _, cache = model.run_with_cache(x)
    for name in cache:
        detector = Keeping(name)
        model.run_with_hooks(x, hooks=[detector])
        assert detector.seen == [cache[name].tolist()]


def test_a_name_follows_the_module_when_a_part_is_replaced():
    model = ip.wrap(nn.Sequential(OrderedDict(fc=nn.Linear(2, 2), act=nn.ReLU())))
    assert isinstance(model.sites["act"].module, nn.ReLU)
    model.module.act = nn.Tanh()
    assert isinstance(model.sites["act"].module, nn.Tanh)
    del model.module.act
    with pytest.raises(ip.SiteNotFound):
        model.sites["act"]


def test_a_compiled_module_is_named_with_and_without_the_wrapper():
    inner = nn.Sequential(OrderedDict(fc=nn.Linear(2, 2)))
    tree = ModuleTree(torch.compile(inner))
    assert tree.site("fc").module is inner.fc
    assert tree.site("_orig_mod.fc").module is inner.fc
    assert tree.site("_orig_mod.fc").canonical == "fc"
    assert tree.site("").module is inner


# What a wrong name is told, in full.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(2, 2)
        self.mlp = nn.Sequential(OrderedDict(fc=nn.Linear(2, 2), act=nn.ReLU()))

    def forward(self, x):
        return self.mlp(self.attn(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.lstm = nn.LSTM(2, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.lstm(x)[0]


def told(error_type, call):
    with pytest.raises(error_type) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(
            "blocks.1.atn.input",
            "no site 'blocks.1.atn.input' in Net.\n"
            "  'blocks.1' has: attn, mlp; and input, output\n"
            "  did you mean 'blocks.1.attn.input'?   (list them: model.sites)",
            id="typo in the middle",
        ),
        pytest.param(
            "blocks.1.mlp.fcc",
            "no site 'blocks.1.mlp.fcc' in Net.\n"
            "  'blocks.1.mlp' has: fc, act; and input, output\n"
            "  did you mean 'blocks.1.mlp.fc'?   (list them: model.sites)",
            id="typo at the end",
        ),
        pytest.param(
            "blokcs.1.atn.input",
            "no site 'blokcs.1.atn.input' in Net.\n"
            "  Net has: embed, blocks, lstm; and input, output\n"
            "  did you mean 'blocks.1.attn.input'?   (list them: model.sites)",
            id="two typos",
        ),
        pytest.param(
            "embed.inptu",
            "no site 'embed.inptu' in Net.\n"
            "  'embed' is a Linear with no parts; it has: input, output\n"
            "  did you mean 'embed.input'?   (list them: model.sites)",
            id="typo in input",
        ),
        pytest.param(
            "blocks.7.attn",
            "no site 'blocks.7.attn' in Net.\n"
            "  'blocks' has 3 entries (0..2), no '7'.\n"
            "  did you mean 'blocks.2.attn'?   (list them: model.sites)",
            id="index out of range",
        ),
        pytest.param(
            "zzz",
            "no site 'zzz' in Net.\n"
            "  Net has: embed, blocks, lstm; and input, output\n"
            "  no name is close to it.   (list them: model.sites)",
            id="unknown root",
        ),
        pytest.param(
            "embed.weight",
            "no site 'embed.weight' in Net.\n"
            "  'weight' is a parameter of 'embed'; sites are what modules take and return.\n"
            "  read it: model.get_parameter('embed.weight')   (list them: model.sites)",
            id="parameter",
        ),
    ],
)
def test_a_name_that_is_nowhere_says_where_it_went_wrong_and_what_is_there(name, text):
    model = ip.wrap(Net())
    assert told(ip.SiteNotFound, lambda: model.tree.site(name)) == text
    assert (
        told(ip.SiteNotFound, lambda: model.run_with_cache(torch.ones(3, 2), names_filter=name))
        == text
    )
    assert told(KeyError, lambda: model.hook_dict[name]) == text


def test_a_long_list_of_parts_is_shortened():
    root = nn.Module()
    for at in range(12):
        root.add_module(f"part{at}", nn.ReLU())
    assert told(ip.SiteNotFound, lambda: ModuleTree(root).site("part99")) == (
        "no site 'part99' in Module.\n"
        "  Module has: part0, part1, part2, part3, part4, part5, part6, part7, part8, "
        "part9, ... (12 in all); and input, output\n"
        "  did you mean 'part9'?   (list them: model.sites)"
    )


SITES_OF_NET = (
    "  sites are: output, embed, blocks, blocks.0, blocks.0.attn, blocks.0.mlp, blocks.0.mlp.fc, "
    "blocks.0.mlp.act, ... (19 in all)"
)
LIST_THEM = "   (list them: model.sites)"


@pytest.mark.parametrize("pattern", ["blocks.*.atn", "*.attn", "**.zzz.input"])
def test_a_glob_that_matches_nothing_says_what_there_is(pattern):
    tree = ModuleTree(Net())
    assert told(ip.NothingMatched, lambda: tree.select(pattern)) == (
        f"the glob {pattern!r} matches no site in Net.\n{SITES_OF_NET}\n"
        f"  In a glob `*` stays within one dotted segment and `**` spans many.{LIST_THEM}"
    )


def test_a_regex_that_matches_nothing_says_what_there_is():
    tree = ModuleTree(Net())
    assert told(ip.NothingMatched, lambda: tree.select(re.compile("zz+"))) == (
        f"the filter re.compile('zz+') matches no site in Net.\n{SITES_OF_NET}{LIST_THEM}"
    )


def test_an_empty_list_says_how_to_ask_for_everything():
    tree = ModuleTree(Net())
    assert told(ip.NothingMatched, lambda: tree.select([])) == (
        "an empty list selects no site in Net. Use None for all sites."
    )


def test_a_filter_of_another_type_says_what_a_filter_is():
    tree = ModuleTree(Net())
    assert told(TypeError, lambda: tree.select(3)) == (
        "a site filter is None, a name, a glob, a re.Pattern, a callable on names, "
        "a class of modules, or a list of these; got int: 3"
    )


def test_a_tuple_output_named_without_an_index_says_which_ones_there_are():
    model = ip.wrap(Net())
    x = torch.ones(3, 2)
    assert told(ip.AmbiguousSite, lambda: model.run_with_cache(x, names_filter="lstm")) == (
        "'lstm' holds 3 tensors; say which one: "
        "'lstm.output[0]', 'lstm.output[1][0]', 'lstm.output[1][1]'."
    )
    hook = ("lstm.output[1]", lambda value: value)
    assert told(ip.AmbiguousSite, lambda: model.run_with_hooks(x, fwd_hooks=[hook])) == (
        "'lstm.output[1]' holds 2 tensors; say which one: 'lstm.output[1][0]', 'lstm.output[1][1]'."
    )


@pytest.mark.parametrize(
    ("name", "kind", "there"),
    [("lstm.output[5]", "LSTM", "has [0], [1]"), ("embed.output[0]", "Linear", "is a Tensor")],
)
def test_an_element_that_is_not_there_says_what_the_module_gives(name, kind, there):
    model = ip.wrap(Net())
    step = name[name.index("[") :]
    text = f"{name!r} is not in what {kind} gives: no element {step!r}: the value {there}"
    run = lambda: model.run_with_cache(torch.ones(3, 2), names_filter=name)  # noqa: E731
    assert told(ip.SiteNotFound, run) == text
