"""Reads, edits and gradients on every module of the zoo, against hooks written by hand with bare torch.

The oracle below knows nothing of interpose: it registers torch hooks, takes containers apart and puts
them together by itself. Whatever it and interpose both can do must be the same bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.bounds import assert_near
from tests.copies import copied, odd_addresses
from tests.devices import no_device_mode
from tests.engine import zoo
from tests.engine.zoo import CASES, DTYPES, Case

pytestmark = [
    pytest.mark.bits,
    # complex32 is all there is for complex numbers in half precision.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@pytest.fixture(autouse=True)
def plain_cpu() -> Iterator[None]:
    """As many threads as the environment says, else one; no device mode, which turns fused kernels off.

    No oneDNN either, whose bfloat16 convolutions crash where AMX is forbidden, unless the environment
    says which instructions it may use. A default device is a mode that sees every call of torch.
    """
    threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch._C._set_mkldnn_enabled(onednn and "ONEDNN_MAX_CPU_ISA" in os.environ)
    with no_device_mode():
        yield
    torch._C._set_mkldnn_enabled(onednn)
    torch.set_num_threads(threads)


EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=str)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


# Containers, by hand.

Leaf = tuple[Any, ...]


def parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return []


def tensors_in(value: Any, leaf: Leaf = ()) -> Iterator[tuple[Leaf, Tensor]]:
    if isinstance(value, Tensor):
        yield leaf, value
    for key, part in parts(value):
        yield from tensors_in(part, (*leaf, key))


def with_tensor(value: Any, leaf: Leaf, new: Tensor) -> Any:
    if not leaf:
        return new
    items = {
        key: with_tensor(part, leaf[1:], new) if key == leaf[0] else part
        for key, part in parts(value)
    }
    if isinstance(value, Mapping):
        changed = copy.copy(value)
        changed[leaf[0]] = items[leaf[0]]
        return changed
    if hasattr(value, "_fields"):
        return tuple.__new__(type(value), items.values())
    if isinstance(value, (tuple, list)):
        return type(value)(items.values())
    return dataclasses.replace(value, **items)


# Runs that can be compared: same parameters, same buffers, same inputs, same random numbers.


@functools.cache
def built(case: Case, dtype: torch.dtype) -> nn.Module:
    return case.module(dtype)


def fresh(case: Case, dtype: torch.dtype, *, frozen: bool = False) -> tuple[nn.Module, tuple, dict]:
    """A copy of the module and new inputs; the random numbers start over."""
    original = built(case, dtype)
    configs = [vars(part).get(name) for part in original.modules() for name in CONFIGS]
    module = copy.deepcopy(original, {id(config): config for config in configs})
    for parameter in module.parameters():
        parameter.requires_grad_(not frozen)
    args, kwargs = case.inputs(dtype)
    seed = torch.default_generator.manual_seed  # torch.manual_seed takes longer than most modules
    (seed if zoo.default_device().type == "cpu" else torch.manual_seed)(0)
    return module, args, kwargs


CONFIGS = (
    "config",
    "generation_config",
)  # of transformers: slow to copy, and nobody writes to them


def loss_of(output: Any) -> Tensor:
    """One number that depends on every floating point tensor of an output, each element differently."""
    generator = torch.Generator("cpu").manual_seed(4)
    total = 0.0
    for _, tensor in tensors_in(output):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point():
            total = (
                total + (tensor * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
            )
    return total


@functools.cache
def trouble(case: Case, dtype: torch.dtype) -> tuple[str | None, str | None]:
    """What plain torch on CPU says when it cannot run the bare module forward, or backward."""
    module, args, kwargs = fresh(case, dtype)
    try:
        output = module(*args, **kwargs)
    except RuntimeError as error:
        return str(error), str(error)
    try:
        loss_of(output).backward()
    except RuntimeError as error:
        return None, str(error)
    return None, None


def skip_if_torch_cannot(case: Case, dtype: torch.dtype, *, backward: bool = False) -> None:
    reason = trouble(case, dtype)[backward]
    if reason is not None:
        pytest.skip(f"bare torch cannot: {reason}")


def test_torch_itself_can_run_nearly_every_module_in_every_dtype():
    reasons = [trouble(case, dtype) for case in CASES.values() for dtype in DTYPES]
    assert len(CASES) >= 45
    assert sum(forward is None for forward, _ in reasons) >= 0.85 * len(reasons)
    assert sum(backward is None for _, backward in reasons) >= 0.85 * len(reasons)


def assert_same(got: Any, expected: Any, *, rounded: bool = False) -> None:
    """The same containers with bit-identical tensors in them; NaN equals NaN."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        if equal(got, expected):
            return  # the rest is slow, and for NaN and for messages only
        if rounded:
            assert_near(got, expected)
        else:
            torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)
        return
    assert [key for key, _ in parts(got)] == [key for key, _ in parts(expected)]
    for (_, one), (_, other) in zip(parts(got), parts(expected)):
        assert_same(one, other, rounded=rounded)
    if isinstance(expected, (str, int, float, bool)):
        assert got == expected


def equal(got: Tensor, expected: Tensor) -> bool:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if expected.dtype == torch.complex32:  # torch.equal does not know it
        got, expected = torch.view_as_real(got), torch.view_as_real(expected)
    return torch.equal(got, expected)


def differs(got: Any, expected: Any) -> bool:
    pairs = zip(tensors_in(got), tensors_in(expected), strict=True)
    return not all(equal(one, other) for (_, one), (_, other) in pairs)


# The zoo, once over with bare torch.


@dataclasses.dataclass(frozen=True)
class Record:
    """One tensor that a hook saw: in which call of which module, where in the container."""

    path: str
    call: int
    leaf: Leaf
    alone: bool
    tensor: Tensor


def raw_reads(case: Case, dtype: torch.dtype, *, inputs: bool = False) -> list[Record]:
    module, args, kwargs = fresh(case, dtype)
    records: list[Record] = []
    calls: dict[str, int] = {}

    def note(path: str, value: Any) -> None:
        call = calls[path] = calls.get(path, -1) + 1
        found = list(tensors_in(value))
        for leaf, tensor in found:
            records.append(Record(path, call, leaf, len(found) == 1, tensor.detach().clone()))

    for path, part in module.named_modules():
        if inputs:
            part.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: note(path, (args, kwargs)), with_kwargs=True
            )
        else:
            part.register_forward_hook(lambda _, args, out, path=path: note(path, out))
    module(*args, **kwargs)
    return records


def raw_run(
    case: Case,
    dtype: torch.dtype,
    at: Record,
    change: Callable[[Tensor], Tensor],
    *,
    frozen: bool = False,
    copies: bool = False,
) -> Any:
    """The output when one tensor of one module call is replaced by a torch hook, others by copies if asked for."""
    module, args, kwargs = fresh(case, dtype, frozen=frozen)

    def replacing(path: str) -> Callable[..., Any]:
        calls = iter(range(10**6))

        def hook(_: nn.Module, args: Any, out: Any) -> Any:
            call = next(calls)
            for leaf, value in list(tensors_in(out)):
                if (path, call, leaf) == (at.path, at.call, at.leaf):
                    out = with_tensor(out, leaf, laid_out(change(value), value))
                elif copies and (value.is_floating_point() or value.is_complex()):
                    out = with_tensor(out, leaf, copied(value))
            return out

        return hook

    for path, part in module.named_modules():
        if copies or path == at.path:
            part.register_forward_hook(replacing(path))
    return module(*args, **kwargs)


def laid_out(new: Tensor, value: Tensor) -> Tensor:
    """A replacement with the strides of what it replaces, which kernels look at."""
    if any(stride == 0 for stride in value.stride()):
        return new  # see LAID_OUT_ANEW
    return copied(value.detach()).copy_(new)


LAID_OUT_ANEW = {"expanded"}
"""This torch hook writes an expanded value out, we expand again; other strides, other kernels."""


# Nothing changes.


def every_input(module: nn.Module) -> Any:
    """A filter for the inputs of all modules."""
    names = {path: ".input" if not path else f"{path}.input" for path, _ in module.named_modules()}
    if any(path.split(".")[-1] == "input" for path in names):
        # Children win: `output.input` is a child there, and patterns find such children first.
        return [name for path, name in names.items() if path not in HIDDEN]
    return lambda name: name.split(".")[-1] == "input"


HIDDEN = ("output",)


def read_inputs(case: Case, dtype: torch.dtype) -> list[Record]:
    """What a raw pre-hook sees at the sites of `every_input`."""
    records = raw_reads(case, dtype, inputs=True)
    hidden = () if callable(every_input(built(case, dtype))) else HIDDEN
    return [record for record in records if record.path not in hidden]


def hook_tables(module: nn.Module) -> list[Any]:
    tables = []
    for _, part in module.named_modules():
        names = [name for name in vars(part) if "hook" in name]
        tables.append((sorted(vars(part)), {name: copy.copy(vars(part)[name]) for name in names}))
    return tables


def nothing(model: ip.Model, args: tuple, kwargs: dict) -> Any:
    return model(*args, **kwargs)


def read_every_output(model: ip.Model, args: tuple, kwargs: dict) -> Any:
    return model.run_with_cache(*args, **kwargs)[0]


def read_every_output_and_input(model: ip.Model, args: tuple, kwargs: dict) -> Any:
    wanted = [None, every_input(model.module)]
    return model.run_with_cache(*args, names_filter=wanted, **kwargs)[0]


def clone_every_output(model: ip.Model, args: tuple, kwargs: dict) -> Any:
    return model.run_with_hooks(*args, fwd_hooks=[(None, torch.clone)], **kwargs)


def clone_every_input(model: ip.Model, args: tuple, kwargs: dict) -> Any:
    hooks = [(every_input(model.module), torch.clone)]
    return model.run_with_hooks(*args, fwd_hooks=hooks, **kwargs)


def rearrange_every_output(model: ip.Model, args: tuple, kwargs: dict) -> Any:
    """The same numbers in another order in memory, as an edit may return them."""
    hooks = [(None, lambda value: value.clone(memory_format=torch.contiguous_format))]
    return model.run_with_hooks(*args, fwd_hooks=hooks, **kwargs)


def add_zero_to_everything_in_place(model: ip.Model, args: tuple, kwargs: dict) -> Any:
    def add_zero(value: Tensor, hook: ip.HookPoint) -> Tensor | None:
        if value.is_floating_point():
            value.add_(0)
            return None
        return value.clone()

    hooks = [(None, add_zero), (every_input(model.module), add_zero)]
    return model.run_with_hooks(*args, fwd_hooks=hooks, **kwargs)


def watch_every_gradient(model: ip.Model, args: tuple, kwargs: dict) -> Any:
    return model.run_with_cache(*args, incl_bwd=loss_of, **kwargs)[0]


WAYS_TO_CHANGE_NOTHING = (
    nothing,
    read_every_output,
    read_every_output_and_input,
    clone_every_output,
    clone_every_input,
    rearrange_every_output,
    add_zero_to_everything_in_place,
    watch_every_gradient,
)


WRITES_LATER = {"inplace_after_identity", "views_written_in_place"}
"""These write in place to a value that is also another one. A copy at one of its sites breaks that,
as it does with a torch hook that returns a copy; and it has no gradient of its own."""

COPIES_OUTPUTS = {
    clone_every_output, rearrange_every_output, add_zero_to_everything_in_place, watch_every_gradient,
}  # fmt: skip
COPIES_INPUTS = {clone_every_input, add_zero_to_everything_in_place}
READS = {read_every_output, read_every_output_and_input}
UN_FUSED = {"transformer_encoder_eval"}
"""torch itself runs these otherwise as soon as anything is hooked, also a hook that does nothing."""


def put_copies(module: nn.Module, *, inputs: bool, outputs: bool) -> None:
    """Torch hooks that put a copy in the place of every value, one if a tensor stands in several places.

    What a module writes to the copy of an argument is written to the argument as well.
    """

    def copies_in(value: Any) -> Any:
        made: dict[int, Tensor] = {}
        for leaf, tensor in list(tensors_in(value)):
            if id(tensor) not in made:
                made[id(tensor)] = copied(tensor)
                lent.append((tensor, made[id(tensor)], made[id(tensor)]._version))
            value = with_tensor(value, leaf, made[id(tensor)])
        return value

    lent: list[tuple[Tensor, Tensor, int]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return copies_in((args, kwargs))

    def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        for old, new, version in [entry for entry in lent if any(entry[1] is t for t in given)]:
            if new._version != version:
                old.copy_(new)
                for leaf, tensor in list(tensors_in(out)):
                    out = with_tensor(out, leaf, old) if tensor is new else out
        return copies_in(out) if outputs else out

    hidden = () if callable(every_input(module)) else HIDDEN
    for path, part in module.named_modules():
        if inputs and path not in hidden:
            part.register_forward_pre_hook(before, with_kwargs=True)
        part.register_forward_hook(after, with_kwargs=True)


def check_that_nothing_changes(
    case: Case, dtype: torch.dtype, way: Callable[..., Any], grad: bool
) -> None:
    """Against the bare module, with copies by torch hooks where this way puts copies."""
    reference, args, kwargs = fresh(case, dtype)
    if way in COPIES_INPUTS | COPIES_OUTPUTS:
        put_copies(reference, inputs=way in COPIES_INPUTS, outputs=way in COPIES_OUTPUTS)
    elif way in READS and case.name in UN_FUSED:
        for part in reference.modules():
            part.register_forward_hook(lambda *_: None)
    with torch.set_grad_enabled(grad):
        expected = reference(*args, **kwargs)
        state, given = torch.get_rng_state(), (args, kwargs)

        module, args, kwargs = fresh(case, dtype)
        tables = hook_tables(module)
        got = way(ip.Model(module), args, kwargs)

    assert torch.equal(torch.get_rng_state(), state)
    assert_same(got, expected)
    assert_same((args, kwargs), given)
    assert_same(dict(module.named_buffers()), dict(reference.named_buffers()))
    assert hook_tables(module) == tables
    assert module.training == case.training


@pytest.mark.parametrize("way", WAYS_TO_CHANGE_NOTHING, ids=lambda way: way.__name__)
@EVERY_DTYPE
@EVERY_CASE
def test_nothing_changes_when(case, dtype, way):
    backward = way is watch_every_gradient
    skip_if_torch_cannot(case, dtype, backward=backward)
    if case.name in WRITES_LATER and way in COPIES_INPUTS | COPIES_OUTPUTS:
        pytest.skip("a copy is not the same to it, whoever makes it")
    for grad in (True,) if backward else (True, False):
        check_that_nothing_changes(case, dtype, way, grad)


@pytest.mark.parametrize(
    "way", sorted(COPIES_INPUTS | COPIES_OUTPUTS, key=str), ids=lambda way: way.__name__
)
@pytest.mark.parametrize("case", [c for c in CASES.values() if c.name not in WRITES_LATER], ids=str)
def test_nothing_changes_with_copies_at_odd_addresses_when(case, way):
    with odd_addresses():
        check_that_nothing_changes(case, torch.float32, way, grad=True)


@EVERY_CASE
def test_copies_leave_the_bare_modules_numbers(case):
    """To rounding; it is the hooks of torch that are equal bit for bit."""
    if case.name in WRITES_LATER:
        pytest.skip("a copy is not the same to it, whoever makes it")
    bare, args, kwargs = fresh(case, torch.float32)
    expected = bare(*args, **kwargs)
    module, args, kwargs = fresh(case, torch.float32)
    got = add_zero_to_everything_in_place(ip.Model(module), args, kwargs)
    for (_, one), (_, other) in zip(tensors_in(got), tensors_in(expected), strict=True):
        assert_near(one, other)


# Reads.


@EVERY_DTYPE
@EVERY_CASE
def test_reading_outputs_gives_what_torch_hooks_see(case, dtype):
    skip_if_torch_cannot(case, dtype)
    records = raw_reads(case, dtype)
    module, args, kwargs = fresh(case, dtype)
    model = ip.Model(module)
    _, cache = model.run_with_cache(*args, **kwargs)
    assert_same(list(cache.values()), [record.tensor for record in records])
    for key, record in zip(cache, records):
        assert model.sites[key].module is module.get_submodule(record.path)


@EVERY_DTYPE
@EVERY_CASE
def test_every_call_and_element_has_the_name_the_grammar_gives_it(case, dtype):
    skip_if_torch_cannot(case, dtype)
    records = raw_reads(case, dtype)
    module, args, kwargs = fresh(case, dtype)
    _, cache = ip.Model(module).run_with_cache(*args, **kwargs)
    by_name: dict[str, list[Tensor]] = {}
    for record in records:
        by_name.setdefault(name_of(record, module), []).append(record.tensor)
    for name, tensors in by_name.items():
        assert_same(cache.calls(name), tensors)


def name_of(record: Record, module: nn.Module) -> str:
    root = ".output" if "output" in dict(module.named_children()) else "output"
    if record.alone:
        return record.path or root
    steps = [f".{key}" if str(key).isidentifier() else f"[{key!r}]" for key in record.leaf]
    return (f"{record.path}.output" if record.path else root) + "".join(steps)


@EVERY_DTYPE
@EVERY_CASE
def test_reading_inputs_gives_what_torch_pre_hooks_see(case, dtype):
    skip_if_torch_cannot(case, dtype)
    records = read_inputs(case, dtype)
    module, args, kwargs = fresh(case, dtype)
    _, cache = ip.Model(module).run_with_cache(*args, names_filter=every_input(module), **kwargs)
    assert_same(list(cache.values()), [record.tensor for record in records])


# Edits.


def edited(value: Tensor) -> Tensor:
    """Another value of the same shape and kind."""
    if value.is_floating_point() or value.is_complex():
        return value * 1.5 + 0.25
    return ~value if value.dtype == torch.bool else value.flip(0)


def by_return(value: Tensor, hook: ip.HookPoint) -> Tensor:
    return edited(value)


def in_place_and_return(value: Tensor, hook: ip.HookPoint) -> Tensor:
    return value.copy_(edited(value))


def in_place(value: Tensor, hook: ip.HookPoint) -> None:
    if value.is_floating_point() or value.is_complex():
        value.mul_(1.5).add_(0.25)
    else:
        value.copy_(edited(value))


# Where most edits leave no trace in the output.
WITHOUT_EFFECT = {"empty_batch": "there is no element to change"}


def may_be_edited(case: Case, value: Tensor) -> bool:
    """Any value but the lengths in a packed sequence, which say how long the others are."""
    return case.name != "packed_sequence" or value.is_floating_point()


def one_call(site: str, record: Record, records: list[Record]) -> str:
    """The name with its call number, where another call of the module may hold other tensors."""
    if "#" in site or not record.path or all(r.call == 0 for r in records if r.path == record.path):
        return site
    return f"{record.path}#{record.call}{site.removeprefix(record.path)}"


@EVERY_DTYPE
@EVERY_CASE
def test_edits_by_return_and_in_place_are_the_same_and_equal_a_torch_hook(case, dtype):
    skip_if_torch_cannot(case, dtype)
    bare, args, kwargs = fresh(case, dtype)
    untouched = bare(*args, **kwargs)
    records = raw_reads(case, dtype)
    module, args, kwargs = fresh(case, dtype)
    _, cache = ip.Model(module).run_with_cache(*args, **kwargs)
    effects = []
    for site, record in zip(cache, records, strict=True):
        if not may_be_edited(case, record.tensor):
            continue
        expected = raw_run(case, dtype, record, edited)
        for edit in (by_return, in_place_and_return, in_place):
            got = run_edited(case, dtype, site, edit)
            assert_same(got, expected, rounded=case.name in LAID_OUT_ANEW)
        effects.append(differs(expected, untouched))
    assert sum(effects) > len(effects) / 2 or case.name in WITHOUT_EFFECT


@EVERY_DTYPE
@EVERY_CASE
def test_edits_of_inputs_by_return_and_in_place_are_the_same(case, dtype):
    skip_if_torch_cannot(case, dtype)
    bare, args, kwargs = fresh(case, dtype)
    untouched = bare(*args, **kwargs)
    module, args, kwargs = fresh(case, dtype)
    records = read_inputs(case, dtype)
    _, cache = ip.Model(module).run_with_cache(*args, names_filter=every_input(module), **kwargs)
    effects = []
    for site, record in zip(cache, records, strict=True):
        if not may_be_edited(case, record.tensor):
            continue
        site = one_call(site, record, records)
        expected = run_edited(case, dtype, site, by_return)
        for edit in (in_place_and_return, in_place):
            assert_same(run_edited(case, dtype, site, edit), expected)
        effects.append(differs(expected, untouched))
    assert sum(effects) > len(effects) / 2 or case.name in WITHOUT_EFFECT


def run_edited(case: Case, dtype: torch.dtype, site: str, edit: Callable[..., Any]) -> Any:
    module, args, kwargs = fresh(case, dtype)
    return ip.Model(module).run_with_hooks(*args, fwd_hooks=[(site, edit)], **kwargs)


# Gradients.


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@EVERY_DTYPE
@EVERY_CASE
def test_gradients_at_outputs_are_those_of_a_leaf_put_in_their_place(case, dtype, frozen):
    skip_if_torch_cannot(case, dtype, backward=True)
    records = raw_reads(case, dtype)
    module, args, kwargs = fresh(case, dtype, frozen=frozen)
    if case.name in WRITES_LATER:
        with pytest.raises(ip.GradientError, match="has no gradient of its own"):
            ip.Model(module).run_with_cache(*args, incl_bwd=loss_of, **kwargs)
        return
    _, cache = ip.Model(module).run_with_cache(*args, incl_bwd=loss_of, **kwargs)
    assert all(parameter.grad is None for parameter in module.parameters())
    names = [name for name in cache if not name.endswith("_grad")]
    checked = 0
    for name, record in zip(names, records, strict=True):
        if not (record.tensor.is_floating_point() or record.tensor.is_complex()):
            assert name not in cache.grad
            continue
        expected = raw_gradient(case, dtype, record, frozen=frozen, copies=True)
        if expected is None:
            assert name not in cache.grad
            continue
        assert_same(cache.grad[name], expected, rounded=case.name in LAID_OUT_ANEW)
        checked += 1
    assert checked > len(names) / 2


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@EVERY_CASE
def test_the_gradient_of_a_site_asked_for_alone_is_the_same(case, frozen):
    dtype = torch.float32
    module, args, kwargs = fresh(case, dtype)
    _, cache = ip.Model(module).run_with_cache(*args, **kwargs)
    for name, record in zip(cache, raw_reads(case, dtype), strict=True):
        if not (record.tensor.is_floating_point() or record.tensor.is_complex()):
            continue
        expected = raw_gradient(case, dtype, record, frozen=frozen)
        module, args, kwargs = fresh(case, dtype, frozen=frozen)
        run = functools.partial(ip.Model(module).run_with_cache, *args, **kwargs)
        if case.name in WRITES_LATER:
            # A refusal is right, a wrong number is not.
            with contextlib.suppress(ip.GradientError, ip.NeverFired):
                assert_same(run(names_filter=name, incl_bwd=loss_of)[1].grad[name], expected)
        elif expected is None:
            with pytest.raises(ip.NeverFired, match="no gradient came back"):
                run(names_filter=name, incl_bwd=loss_of)
        else:
            found = run(names_filter=name, incl_bwd=loss_of)[1].grad[name]
            assert_same(found, expected, rounded=case.name in LAID_OUT_ANEW)


def raw_gradient(
    case: Case, dtype: torch.dtype, at: Record, *, frozen: bool, copies: bool = False
) -> Tensor | None:
    """That of a leaf put in a value's place; with copies in all the others, as where all are watched."""
    leaves: list[Tensor] = []

    def put_in_a_leaf(value: Tensor) -> Tensor:
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[0].clone()

    loss = loss_of(raw_run(case, dtype, at, put_in_a_leaf, frozen=frozen, copies=copies))
    if not loss.requires_grad:
        return None
    loss.backward()
    return leaves[0].grad


# The traps of bare torch hooks, by their numbers; most tests first show that torch falls in.


class Net(nn.Module):
    """fc1, an activation, fc2."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.act = act or nn.Tanh()
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


def double(value: Tensor, hook: ip.HookPoint) -> Tensor:
    return value * 2


def leaf_gradient(module: nn.Module, at: str, *args: Any, **kwargs: Any) -> Tensor:
    """d(loss)/d(output of a module that returns a tensor), by a leaf put in its place."""
    leaves = []

    def hook(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        leaves.append(out.detach().clone().requires_grad_())
        return leaves[0].clone()

    handle = module.get_submodule(at).register_forward_hook(hook)
    loss_of(module(*args, **kwargs)).backward()
    handle.remove()
    module.zero_grad()
    return leaves[0].grad


def test_trap_01_full_backward_hooks_break_on_in_place_operations(x):
    module = Net(nn.ReLU(inplace=True))
    handle = module.fc1.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="BackwardHookFunction"):
        module(x)
    handle.remove()
    _, cache = ip.Model(module).run_with_cache(x, names_filter="fc1", incl_bwd=loss_of)
    assert_same(cache.grad["fc1"], leaf_gradient(module, "fc1", x))


def test_trap_02_full_backward_hooks_see_no_gradient_of_keyword_arguments(x):
    module = CASES["keyword_only"].module(torch.float32)
    x.requires_grad_()
    seen = []
    handle = module.inner.register_full_backward_hook(lambda _, inputs, __: seen.append(inputs))
    scale = torch.randn(4)
    with warnings.catch_warnings():  # as newer versions of torch do: "no inputs require gradients"
        warnings.simplefilter("ignore", UserWarning)
        loss_of(module(hidden=x, scale=scale)).backward()
    handle.remove()
    assert seen == [()]
    inputs = ["inner.input.hidden", "inner.input.scale"]
    _, cache = ip.Model(module).run_with_cache(
        hidden=x, scale=scale, names_filter=inputs, incl_bwd=loss_of
    )
    assert_near(cache.grad["inner.input.hidden"], x.grad)
    scale.requires_grad_()
    loss_of(module(hidden=x, scale=scale)).backward()
    assert_near(cache.grad["inner.input.scale"], scale.grad)


@pytest.mark.parametrize("name", ["dict_output", "dataclass_output", "model_output"])
def test_trap_03_full_backward_hooks_never_fire_on_dictionaries_and_dataclasses(name, x):
    module = CASES[name].module(torch.float32)
    seen = []
    handle = module.body.register_full_backward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="backward hook"):
        loss_of(module(x)).backward()
    handle.remove()
    assert not seen
    _, cache = ip.Model(module).run_with_cache(x, names_filter="**", incl_bwd=loss_of)
    grads = [name for name in cache.grad if name.startswith("body.output")]
    assert len(grads) >= 2
    assert all(cache.grad[name].abs().sum() > 0 for name in grads)


def test_trap_04_a_full_backward_hook_that_does_nothing_makes_another_tensor(x):
    module = nn.Identity()
    x.requires_grad_()
    handle = module.register_full_backward_hook(lambda *_: None)
    assert module(x) is not x
    handle.remove()
    model = ip.Model(module)
    out, _ = model.run_with_cache(x)
    assert out is x
    assert model.run_with_hooks(x, hooks=[("output", lambda value, hook: None)]) is x


def test_trap_05_a_tensor_hook_belongs_to_the_value_before_a_later_in_place_change(x):
    value = torch.ones(2, requires_grad=True) * 1
    seen = []
    value.register_hook(seen.append)
    value.mul_(5)
    value.retain_grad()
    value.sum().backward()
    assert seen[0].tolist() == [5.0, 5.0]
    assert value.grad.tolist() == [1.0, 1.0]

    module = CASES["inplace_arithmetic"].module(torch.float32)
    _, cache = ip.Model(module).run_with_cache(x, incl_bwd=loss_of)
    assert_same(cache.grad["fc1"], leaf_gradient(module, "fc1", x))

    # An edit in place: the gradient is that of the value after it, which is what the cache shows.
    edit = [("fc1", lambda value, hook: value.mul_(5))]
    _, cache = ip.Model(module).run_with_cache(x, fwd_hooks=edit, incl_bwd=loss_of)
    handle = module.fc1.register_forward_hook(lambda _, args, out: out * 5)
    assert_same(cache.grad["fc1"], leaf_gradient(module, "fc1", x))
    handle.remove()


def test_trap_06_a_later_in_place_operation_overwrites_what_a_hook_kept(x):
    module = Net(nn.ReLU(inplace=True))
    kept = {}
    handle = module.fc1.register_forward_hook(lambda _, args, out: kept.update(fc1=out))
    module(x)
    handle.remove()
    assert kept["fc1"].min() == 0
    model = ip.Model(module)
    _, cache = model.run_with_cache(x)
    assert_same(cache["fc1"], module.fc1(x).detach())
    assert cache["fc1"].min() < 0
    _, cache = model.run_with_cache(x, clone=False)
    with pytest.raises(ip.StaleValue, match="clone=False"):
        cache["fc1"]


def test_trap_07_an_in_place_edit_breaks_the_backward_pass_of_what_was_saved(x):
    module = Net(nn.Sigmoid())
    handle = module.act.register_forward_hook(lambda _, args, out: out.mul_(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(x).sum().backward()
    handle.remove()
    ip.Model(module).run_with_hooks(
        x, fwd_hooks=[("act", lambda value, hook: value.mul_(2))]
    ).sum().backward()
    got = module.fc1.weight.grad.clone()
    module.zero_grad()
    module.act.register_forward_hook(lambda _, args, out: out * 2)
    module(x).sum().backward()
    assert_same(got, module.fc1.weight.grad)


def test_trap_08_a_dictionary_keeps_only_the_last_of_several_calls():
    module, args, _ = fresh(CASES["handwritten_cell"], torch.float32)
    kept, every = {}, []
    handles = [
        module.cell.register_forward_hook(lambda _, args, out: kept.update(cell=out)),
        module.cell.register_forward_hook(lambda _, args, out: every.append(out.detach().clone())),
    ]
    module(*args)
    for handle in handles:
        handle.remove()
    assert torch.equal(kept["cell"], every[-1])
    _, cache = ip.Model(module).run_with_cache(*args)
    assert_same(cache.calls("cell"), every)
    assert_same([cache[f"cell#{i}"] for i in range(3)], every)
    with pytest.raises(
        ip.AmbiguousSite, match="'cell' was called 3 times; say which call: 'cell#0'"
    ):
        cache["cell"]


class UsesWithoutCalling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.direct = nn.Linear(4, 4)
        self.weight_only = nn.Linear(4, 4)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.linear(self.direct.forward(x), self.weight_only.weight)
        return self.attn(x[None], x[None], x[None])[0]


@pytest.mark.parametrize("name", ["direct", "weight_only", "attn.out_proj"])
def test_trap_09_modules_that_are_used_without_being_called(name, x):
    module = UsesWithoutCalling()
    fired = []
    module.get_submodule(name).register_forward_hook(lambda *_: fired.append(1))
    module(x)
    assert not fired
    model = ip.Model(module)
    with pytest.raises(
        ip.NeverFired, match=f"'{name}' never fired: .* was not called in 1 forward"
    ):
        model.run_with_hooks(x, fwd_hooks=[(name, double)])
    with pytest.raises(ip.NeverFired, match="Hook the module around it"):
        model.run_with_cache(x, names_filter=name)
    model.run_with_cache(x)  # asked for everything, what there is will do


def test_trap_09_children_that_are_torchscript(x):
    module = Net(torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x))
    model = ip.Model(module)
    with pytest.raises(ip.Unsupported, match="TorchScript"):
        model.run_with_hooks(x, fwd_hooks=[("act", double)])
    with pytest.raises(ip.SiteNotFound, match="'act' is a TopLevelTracedModule with no parts"):
        model.run_with_hooks(x, fwd_hooks=[("act.0", double)])
    _, cache = model.run_with_cache(x)
    assert {"fc1", "fc2", "output"} <= set(cache)


def gpt2() -> nn.Module:
    return CASES["tiny_gpt2"].module(torch.float32)


def llama() -> nn.Module:
    return CASES["tiny_llama"].module(torch.float32)


IDS = torch.tensor([[1, 5, 2, 7, 3]], device=torch.get_default_device())


@pytest.mark.parametrize("name", ["transformer.h.0.attn.attn_dropout", "transformer.h"])
def test_trap_10_transformers_has_modules_that_never_run(name):
    module = gpt2()
    model = ip.Model(module)
    with pytest.raises(ip.NeverFired, match=name):
        model.run_with_cache(IDS, names_filter=name)
    sites = model.scan(IDS)
    assert sites[name].calls == 0
    assert sites["transformer.h.0.attn"].calls == 1
    assert "never called" in repr(sites.select("**"))


def test_trap_11_inputs_that_come_by_keyword():
    module = llama()
    seen, layer = [], "model.layers.0.self_attn"
    module.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args))
    normed = []
    norm = module.get_submodule("model.layers.0.input_layernorm")
    norm.register_forward_hook(lambda _, args, out: normed.append(out.detach().clone()))
    expected = module(IDS).logits
    assert seen == [()]
    model = ip.Model(module)
    name = f"{layer}.input.hidden_states"
    out, cache = model.run_with_cache(IDS, names_filter=name)
    assert_same(cache[name], normed[0])
    assert_same(out.logits, expected)
    edited_by_norm = model.run_with_hooks(
        IDS, fwd_hooks=[("model.layers.0.input_layernorm", double)]
    ).logits
    assert_same(model.run_with_hooks(IDS, fwd_hooks=[(name, double)]).logits, edited_by_norm)
    assert differs(edited_by_norm, expected)


def test_trap_12_a_tuple_here_and_a_tensor_there():
    module = llama()
    kinds = {}
    for name in ("model.layers.0.self_attn", "model.layers.0"):
        module.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: kinds.update({name: out})
        )
    module(IDS)
    attn, block = kinds.values()
    assert isinstance(attn, tuple)
    assert attn[1] is None
    assert block[0].shape == (5, 8)  # out[0] of a tensor is its first row
    model = ip.Model(module)
    _, cache = model.run_with_cache(IDS, names_filter=list(kinds))
    assert_same(cache["model.layers.0.self_attn"], attn[0].detach())
    assert_same(cache["model.layers.0"], block.detach())
    bare = module(IDS).logits
    for name in kinds:
        assert differs(model.run_with_hooks(IDS, fwd_hooks=[(name, double)]).logits, bare)


def test_trap_13_an_edit_of_the_wrong_kind_fails_where_it_is(x):
    module = Net()
    handle = module.fc1.register_forward_hook(lambda _, args, out: (out, None))
    with pytest.raises(TypeError, match="tuple") as raised:
        module(x)
    assert "fc1" not in str(raised.value)
    handle.remove()
    model = ip.Model(module)
    wrong = {
        "returned a tuple": lambda value, hook: (value, None),
        r"returned shape \(3, 2\); the model needs \(3, 4\)": lambda value, hook: value[:, :2],
        "returned torch.int64; the model needs torch.float32": lambda value, hook: value.long(),
        "returned a tensor on meta; the value is on cpu": lambda value, hook: value.to("meta"),
    }
    for text, edit in wrong.items():
        with pytest.raises(ip.EditShapeError, match=f"at 'fc1' {text}"):
            model.run_with_hooks(x, fwd_hooks=[("fc1", edit)])
    as_torch = ip.torch_hook(lambda module, args, out: (out, None))
    with pytest.raises(ip.EditShapeError, match=r"(?s)at 'fc1' returned a tuple .*a Tensor"):
        model.run_with_hooks(x, fwd_hooks=[("fc1", as_torch)])


# Compiled code.

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
COMPILING = pytest.mark.filterwarnings(
    # Dynamo uses deprecated parts of torch, and looks at .grad of whatever it is given.
    "ignore::DeprecationWarning:torch",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Dynamo",  # it says at length why it leaves a hooked module alone
)


@pytest.fixture
def compilations() -> Iterator[list[Any]]:
    """A backend that runs graphs as they are, and a list of what it was given."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    yield graphs
    torch._dynamo.reset()


def counting(graphs: list[Any]) -> Callable[..., Any]:
    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


@COMPILING
def test_trap_14_hooks_added_after_compilation_are_ignored(x, compilations):
    module = Net()
    compiled = torch.compile(module, backend=counting(compilations))
    expected = compiled(x)
    handle = module.fc1.register_forward_hook(lambda _, args, out: out * 2)
    assert_same(compiled(x), expected)  # the trap
    handle.remove()
    model = ip.Model(compiled)
    _, cache = model.run_with_cache(x)
    assert_same(cache["fc1"], module.fc1(x).detach())
    changed = module.fc2(module.act(module.fc1(x) * 2))
    assert_same(model.run_with_hooks(x, fwd_hooks=[("fc1", double)]), changed)
    assert_same(compiled(x), expected)  # and removal is seen


@COMPILING
@pytest.mark.parametrize("fullgraph", [False, True])
def test_trap_15_hooked_runs_of_compiled_code_compile_nothing(x, fullgraph, compilations):
    module = Net()
    compiled = torch.compile(module, backend=counting(compilations), fullgraph=fullgraph)
    compiled(x)
    before = len(compilations)
    model = ip.Model(compiled)
    for _ in range(3):
        assert differs(model.run_with_hooks(x, fwd_hooks=[("act", double)]), module(x))
        compiled(x)
    assert len(compilations) == before == 1


@COMPILING
def test_trap_16_hooks_that_were_there_before_compilation_fire(x, compilations):
    module = Net()
    bare = module(x)
    model = ip.Model(module)
    fired = []
    handle = model.add_hook("fc1", lambda value, hook: fired.append(1) or value * 2)
    compiled = torch.compile(module, backend=counting(compilations))
    try:
        if TORCH < (2, 7):  # which would trace into the hook: it says so instead
            with pytest.raises(ip.Unsupported, match="Do that first"):
                compiled(x)
            return
        outputs = [compiled(x) for _ in range(2)]
    finally:
        handle.remove()
    changed = module.fc2(module.act(module.fc1(x) * 2))
    assert len(fired) == 2
    assert_same(outputs, [changed, changed])
    assert_same(compiled(x), bare)


@COMPILING
def test_trap_17_hooks_that_cannot_be_compiled_work_with_fullgraph(x, compilations):
    @torch.compiler.disable
    def edit(value: Tensor) -> Tensor:
        return value * 2

    module = Net()
    handle = module.fc1.register_forward_hook(lambda _, args, out: edit(out))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(module, backend=counting(compilations), fullgraph=True)(x)
    handle.remove()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=counting(compilations), fullgraph=True)
    compiled(x)
    got = ip.Model(compiled).run_with_hooks(x, fwd_hooks=[("fc1", lambda value, hook: edit(value))])
    assert_same(got, module.fc2(module.act(module.fc1(x) * 2)))


@COMPILING
def test_trap_18_wrappers_that_add_prefixes_to_names(x, compilations):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    bare = Net()
    plain = {"output", "fc1", "act", "fc2"}

    compiled: Any = torch.compile(bare, backend=counting(compilations))
    assert [name for name, _ in compiled.named_modules() if name][1] == "_orig_mod.fc1"
    model = ip.Model(compiled)
    assert set(model.sites) == plain
    _, cache = model.run_with_cache(x, names_filter=["_orig_mod.fc1"])
    assert_same(cache["fc1"], cache["_orig_mod.fc1"])

    module = copy.deepcopy(bare)
    module.act = checkpoint_wrapper(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    assert "act._checkpoint_wrapped_module.1" in dict(module.named_modules())
    assert set(ip.Model(module).sites) == plain | {"act.0", "act.1"}
    _, cache = ip.Model(module).run_with_cache(x, names_filter="act._checkpoint_wrapped_module.1")
    assert_same(cache["act.1"], module.act(module.fc1(x)).detach())


def test_trap_18_distributed_wrappers_add_prefixes_to_names(x, one_process):
    module = Net()
    wrapped = nn.parallel.DistributedDataParallel(module)
    assert "module.fc1" in dict(wrapped.named_modules())
    model = ip.Model(wrapped)
    assert set(model.sites) == {"output", "fc1", "act", "fc2"}
    for name in ("fc1", "module.fc1"):
        out, cache = model.run_with_cache(x, names_filter=name)
        assert_same(cache[name], module.fc1(x).detach())
        assert_same(out, module(x))


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of one, without a network."""
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Generation.


def generate(module: nn.Module, **options: Any) -> Tensor:
    mask = torch.ones_like(IDS)
    return module.generate(
        IDS, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options
    )


@pytest.mark.skipif(TORCH < (2, 7), reason="it compiles transformers without their globals")
@COMPILING
def test_trap_19_hooks_fire_while_a_compiled_model_generates(compilations):
    module = gpt2()
    expected = generate(module)
    eager = []
    with ip.Model(module).hooks([("transformer.h.1", lambda value, hook: eager.append(value))]):
        generate(module)
    module.forward = torch.compile(module.forward, backend=counting(compilations), dynamic=True)
    assert torch.equal(generate(module), expected)
    assert compilations
    raw = []
    handle = module.transformer.h[1].register_forward_hook(lambda _, args, out: raw.append(out))
    generate(module)
    handle.remove()
    assert not raw  # the trap
    seen = []
    with ip.Model(module).hooks([("transformer.h.1", lambda value, hook: seen.append(value))]):
        assert torch.equal(generate(module), expected)
    assert_same(seen, eager)
    assert torch.equal(generate(module), expected)


@pytest.mark.parametrize("beams", [1, 3])
def test_trap_20_generation_shows_the_prompt_once_and_then_single_positions(beams):
    module = gpt2()
    shapes, raw = [], []
    block = module.transformer.h[0]
    handle = block.register_forward_hook(lambda _, args, out: raw.append(out.shape))
    expected = generate(module, num_beams=beams)
    handle.remove()
    hooks = [("transformer.h.0", lambda value, hook: shapes.append(value.shape))]
    with ip.Model(module).hooks(hooks):
        got = generate(module, num_beams=beams)
    assert torch.equal(got, expected)
    assert [tuple(shape) for shape in shapes] == [(beams, 5, 8)] + [(beams, 1, 8)] * 3
    assert shapes == raw


def test_trap_20_edits_reach_every_step_of_a_generation():
    module = gpt2()
    bias = 100 * torch.nn.functional.one_hot(torch.tensor(6), 11)
    with ip.Model(module).hooks([("lm_head", lambda value, hook: value + bias)]):
        got = generate(module)
    assert got[0].tolist() == [*IDS[0].tolist(), 6, 6, 6, 6]
    assert generate(module)[0].tolist() != got[0].tolist()


def test_trap_21_generation_has_no_gradients_and_the_error_says_so():
    module = gpt2()
    model = ip.Model(module)
    hooks = model.hooks(bwd_hooks=[("transformer.h.0", lambda grad, hook: None)])
    with pytest.raises(ip.NeverFired, match=r"gradients are off here \(torch.no_grad"), hooks:
        generate(module)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_trap_22_values_from_inference_mode_cannot_be_used_for_gradients(x):
    module = Net()
    kept = []
    handle = module.fc1.register_forward_hook(lambda _, args, out: kept.append(out))
    with torch.inference_mode():
        expected = module(x)
    handle.remove()
    with pytest.raises(RuntimeError, match="inference"):
        kept[0].requires_grad_()
    model = ip.Model(module)
    with torch.inference_mode():
        out, cache = model.run_with_cache(x)
        edits = [
            model.run_with_hooks(x, fwd_hooks=[("fc1", edit)])
            for edit in (by_return, in_place_and_return, in_place)
        ]
    assert torch.equal(out, expected)
    value = cache["fc1"].requires_grad_()
    module.fc2(module.act(value)).sum().backward()
    assert value.grad.abs().sum() > 0
    for edit in edits:
        assert torch.equal(edit, module.fc2(module.act(edited(module.fc1(x)))))
    with torch.inference_mode(), pytest.raises(ip.NeverFired, match="gradients are off here"):
        model.run_with_cache(x, incl_bwd=loss_of)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.block = Net()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.block, self.fc1(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_trap_23_checkpointing_runs_the_forward_pass_again(x, reentrant):
    module = Checkpointed(reentrant)

    def gradient(edit: Callable[[nn.Module, Any, Tensor], Any]) -> Tensor:
        handle = module.block.act.register_forward_hook(edit)
        module(x).sum().backward()
        handle.remove()
        got = module.block.fc2.weight.grad.clone()
        module.zero_grad()
        return got

    factors = iter([3.0])
    once = gradient(lambda _, args, out: out * next(factors, 1.0))
    right = gradient(lambda _, args, out: out * 3.0)
    assert differs(once, right)  # the trap: the second forward pass was not edited

    def triple(value: Tensor, hook: ip.HookPoint) -> Tensor:
        return value * 3.0

    model = ip.Model(module)
    with model.hooks([("block.act", triple)]):
        module(x).sum().backward()
    assert_same(module.block.fc2.weight.grad, right)
    with pytest.raises(ip.GradientError, match="under activation checkpointing"):
        model.run_with_hooks(x, fwd_hooks=[("block.act", triple)]).sum().backward()
    _, cache = model.run_with_cache(x, names_filter="block.act")
    assert list(cache) == ["block.act"]


def test_trap_24_hooks_left_behind_by_exceptions_copies_and_pickles(x):
    import pickle

    module = Net()
    before = hook_tables(module)
    fired = []

    def fails(value: Tensor, hook: ip.HookPoint) -> None:
        raise ZeroDivisionError("on purpose")

    model = ip.Model(module)
    with pytest.raises(ZeroDivisionError, match="on purpose") as raised:
        model.run_with_hooks(x, fwd_hooks=[("fc1", double), ("act", fails), ("fc2", double)])
    assert "at site 'act'" in raised.value.__notes__[0]
    assert hook_tables(module) == before

    expected = module(x)
    with model.hooks([("fc1", lambda value, hook: fired.append(1) or value * 2)]):
        twin = copy.deepcopy(module)
        restored = pickle.loads(pickle.dumps(module))
        assert_same(twin(x), expected)
        assert_same(restored(x), expected)
        assert not fired
        module(x)
    assert fired
    assert hook_tables(module) == before

    # The trap: a copy of a module runs the hooks of the original, and a lambda cannot be pickled.
    raw = []
    module.fc1.register_forward_hook(lambda *_: raw.append(1))
    copy.deepcopy(module)(x)
    assert raw
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(module)


class Swallows(nn.Module):
    """Code like this is why an early exit must be no Exception."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(Exception):
            x = self.fc1(x)
        return self.fc2(x)


def test_trap_25_early_exit_through_code_that_catches_exceptions(x):
    module = Swallows()

    def leave(*_: Any) -> None:
        raise RuntimeError("enough")

    reached = []
    handle = module.fc1.register_forward_hook(leave)
    module.fc2.register_forward_hook(lambda *_: reached.append(1))
    module(x)
    assert reached  # the trap
    handle.remove()
    model = ip.Model(module)
    model.scan(x)
    reached.clear()
    out, cache = model.run_with_cache(x, names_filter="fc1", stop=True)
    assert out is None
    assert_same(cache["fc1"], module.fc1(x).detach())
    assert not reached
    assert module(x).shape == (3, 3)


def test_trap_26_forward_passes_of_other_threads(x):
    import threading

    module = Net()
    expected = module(x)
    other, raw, fired = [], [], []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: other.append(module(x)))
        thread.start()
        thread.join()

    handle = module.fc1.register_forward_hook(lambda *_: raw.append(1))
    elsewhere()
    handle.remove()
    assert raw  # the trap
    with ip.Model(module).hooks([("fc1", lambda value, hook: fired.append(1) or value * 2)]):
        elsewhere()
        assert not fired
        module(x)
    assert len(fired) == 1
    assert_same(other, [expected, expected])


def data_parallel(module: nn.Module) -> nn.Module:
    """As on several GPUs; its own constructor looks for them."""
    parallel = nn.DataParallel.__new__(nn.DataParallel)
    nn.Module.__init__(parallel)
    parallel.module = module
    return parallel


def test_trap_27_data_parallel_replicas_share_the_hooks_of_the_module(x):
    module = Net()
    with pytest.raises(ip.Unsupported, match=r"(?s)nn.DataParallel .*data_parallel.module"):
        ip.Model(data_parallel(module))
    with pytest.raises(ip.Unsupported, match=r"nn.DataParallel"):
        ip.Model(nn.Sequential(data_parallel(module)))
    replica = module._replicate_for_data_parallel()
    assert replica._forward_hooks is not None
    raw = []
    handle = module.register_forward_hook(lambda *_: raw.append(1))
    module._replicate_for_data_parallel()(x)
    assert raw  # the trap
    handle.remove()
    hooks = ip.Model(module).hooks([("output", double)])
    with pytest.raises(ip.Unsupported, match=r"inside nn.DataParallel"), hooks:
        module._replicate_for_data_parallel()(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.filterwarnings("ignore:DTensor random operators")  # torch 2.6, on a mesh of CPUs
def test_trap_28_sharded_values_are_refused(x, one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    module = Net()
    expected = module(x)
    mesh = init_device_mesh("cpu", (1,))
    sharded = ColwiseParallel(use_local_output=False)
    module.fc1 = parallelize_module(module.fc1, mesh, sharded)
    raw = []
    handle = module.fc1.register_forward_hook(lambda _, args, out: raw.append(out))
    module.fc1(x)
    handle.remove()
    assert isinstance(raw[0], DTensor)  # the trap: one shard of the value
    module.act = Whole()
    assert_same(module(x), expected)
    model = ip.Model(module)
    for run in (
        lambda: model.run_with_hooks(x, fwd_hooks=[("fc1", double)]),
        lambda: model.run_with_cache(x, names_filter="fc1"),
    ):
        with pytest.raises(ip.Unsupported, match=r"'fc1' is a DTensor, one shard"):
            run()
    _, cache = model.run_with_cache(x, names_filter="act")
    assert_same(cache["act"], Whole()(module.fc1(x)).detach())


class Whole(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return torch.tanh(x.full_tensor())


def test_trap_29_values_inside_vmap_mean_nothing_outside(x):
    module = Net()
    raw = []
    handle = module.fc1.register_forward_hook(lambda _, args, out: raw.append(out))
    torch.vmap(module)(x)
    handle.remove()
    assert torch._C._functorch.is_batchedtensor(raw[0])
    assert len(raw) == 1
    assert raw[0].shape == (4,)
    model = ip.Model(module)
    hooks = model.hooks([("fc1", double)])
    with pytest.raises(ip.Unsupported, match=r"'fc1' was reached inside torch.func"), hooks:
        torch.vmap(module)(x)
    assert_same(model(x), module(x))


def test_trap_30_under_autocast_input_and_output_have_different_dtypes(x):
    module = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(x)
        model = ip.Model(module)
        out, cache = model.run_with_cache(x, names_filter=["fc1", "fc1.input"])
        wide = model.run_with_hooks(x, fwd_hooks=[("fc1", lambda v, hook: v.float() * 1.5 + 0.25)])
        raw = module.fc1.register_forward_hook(
            lambda _, args, out: (out.float() * 1.5 + 0.25).to(out.dtype)
        )
        narrow = module(x)
        raw.remove()
    assert_same(out, expected)
    assert cache["fc1.input"].dtype == torch.float32
    assert cache["fc1"].dtype == torch.bfloat16
    assert_same(wide, narrow)


def test_trap_31_torchscript_is_refused(x):
    for scripted in (torch.jit.script(Net()), torch.jit.trace(Net(), x)):
        with pytest.raises(ip.Unsupported, match=r"TorchScript.*\n?.*before torch.jit.script"):
            ip.Model(scripted)


@COMPILING
def test_trap_31_exporting_inside_a_scope_is_refused(x):
    module = Net()
    expected = module(x)
    handle = module.fc1.register_forward_hook(lambda _, args, out: out * 2)
    baked = torch.export.export(module, (x,), strict=False)
    handle.remove()
    assert differs(baked.module()(x), expected)  # the trap
    hooks = ip.Model(module).hooks([("fc1", double)])
    with pytest.raises(ip.InterposeError, match="export"), hooks:
        torch.export.export(module, (x,), strict=False)
    assert_same(module(x), expected)


def test_trap_32_one_module_under_two_names(x):
    module = CASES["shared_module"].module(torch.float32)
    model = ip.Model(module)
    assert list(model.sites) == ["output", "first", "act"]
    assert model.sites["second"].canonical == "first"
    assert model.sites["first"].aliases == ("second",)
    _, cache = model.run_with_cache(x, names_filter=None)
    assert_same(cache.calls("second"), cache.calls("first"))
    assert len(cache.calls("first")) == 2
    fired = []
    model.run_with_hooks(x, fwd_hooks=[("second", lambda value, hook: fired.append(hook.call))])
    assert fired == [0, 1]
    only_second = model.run_with_hooks(x, fwd_hooks=[("second#1", double)])
    assert_same(only_second, module(x) * 2)


def test_trap_33_forwards_and_hooks_that_others_put_on_the_module(x):
    module = Net()
    plain = module.fc1.forward

    def moved(*args: Any, **kwargs: Any) -> Tensor:  # as accelerate's AlignDevicesHook does
        return plain(*args, **kwargs) + 1

    module.fc1.forward = moved
    order = []
    foreign = module.fc1.register_forward_hook(
        lambda _, args, out: order.append("foreign") or out * 3
    )
    expected = module(x)
    model = ip.Model(module)
    out, cache = model.run_with_cache(x)
    assert_same(out, expected)
    assert_same(cache["fc1"], (moved(x) * 3).detach())  # what the rest of the model sees
    order.clear()

    def note(value: Tensor, hook: ip.HookPoint) -> Tensor:
        order.append("ours")
        assert_same(value.detach(), moved(x).detach())
        return value * 2

    got = model.run_with_hooks(x, fwd_hooks=[("fc1", note)])
    assert order == ["ours", "foreign"]
    assert_same(got, module.fc2(module.act(moved(x) * 2 * 3)))
    skipped = model.run_with_hooks(x, hooks=[ip.skip("fc1", lambda x: x)])
    assert_same(skipped, module.fc2(module.act(x * 3)))
    assert module.fc1.forward is moved
    assert foreign.id in module.fc1._forward_hooks
    assert_same(module(x), expected)


def test_trap_34_hooking_keeps_positions_and_masks_of_a_padded_batch():
    module = gpt2()
    padded = torch.tensor([[0, 0, 1, 5, 2], [1, 5, 2, 7, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions}
    bare = module(padded, **given).logits
    alone = module(padded[:1, 2:]).logits
    torch.testing.assert_close(bare[:1, 2:], alone)
    assert differs(
        module(padded, attention_mask=mask).logits[:1, 2:].round(decimals=3),
        alone.round(decimals=3),
    )
    model = ip.Model(module)
    out, cache = model.run_with_cache(padded, **given)
    assert_same(out.logits, bare)
    _, short = model.run_with_cache(padded[:1, 2:], names_filter="transformer.h.1")
    torch.testing.assert_close(cache["transformer.h.1"][:1, 2:], short["transformer.h.1"])
    same = model.run_with_hooks(padded, fwd_hooks=[(None, torch.clone)], **given)
    assert_near(same.logits, bare)
