"""`model.check()` passes on sound models, and fails by name when something is broken on purpose."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.cli.main import main
from interpose.engine.capture_run import CaptureRun, Cut
from interpose.engine.gradients import Watching
from interpose.engine.points import HookPoint
from interpose.engine.whole_reads import ReadTap
from interpose.errors import SiteNotFound
from interpose.models.discovery import feedforward, heads
from interpose.models.proofs.report import Finding, Report
from interpose.models.reach import interface
from interpose.models.reach.inner import InnerPoint
from interpose.models.reach.lenses import Heads, InPlace, Times
from interpose.models.stream import whole
from interpose.models.transformer import TransformerModel
from tests.leftovers import same_state, state_of
from tests.models import tiny

KINDS = {"t5": "encoder_decoder"}


def build(model_type: str) -> Any:
    return tiny.build(model_type, KINDS.get(model_type, "causal"))


def checked(model_type: str, **options: Any) -> tuple[TransformerModel, Report]:
    """A model of its own, so that nothing found under sabotage is kept."""
    module = build(model_type)
    model: Any = ip.wrap(module)
    return model, model.check(tiny.inputs(module), **options)


@functools.cache
def sound(model_type: str, **options: Any) -> Report:
    return checked(model_type, **options)[1]


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ({}, "0 sites, none absent, 0 proofs"),
        ({"a": "why"}, "1 absent for 1 reason,"),
        ({"a": "why", "b": "why"}, "2 absent for 1 reason,"),
        ({"a": "why", "b": "else"}, "2 absent for 2 reasons,"),
    ],
)
def test_a_report_counts_in_words(absent: dict[str, str], said: str) -> None:
    assert said in Report(model="", sites={}, absent=absent, findings=()).title


def promises(report: Report) -> set[str]:
    return {finding.promise for finding in report.findings if not finding.passed}


def failing(report: Report, promise: str) -> list[str]:
    return [f.site for f in report.findings if f.promise == promise and not f.passed]


# Sound models.

PROMISES = {
    "reads leave the output as it is",
    "identity edits leave the output as it is",
    "what is kept is what was there",
    "patterns keep to the kernel",
    "rows of a pattern add up to one at most",
    "axes",
    "rows are texts",
    "sums",
    "parts of a branch add up to it",
    "an edit has an effect",
    "nothing before it changes",
    "returned, in place or both is the same",
    "gradients",
    "untouched",
}


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bloom", "mixtral", "t5"])
def test_every_promise_holds(model_type: str) -> None:
    module = build(model_type)
    model: Any = ip.wrap(module)
    inputs = tiny.inputs(module)
    list(model.sites)  # discovery looks at the model, once
    before = state_of(module)
    report = model.check(inputs, differences=True)
    assert report.passed, report
    assert report.missing == ()
    assert same_state(before, state_of(module))
    expected = PROMISES | {"central differences", "an edit reaches the skip path"}
    if model_type != "bloom":  # its kernel's queries and keys cannot be told apart
        expected.add("queries, keys and values go their own ways")
    assert {finding.promise for finding in report.findings} == expected
    assert set(report.sites) == set(model.sites)
    assert report.absent == model.sites.absent
    assert len(repr(report).splitlines()) < 40


def test_each_site_of_each_block_is_proven() -> None:
    report = sound("llama")
    every = set(report.sites)
    for promise in ("an edit has an effect", "axes", "gradients"):
        assert {f.site for f in report.findings if f.promise == promise} == every
    kept = {f.site for f in report.findings if f.promise == "what is kept is what was there"}
    assert every - kept == {
        f"blocks.{layer}.attn.hook_{kind}"
        for layer in range(2)
        for kind in ("attn_scores", "pattern")
    }


def test_layers_can_be_chosen() -> None:
    _, report = checked("gpt2", layer=[1])
    assert report.passed
    edited = {f.site for f in report.findings if f.promise == "an edit has an effect"}
    assert {name for name in report.sites if not name.startswith("blocks.0.")} == edited


def test_layers_are_counted_from_the_end_too() -> None:
    _, report = checked("gpt2", layer=[-1])
    edited = {f.site for f in report.findings if f.promise == "an edit has an effect"}
    assert {name for name in report.sites if not name.startswith("blocks.0.")} == edited


@pytest.mark.parametrize("layers", [[12], [0, 2], [-3]])
def test_layers_that_are_not_there_are_refused(layers: list[int]) -> None:
    with pytest.raises(IndexError) as caught:
        checked("gpt2", layer=layers)
    assert (
        str(caught.value) == f"layer {layers[-1]} is not there: GPT2LMHeadModel has layers 0 to 1."
    )


def test_no_layers_at_all_are_refused() -> None:
    with pytest.raises(
        IndexError, match="layer is empty: GPT2LMHeadModel has layers 0 to 1; None means"
    ):
        checked("gpt2", layer=[])


def test_the_command_refuses_layers_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "pocket", "--layer", "12"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "interpose check: layer 12 is not there: GPT2LMHeadModel has layers 0 to 6." in shown.err


def test_inputs_are_made_where_none_are_given() -> None:
    model: Any = ip.wrap(build("llama"))
    assert model.check().passed


@pytest.mark.parametrize("training", [True, False])
def test_a_check_leaves_modes_and_random_numbers(training: bool) -> None:
    module = build("gpt2").train(training)
    before = state_of(module)
    model: Any = ip.wrap(module)
    assert model.check(tiny.inputs(module)).passed
    assert same_state(before, state_of(module))


def test_a_check_is_of_the_model_and_not_of_hooks_that_are_on_it() -> None:
    module = build("gpt2")
    model: Any = ip.wrap(module)
    site = "blocks.0.hook_mlp_out"
    handle = model.add_hook(site, lambda value, hook: value + torch.randn_like(value))
    inputs = tiny.inputs(module)
    assert not torch.equal(module(**inputs).logits, module(**inputs).logits)
    with model.hooks([(site, lambda value, hook: value * torch.rand(()))]), torch.no_grad():
        report = model.check(inputs)
        assert handle.fired == 2
        module(**inputs)
    handle.remove()
    assert report.passed
    assert any(f.promise == "gradients" and f.site == site for f in report.findings)


# Reports.


def test_a_report_is_plain_data() -> None:
    report = sound("llama")
    data = json.loads(json.dumps(report.to_dict()))
    assert data["model"] == "LlamaForCausalLM"
    assert data["passed"] is True
    assert data["missing"] == []
    assert data["sites"]["blocks.0.attn.hook_z"] == {
        "kind": "z",
        "axes": ["batch", "pos", "head", "d_head"],
    }
    assert data["absent"]["hook_pos_embed"] == "positions are not embedded by a module of their own"
    assert len(data["findings"]) == len(report.findings)
    assert set(data["findings"][0]) == {"promise", "site", "passed", "about"}


def test_a_report_prints_in_a_few_lines() -> None:
    report = sound("llama")
    lines = repr(report).splitlines()
    assert len(lines) < 40
    assert "every promise holds" in lines[0]
    assert f"{len(report.sites)} sites" in lines[0]
    assert max(map(len, lines)) < 200
    assert "<table" in report._repr_html_()


def test_a_failing_report_says_so() -> None:
    report = sound("gpt2")
    bad = Finding("sums", "blocks.0.hook_resid_mid", False, "off by 3e-01")
    broken = replace(report, findings=(*report.findings, bad))
    assert not broken.passed
    assert broken.failures() == {"blocks.0.hook_resid_mid": "sums: off by 3e-01"}
    assert "NOT all promises hold" in repr(broken)
    assert "failed: blocks.0.hook_resid_mid off by 3e-01" in repr(broken)
    assert len(repr(broken).splitlines()) < 40
    without = replace(report, missing=("blocks.*.z",))
    assert not without.passed
    assert "blocks.*.z" in repr(without)


# Sabotage: each breaks one thing that the engine does, and one promise must notice.


def resid_mid_without_skip(patch: pytest.MonkeyPatch) -> None:
    """What a plain hook on the norm would do: the edit reaches the norm and not the skip path."""
    patch.setattr(InPlace, "in_place", False)
    patch.setattr(InPlace, "write", lambda self, raw, value, call: value)


def module_backward_hooks(patch: pytest.MonkeyPatch) -> None:
    """Gradients at resid_mid as a full backward hook of the second norm has them."""
    install, remove, backward = Watching.install, Watching.remove, CaptureRun._backward
    handles: dict[Any, Any] = {}

    def listen(self: Any, *, first: bool = False) -> None:
        site = self.site
        if not isinstance(site.lens, InPlace):
            install(self, first=first)
            return
        point = HookPoint(self.model, site.name, site.canonical, site.module, 0, site.axes)

        def hear(module: Any, given: Any, made: Any) -> None:
            self.deliver(next(grad for grad in given if grad is not None), point)

        handles[self] = site.module.register_full_backward_hook(hear)
        self.attached = True

    def leave(self: Any) -> None:
        if self in handles:
            handles.pop(self).remove()
        else:
            remove(self)

    def go_back(self: Any, loss: Any, whose: str) -> None:
        if self.targets:
            backward(self, loss, whose)
        else:
            loss.backward()

    patch.setattr(Watching, "install", listen)
    patch.setattr(Watching, "remove", leave)
    patch.setattr(CaptureRun, "_backward", go_back)


def patterns_shown_afterwards(patch: pytest.MonkeyPatch) -> None:
    """A pattern point is called, and what it returns comes too late."""
    call = InnerPoint.__call__

    def late(self: Any, value: Tensor) -> Tensor:
        new = call(self, value)
        return value if self.name == "pattern" else new

    patch.setattr(InnerPoint, "__call__", late)


def mask_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(interface, "_explicit_mask", lambda *args: None)


def short_reads_by_reference(patch: pytest.MonkeyPatch) -> None:
    """The short way of reading keeps the tensor itself."""
    call = ReadTap.__call__

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(Tensor, "clone", lambda tensor: tensor):
            call(self, *args, **kwargs)

    patch.setattr(ReadTap, "__call__", keep)


def full_reads_by_reference(patch: pytest.MonkeyPatch) -> None:
    """The listeners that can do anything keep the tensor itself."""
    patch.setattr(Cut, "whole", property(lambda self: False))
    patch.setattr(Cut, "__call__", lambda self, value, *_: value.detach())


def wrong_multiplier(patch: pytest.MonkeyPatch) -> None:
    read, write = Times.read, Times.write
    patch.setattr(Times, "read", lambda self, *given: read(Times(1.3 * self.factor), *given))
    patch.setattr(Times, "write", lambda self, *given: write(Times(1.3 * self.factor), *given))


def columns_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Heads of the output projection that begin a column too late, and go round."""
    describe = heads.describe

    def wrong(*args: Any) -> Any:
        found = describe(*args)
        lens = found.out.lens
        moved = Heads(tuple(offset + 1 for offset in lens.offsets[:-1]), lens.size)
        found.out = replace(found.out, lens=moved)
        return found

    patch.setattr(heads, "describe", wrong)


def queries_and_keys_swapped(patch: pytest.MonkeyPatch) -> None:
    describe = heads.describe

    def wrong(*args: Any) -> Any:
        found = describe(*args)
        places = found.projections
        places["q"], places["k"] = places["k"], places["q"]
        return found

    patch.setattr(heads, "describe", wrong)


def values_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Heads of values that begin a column too early, in the keys."""
    describe = heads.describe

    def wrong(*args: Any) -> Any:
        found = describe(*args)
        lens = found.projections["v"].lens
        moved = Heads(tuple(offset - 1 for offset in lens.offsets), lens.size)
        found.projections["v"] = replace(found.projections["v"], lens=moved)
        return found

    patch.setattr(heads, "describe", wrong)


def gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    gate_first = feedforward._gate_first
    patch.setattr(feedforward, "_gate_first", lambda *args: gate_first(*args)[::-1])  # type: ignore[index]


def multiplier_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(whole, "ratio", lambda *args, **options: 1.0)


Sabotage = Callable[[pytest.MonkeyPatch], None]
# What is broken, on which model, which promise must notice, and at which site (none: of the whole).
CASES: list[tuple[Sabotage, str, str, str]] = [
    (resid_mid_without_skip, "gpt2", "an edit reaches the skip path", "blocks.0.hook_resid_mid"),
    (resid_mid_without_skip, "llama", "an edit reaches the skip path", "blocks.0.hook_resid_mid"),
    (module_backward_hooks, "llama", "gradients", "blocks.0.hook_resid_mid"),
    (patterns_shown_afterwards, "llama", "an edit has an effect", "blocks.0.attn.hook_pattern"),
    (patterns_shown_afterwards, "bloom", "an edit has an effect", "blocks.0.attn.hook_pattern"),
    (patterns_shown_afterwards, "falcon", "an edit has an effect", "blocks.0.attn.hook_pattern"),
    (mask_dropped, "llama", "patterns keep to the kernel", ""),
    (short_reads_by_reference, "falcon", "what is kept is what was there", "blocks.0.hook_mlp_out"),
    (full_reads_by_reference, "falcon", "what is kept is what was there", "blocks.0.hook_mlp_out"),
    (wrong_multiplier, "granite", "sums", "blocks.0.hook_attn_out"),
    (columns_off_by_one, "gpt2", "sums", "blocks.0.attn.hook_result"),
    (multiplier_forgotten, "granite", "parts of a branch add up to it", ""),
]
COLUMNS: list[Any] = [
    (queries_and_keys_swapped, "gpt2"),
    (queries_and_keys_swapped, "gpt_neox"),
    (values_off_by_one, "gpt2"),
]


@pytest.mark.parametrize(
    ("sabotage", "model_type", "promise", "site"),
    CASES,
    ids=[f"{case[0].__name__}-{case[1]}" for case in CASES],
)
def test_sabotage_is_noticed_by_name(
    monkeypatch: pytest.MonkeyPatch, sabotage: Sabotage, model_type: str, promise: str, site: str
) -> None:
    assert sound(model_type, layer=(0,)).passed
    sabotage(monkeypatch)
    model, report = checked(model_type, layer=(0,))
    assert not report.passed
    assert promise in promises(report)
    assert site in failing(report, promise)
    if site:
        with pytest.raises(SiteNotFound) as caught:
            model.tree.site(site)
        text = f"{model.tree.label} has no {site!r}: it failed its proof here: "
        assert str(caught.value).startswith(text)
        assert site not in model.sites
        assert model.sites.absent[site].startswith("it failed its proof here: ")


@pytest.mark.parametrize(
    ("sabotage", "model_type"),
    COLUMNS,
    ids=[f"{case[0].__name__}-{case[1]}" for case in COLUMNS],
)
def test_wrong_columns_are_noticed(
    monkeypatch: pytest.MonkeyPatch, sabotage: Sabotage, model_type: str
) -> None:
    assert sound(model_type, layer=(0,)).passed
    sabotage(monkeypatch)
    assert not checked(model_type, layer=(0,))[1].passed


def test_an_addend_that_does_not_add_up_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_multiplier(monkeypatch)
    model, _ = checked("granite", layer=(0,))
    assert "blocks.0.hook_attn_out" not in model.sites


def test_other_sites_are_still_offered_after_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    resid_mid_without_skip(monkeypatch)
    model, report = checked("gpt2")
    gone = {name for name in report.failures() if name}
    assert {"blocks.0.hook_resid_mid", "blocks.1.hook_resid_mid"} <= gone
    assert set(model.sites) == set(report.sites) - gone
    with torch.no_grad():
        _, cache = model.run_with_cache(**tiny.inputs(model.module), names_filter=None)  # type: ignore[arg-type]
    assert not gone & set(cache)
    assert "blocks.0.hook_resid_pre" in cache


def test_what_fails_in_one_block_is_withdrawn_in_blocks_that_were_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patterns_shown_afterwards(monkeypatch)
    module = tiny.build("gpt2", layers=3)
    model: Any = ip.wrap(module)
    before = set(model.sites)
    model.check(tiny.inputs(module), layer=[1])
    gone = {f"blocks.{layer}.attn.hook_pattern" for layer in range(3)}
    assert before - set(model.sites) == gone
    assert model.sites.absent["blocks.1.attn.hook_pattern"].startswith("it failed its proof here: ")
    for layer in (0, 2):
        reason = model.sites.absent[f"blocks.{layer}.attn.hook_pattern"]
        assert reason.startswith("it failed its proof in 'blocks.1.attn.hook_pattern': ")


@pytest.mark.xfail(strict=True, reason="no proof yet compares a gate with what it is multiplied by")
def test_a_gate_taken_for_what_it_is_multiplied_by_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate_and_up_swapped(monkeypatch)
    assert not checked("llama", layer=(0,))[1].passed


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2"])
def test_sums_of_float64_are_compared_in_float64(model_type: str) -> None:
    model = TransformerModel(tiny.build(model_type).double())
    report = model.check(layer=[0])
    assert report.passed, report.failures()
    assert {"sums", "parts of a branch add up to it"} <= {f.promise for f in report.findings}
