"""`model.check()`: prove the promises on this very model, with its own weights.

Each proof compares with something that does not go through the site: the bare forward, the model's
own sums, a leaf put in the value's place. A site that fails one is not offered afterwards.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.models.discovery.inputs import probe_inputs
from interpose.models.proofs.edits import edit_of, in_place, moved, same, state
from interpose.models.proofs.gradients import GradientProofs
from interpose.models.proofs.report import Finding, Proven, Report
from interpose.models.proofs.rows import prove_rows
from interpose.models.reach.lenses import Swapped
from interpose.models.running.trial import first_tensor, trial
from interpose.models.selection import Some, entries, listed
from interpose.models.stream.branch import Branch, branches_of
from interpose.models.stream.whole import multipliers
from interpose.precision import wide
from interpose.sites.tree import Site

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

EXPLICIT = ("attn_scores", "pattern")
"""Kinds that make attention leave its kernel: their runs differ from the bare one by that kernel's rounding."""


_LEAST = 1e-7  # an edit that reaches nothing moves nothing at all, not even the last bit


def check(
    model: TransformerModel,
    inputs: dict[str, Any] | None = None,
    *,
    layer: Some = None,
    differences: bool = False,
) -> Report:
    """Run all proofs and return what came out."""
    given = dict(probe_inputs(model.root) if inputs is None else inputs)
    if "use_cache" in inspect.signature(model.root.forward).parameters:
        given.setdefault("use_cache", False)
    return Check(model, given, _chosen(model, layer), differences).run()


def _chosen(model: TransformerModel, layer: Some) -> Sequence[int] | None:
    """The layers to prove; of those that are not there a proof would say that all is well, so they are refused."""
    if layer is None:
        return None
    most = max((len(tower.blocks) for tower in model.anatomy.towers), default=0)
    asked = [layer] if isinstance(layer, int) else layer
    if not isinstance(asked, slice) and not len(asked):
        said = listed("layer", range(most))
        raise IndexError(
            f"layer is empty: {model.tree.label} has {said}; None means three of them."
        )
    found = entries(asked, most, "layer", model.tree.label)
    return found if isinstance(asked, slice) else asked  # negative ones count from each tower's end


@dataclass(slots=True)
class Check:
    """One check under way."""

    model: TransformerModel
    inputs: dict[str, Any]
    layers: Sequence[int] | None
    differences: bool
    findings: list[Finding] = field(default_factory=list)
    clean: Any = None
    bare: Tensor | None = None
    calls: dict[str, int] = field(default_factory=dict)

    def run(self) -> Report:
        """All proofs."""
        started = time.perf_counter()
        model = self.model
        given = self.inputs
        sites = list(model.tree.table.sites.values())
        chosen = [site for site in sites if self._is_chosen(site)]
        with trial(model):
            model.module(**given)  # some models change themselves in their first call
        before = state(model.module)
        with trial(model):
            self.bare = first_tensor(model.module(**given))
            if self._is_finite():
                self._prove(chosen)
        self.note(
            "untouched", "", state(model.module) == before, "hooks, modes and parameters as before"
        )
        report = Report(
            model=model.tree.label,
            sites={site.canonical: Proven(site.kind or "", site.axes) for site in sites},
            absent=dict(model.tree.table.absent),
            findings=tuple(self.findings),
            seconds=time.perf_counter() - started,
            missing=tuple(missing(model)),
        )
        self._withdraw(report, {site.canonical for site in chosen})
        return report

    def _prove(self, chosen: Sequence[Site]) -> None:
        self._reads(chosen)
        prove_rows(self, chosen)
        self._sums()
        for site in chosen:
            self._causal(site, ways=site.layer in (None, 0))
        with torch.enable_grad():
            GradientProofs(self).run(chosen, differences=self.differences)

    def _is_finite(self) -> bool:
        """Whether there is anything to compare: NaN is not even equal to itself."""
        assert self.bare is not None
        finite = bool(self.bare.isfinite().all())
        if not finite:
            about = "the bare output has NaN or Inf: nothing can be proven. ip.NaNGuard says where it begins"
            self.note("the output is finite", "", False, about)
        return finite

    def _withdraw(self, report: Report, proven: set[str]) -> None:
        """Offer no more what failed, nor the same site of blocks that were not tried."""
        tree = self.model.tree
        for name, reason in report.failures().items():
            if name in tree.table.sites:
                tree.withdraw(name, f"it failed its proof here: {reason}")
            start, mark, rest = name.partition("blocks.")
            kind = rest.partition(".")[2]
            for layer in range(tree.blocks(start)) if mark else ():
                other = f"{start}blocks.{layer}.{kind}"
                if other in tree.table.sites and other not in proven:
                    tree.withdraw(other, f"it failed its proof in {name!r}: {reason}")

    def _is_chosen(self, site: Site) -> bool:
        """Sites of the first, a middle and the last block, and those outside blocks."""
        if site.layer is None:
            return True
        count = self.model.tree.blocks(site.canonical.split("blocks.")[0])
        chosen = (0, count // 2, count - 1) if self.layers is None else self.layers
        return site.layer in (layer + count if layer < 0 else layer for layer in chosen)

    def note(self, promise: str, site: str, passed: bool, about: str) -> None:
        """Write down what came out."""
        self.findings.append(Finding(promise, site, passed, about))

    def _run(self, hooks: list[tuple[str, Any]]) -> Tensor:
        return first_tensor(self.model.run_with_hooks(fwd_hooks=hooks, **self.inputs))

    def distance(self, a: Tensor, b: Tensor) -> float:
        """How far two outputs are apart, in units of the first's size."""
        scale = wide(a).abs().max().clamp_min(1e-12)
        return float((wide(a) - wide(b)).abs().max() / scale)

    def _tolerance(self) -> float:
        assert self.bare is not None
        return 64 * torch.finfo(self.bare.dtype).eps

    # Reading.

    def _reads(self, sites: Sequence[Site]) -> None:
        assert self.bare is not None
        plain = [site.name for site in sites if site.kind not in EXPLICIT]
        explicit = [site.name for site in sites if site.kind in EXPLICIT]
        output, self.clean = self.model.run_with_cache(names_filter=plain, **self.inputs)
        alike = torch.equal(first_tensor(output), self.bare)
        self.note(
            "reads leave the output as it is", "", alike, "every site read at once, bit for bit"
        )
        distance = self.distance(self.bare, self._run([(name, same) for name in plain]))
        about = "every site edited at once, bit for bit"
        if distance:  # kernels look at addresses and strides, and a copy has others
            about = f"every site edited at once: copies alone move it by {distance:.0e} of its size"
        alike = distance <= self._tolerance()
        self.note("identity edits leave the output as it is", "", alike, about)
        self._on_the_spot(plain)
        caches = [self.clean]
        if explicit:
            output, cache = self.model.run_with_cache(names_filter=explicit, **self.inputs)
            caches.append(cache)
            self._near_the_kernel(first_tensor(output))
        for site in sites:
            found = [v for c in caches if site.name in c for v in c.calls(site.name)]
            self.calls[site.name] = len(found)
            for value in found:
                about = f"{tuple(value.shape)} as {', '.join(site.axes)}"
                self.note("axes", site.name, value.ndim == len(site.axes), about)
                if site.kind == "pattern":
                    total = value.float().sum(-1)
                    fine = bool((total < 1.01).all() and (total > -0.01).all())
                    self.note("rows of a pattern add up to one at most", site.name, fine, "")

    def _near_the_kernel(self, logits: Tensor) -> None:
        """Explicit attention may round differently from the kernel, no more than the model's own eager does."""
        assert self.bare is not None
        distance, allowed = self.distance(self.bare, logits), self._tolerance()
        about = f"reading them moves the output by {distance:.1e} of its size"
        if distance > allowed:
            allowed = self.distance(self.bare, self._eager()) * 1.5
            about += f", eager attention by {allowed / 1.5:.1e}"
        self.note("patterns keep to the kernel", "", distance <= allowed, about)

    def _eager(self) -> Tensor:
        """The output with transformers' own eager attention."""
        module: Any = self.model.module
        before = module.config._attn_implementation
        module.set_attn_implementation("eager")
        try:
            return first_tensor(module(**self.inputs))
        finally:
            module.set_attn_implementation(before)

    def _on_the_spot(self, names: Sequence[str]) -> None:
        """Compare what a cache kept with copies that hooks made of the same values."""
        watched: dict[str, list[Tensor]] = {}

        def keep(value: Tensor, hook: Any) -> None:
            watched.setdefault(hook.name, []).append(value.clone())

        self._run([(name, keep) for name in names])
        for name in names:
            pairs = zip(watched[name], self.clean.calls(name), strict=True)
            alike = all(torch.equal(a, b) for a, b in pairs)
            about = "against a copy made on the spot"
            self.note("what is kept is what was there", name, alike, about)

    # Sums.

    def _sums(self) -> None:
        told = multipliers(self.model).branches
        for tower in self.model.anatomy.towers:
            for block in tower.blocks:
                prefix = f"{tower.prefix}blocks.{block.index}."
                for before, added, after in block.sums:
                    names = [before if before.startswith(block.path) else f"{prefix}{before}"]
                    names += [f"{prefix}{name}" for name in added]
                    names.append(after if after.startswith(block.path) else f"{prefix}{after}")
                    if not all(self.model.tree.leads_somewhere(name) for name in names):
                        continue
                    self._sum(names)
                    if "resid_mid" in before:
                        self._sum(names, edited=names[0])
                for branch in branches_of(self.model, tower.prefix, block, told).values():
                    self._branch(branch)
                self._own_ways(f"{prefix}attn.")
                self._experts(f"{prefix}mlp.hook_expert_out", f"{prefix}mlp.hook_experts_out")

    def _sum(self, names: list[str], edited: str | None = None) -> None:
        hooks = [] if edited is None else [(edited, moved)]
        _, cache = self.model.run_with_cache(names_filter=names, fwd_hooks=hooks, **self.inputs)
        eps = torch.finfo(cache.calls(names[-1])[0].dtype).eps
        distance = 0.0
        sites = [self.model.tree.site(name) for name in names]
        turned = any(isinstance(s.lens, Swapped) and s.lens.first == 0 for s in sites)
        calls = [
            [value.transpose(0, 1) for value in found] if turned and site.kind is None else found
            for site, found in zip(sites, (cache.calls(name) for name in names))
        ]  # a module's own value lies as it lies
        for *parts, total in zip(*calls) if len({len(c) for c in calls}) == 1 else ():
            together = torch.stack([wide(part.reshape(total.shape)) for part in (*parts, total)])
            error = together[:-1].sum(0) - together[-1]
            distance = max(distance, float((error.abs() / (together.abs().amax(0) + 1e-6)).max()))
        promise = "sums" if edited is None else "an edit reaches the skip path"
        about = " + ".join(names[:-1]) + f" = {names[-1]} to {distance:.0e}"
        for site in names[1:-1] if edited is None else [edited]:
            self.note(promise, site, distance <= 16 * eps, about)

    def _branch(self, branch: Branch) -> None:
        """Heads and a bias are what is projected; and through a norm and a multiplier, what is added to the stream."""
        at = branch.units.removesuffix("hook_z")
        result, out = f"{at}hook_result", f"{at}hook_out"
        if self._seen_once([result, out]):
            total = wide(self.clean[result]).sum(-2) + wide(branch.bias)
            distance = self.distance(self.clean[out], total)
            about = f"heads and bias = {out} to {distance:.0e}"
            self.note("sums", result, distance <= self._tolerance(), about)
        if not branch.why_not and self._seen_once([branch.site, *branch.sites]):
            distance = self.distance(self.clean[branch.site], branch.whole(self.clean))
            units, norm = ("neurons" if branch.kind == "mlp" else "heads"), branch.norm or "no norm"
            about = f"{units} and bias, {norm}, times {branch.multiplier:.4g} = {branch.site} to {distance:.0e}"
            # Some norms compute in float32 whatever they are given.
            passed = distance <= max(self._tolerance(), 64 * torch.finfo(torch.float32).eps)
            self.note("parts of a branch add up to it", "", passed, about)

    def _seen_once(self, names: Sequence[str]) -> bool:
        return all(name in self.clean and len(self.clean.calls(name)) == 1 for name in names)

    def _own_ways(self, at: str) -> None:
        """An edited query reaches the kernel as a query and not as a key; a value as neither."""
        ends = [f"{at}hook_rot_q", f"{at}hook_rot_k"]
        table = self.model.tree.table.sites
        if not all(name in table for name in ends):
            return
        _, plain = self.model.run_with_cache(names_filter=ends, **self.inputs)
        for role, moves in (("q", [True, False]), ("k", [False, True]), ("v", [False, False])):
            name = f"{at}hook_{role}"
            if name not in table or self.calls.get(name, 1) != 1 or self._is_key(at, role):
                continue
            _, cache = self.model.run_with_cache(
                names_filter=ends, fwd_hooks=[(name, moved)], **self.inputs
            )
            pairs = [zip(plain.calls(end), cache.calls(end)) for end in ends]
            moved_there = [not all(torch.equal(a, b) for a, b in pair) for pair in pairs]
            self.note("queries, keys and values go their own ways", name, moved_there == moves, "")

    def _is_key(self, at: str, role: str) -> bool:
        """Whether values are the keys themselves, the same columns of the same projection."""
        values, keys = (self.model.tree.table.sites.get(f"{at}hook_{each}") for each in "vk")
        if role != "v" or values is None or keys is None:
            return False
        return values.module is keys.module and values.lens == keys.lens

    def _experts(self, each: str, together: str) -> None:
        if each in self.clean and together in self.clean:
            total = wide(self.clean[each]).sum(-2)
            distance = self.distance(self.clean[together], total)
            about = f"experts = {together} to {distance:.0e}"
            self.note("sums", each, distance <= self._tolerance(), about)

    # Causality.

    def _causal(self, site: Site, *, ways: bool) -> None:
        """An edit moves the output and nothing before the site, however it is made."""
        assert self.bare is not None
        before = None if site.layer is None else f"{_prefix(site)}hook_resid_pre"
        if before == site.canonical or before not in self.clean:
            before = None
        try:
            changed, cache = self._edited(site, before)
            explicit = site.kind in EXPLICIT
            plain = self._run([(site.name, same)]) if explicit else self.bare
        except Exception as error:  # whatever the model's own code raises
            about = f"{type(error).__name__}: {error}"
            self.note("an edit has an effect", site.name, False, about)
            return
        effect = self.distance(plain, changed)
        about = f"moves the output by {effect:.1e} of its size"
        self.note("an edit has an effect", site.name, effect > _LEAST, about)
        if before is not None:
            kept = torch.equal(cache.calls(before)[0], self.clean.calls(before)[0])
            self.note("nothing before it changes", site.name, kept, before)
        if ways:
            edits = [in_place(edit_of(site), give) for give in (True, False)]
            alike = all(torch.equal(self._run([(site.name, edit)]), changed) for edit in edits)
            self.note("returned, in place or both is the same", site.name, alike, "")

    def _edited(self, site: Site, kept: str | None) -> tuple[Tensor, Any]:
        hooks = [(site.name, edit_of(site))]
        if kept is None:
            return self._run(hooks), None
        output, cache = self.model.run_with_cache(names_filter=kept, fwd_hooks=hooks, **self.inputs)
        return first_tensor(output), cache


def _prefix(site: Site) -> str:
    return f"{site.canonical.split('blocks.')[0]}blocks.{site.layer}."


MINIMUM = ("resid_pre", "resid_post", "attn_out", "q", "k", "v", "z", "pattern")


def missing(model: TransformerModel) -> Iterator[str]:
    """Sites that a model of its kind should have and has not."""
    table = model.tree.table
    if not model.anatomy.towers:
        yield "blocks: no stack of blocks was found"
    for tower in model.anatomy.towers:
        kinds = {
            site.kind for n, site in table.sites.items() if n.startswith(f"{tower.prefix}blocks.")
        }
        attends = any(block.attentions for block in tower.blocks)
        wanted = MINIMUM if attends else ("resid_pre", "resid_post", "mixer_out")
        if any(block.mlp is not None for block in tower.blocks):
            wanted = (*wanted, "mlp_out")
        for kind in wanted:
            if kind not in kinds:
                yield f"{tower.prefix}blocks.*.{kind}"
