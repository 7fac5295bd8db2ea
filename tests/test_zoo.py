"""Reads, edits and gradients on every module of the zoo, against hooks written by hand with bare torch.

The oracle below knows nothing of interpose: it registers torch hooks, takes containers apart and puts
them together by itself. Whatever it and interpose both can do must be the same bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.zoo import CASES, DTYPES, Case

pytestmark = [
    # complex32 is all there is for complex numbers in half precision.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """In bfloat16 its convolutions need AMX, and stop the process where a virtual machine forbids that."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(enabled)


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


@functools.lru_cache(maxsize=None)
def built(case: Case, dtype: torch.dtype) -> nn.Module:
    return case.module(dtype)


def fresh(case: Case, dtype: torch.dtype, *, frozen: bool = False) -> tuple[nn.Module, tuple, dict]:
    module = copy.deepcopy(built(case, dtype))
    for parameter in module.parameters():
        parameter.requires_grad_(not frozen)
    args, kwargs = case.inputs(dtype)
    torch.manual_seed(0)
    return module, args, kwargs


def loss_of(output: Any) -> Tensor:
    """One number that depends on every floating point tensor of an output, each element differently."""
    generator = torch.Generator().manual_seed(4)
    total = 0.0
    for _, tensor in tensors_in(output):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point():
            total = (
                total + (tensor * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
            )
    return total


@functools.lru_cache(maxsize=None)
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


def assert_same(got: Any, expected: Any) -> None:
    """The same containers with bit-identical tensors in them; NaN equals NaN."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        if equal(got, expected):
            return  # the rest is slow, and for NaN and for messages only
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        return
    assert [key for key, _ in parts(got)] == [key for key, _ in parts(expected)]
    for (_, one), (_, other) in zip(parts(got), parts(expected)):
        assert_same(one, other)
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
) -> Any:
    """The output when one tensor of one module call is replaced by a torch hook."""
    module, args, kwargs = fresh(case, dtype, frozen=frozen)
    calls = iter(range(10**6))

    def hook(_: nn.Module, args: Any, out: Any) -> Any:
        if next(calls) != at.call:
            return None
        value = dict(tensors_in(out))[at.leaf]
        return with_tensor(out, at.leaf, change(value))

    module.get_submodule(at.path).register_forward_hook(hook)
    return module(*args, **kwargs)


# Nothing changes.


def every_input(module: nn.Module) -> Any:
    """A filter for the inputs of all modules."""
    names = {path: ".input" if not path else f"{path}.input" for path, _ in module.named_modules()}
    if not any(path.split(".")[-1] == "input" for path in names):
        return "**.input"
    # Children win: `output.input` means a child called `input`, and the glob means such children too.
    return [name for path, name in names.items() if path not in HIDDEN]


HIDDEN = ("output",)


def read_inputs(case: Case, dtype: torch.dtype) -> list[Record]:
    """What a raw pre-hook sees at the sites of `every_input`."""
    records = raw_reads(case, dtype, inputs=True)
    hidden = HIDDEN if not isinstance(every_input(built(case, dtype)), str) else ()
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
    add_zero_to_everything_in_place,
    watch_every_gradient,
)


@pytest.mark.parametrize("way", WAYS_TO_CHANGE_NOTHING, ids=lambda way: way.__name__)
@EVERY_DTYPE
@EVERY_CASE
def test_nothing_changes_when(case, dtype, way):
    backward = way is watch_every_gradient
    skip_if_torch_cannot(case, dtype, backward=backward)
    for grad in (True,) if backward else (True, False):
        with torch.set_grad_enabled(grad):
            bare, args, kwargs = fresh(case, dtype)
            expected = bare(*args, **kwargs)
            state, given = torch.get_rng_state(), (args, kwargs)

            module, args, kwargs = fresh(case, dtype)
            tables = hook_tables(module)
            got = way(ip.wrap(module), args, kwargs)

        assert torch.equal(torch.get_rng_state(), state)
        assert_same(got, expected)
        assert_same((args, kwargs), given)
        assert_same(dict(module.named_buffers()), dict(bare.named_buffers()))
        assert hook_tables(module) == tables
        assert module.training == case.training


# Reads.


@EVERY_DTYPE
@EVERY_CASE
def test_reading_outputs_gives_what_torch_hooks_see(case, dtype):
    skip_if_torch_cannot(case, dtype)
    records = raw_reads(case, dtype)
    module, args, kwargs = fresh(case, dtype)
    model = ip.wrap(module)
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
    _, cache = ip.wrap(module).run_with_cache(*args, **kwargs)
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
    _, cache = ip.wrap(module).run_with_cache(*args, names_filter=every_input(module), **kwargs)
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
    _, cache = ip.wrap(module).run_with_cache(*args, **kwargs)
    effects = []
    for site, record in zip(cache, records, strict=True):
        if not may_be_edited(case, record.tensor):
            continue
        expected = raw_run(case, dtype, record, edited)
        for edit in (by_return, in_place_and_return, in_place):
            assert_same(run_edited(case, dtype, site, edit), expected)
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
    _, cache = ip.wrap(module).run_with_cache(*args, names_filter=every_input(module), **kwargs)
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
    return ip.wrap(module).run_with_hooks(*args, fwd_hooks=[(site, edit)], **kwargs)


# Gradients.


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@EVERY_DTYPE
@EVERY_CASE
def test_gradients_at_outputs_are_those_of_a_leaf_put_in_their_place(case, dtype, frozen):
    skip_if_torch_cannot(case, dtype, backward=True)
    records = raw_reads(case, dtype)
    module, args, kwargs = fresh(case, dtype, frozen=frozen)
    _, cache = ip.wrap(module).run_with_cache(*args, incl_bwd=loss_of, **kwargs)
    assert all(parameter.grad is None for parameter in module.parameters())
    names = [name for name in cache if not name.endswith("_grad")]
    checked = 0
    for name, record in zip(names, records, strict=True):
        if not (record.tensor.is_floating_point() or record.tensor.is_complex()):
            assert name not in cache.grad
            continue
        expected = raw_gradient(case, dtype, record, frozen=frozen)
        if expected is None:
            assert name not in cache.grad
            continue
        assert_same(cache.grad[name], expected)
        checked += 1
    assert checked > len(names) / 2


def raw_gradient(case: Case, dtype: torch.dtype, at: Record, *, frozen: bool) -> Tensor | None:
    leaves: list[Tensor] = []

    def put_in_a_leaf(value: Tensor) -> Tensor:
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[0].clone()

    loss = loss_of(raw_run(case, dtype, at, put_in_a_leaf, frozen=frozen))
    if not loss.requires_grad:
        return None
    loss.backward()
    return leaves[0].grad
