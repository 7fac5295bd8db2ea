"""`TransformerModel`: a model of transformers with semantic sites, text in and logits out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from interpose.engine.model import Model
from interpose.engine.standing_hooks import HookItem
from interpose.errors import Unsupported
from interpose.models.batching.generate_batch import generate_batch
from interpose.models.discovery.anatomy import Anatomy
from interpose.models.discovery.inputs import every_sense
from interpose.models.knowledge import Conditions, foreign_hooks
from interpose.models.naming.catalog import SemanticSites
from interpose.models.naming.table import Table
from interpose.models.naming.tree import SemanticTree
from interpose.models.proofs.check import check
from interpose.models.proofs.report import Report
from interpose.models.running import generation
from interpose.models.running.forward import Forward
from interpose.models.running.text import Text
from interpose.models.selection import Some
from interpose.models.spread import (
    Partial,
    must_be_whole,
    must_not_be_spread,
    partial_values,
    whole_only,
)
from interpose.models.stream.whole import Stream
from interpose.models.weights.attributes import OURS, part_of
from interpose.models.weights.config import ModelConfig, describe
from interpose.models.weights.weights import Weights
from interpose.sites.tree import ModuleTree, Site


class TransformerModel(Text, Forward, Weights, Model):
    """A transformers model, and everything one can do with it by name."""

    tree: SemanticTree

    def __init__(self, module: nn.Module, tokenizer: Any = None, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self._anatomy: Anatomy | None = None
        self._flags: list[tuple[nn.Module, str, Any]] = []
        self._rests_on: Conditions | None = None
        self._probe_inputs: Mapping[str, Any] | None = None
        self._partial: tuple[int, Partial] | None = None
        super().__init__(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self.tokenizer, self.processor)

    def _make_tree(self, module: nn.Module) -> ModuleTree:
        return SemanticTree(module, lambda: whole_only(Table(self.anatomy), self.partial))

    @property
    def partial(self) -> Partial:
        """Where a process has a part of a value, of a model that is spread over several: see `models/spread.py`."""
        if self._partial is None or self._partial[0] != self.changes:
            self._partial = self.changes, partial_values(self.root, self._probe_inputs)
        return self._partial[1]

    def select(self, wanted: Any) -> list[tuple[Site, bool]]:
        """The sites that a filter means; refused where each process has a part of the value alone."""
        found = super().select(wanted)
        if self.partial:
            must_be_whole((site for site, _ in found), self.partial)
        return found

    @property
    def anatomy(self) -> Anatomy:
        """What discovery found, from one probe forward of the module as it is now."""
        self.refresh(thoroughly=True)
        if self._anatomy is None:
            self._anatomy = self._look()
            self._flags = self._anatomy.flags()
            if self._anatomy.rests_on_numbers or foreign_hooks(self.root):
                self._rests_on = Conditions(self.root)
        return self._anatomy

    def _look(self) -> Anatomy:
        from interpose.models.discovery.recorded_forward import (
            look,  # numpy, only when it is needed
        )

        try:
            return look(ModuleTree(self.module), self._probe_inputs)
        except Exception as error:
            more = None if self._probe_inputs is not None else every_sense(self.root)
            if more is not None:  # such as CLIP, which takes text and images together
                found = look(ModuleTree(self.module), more)
                self._probe_inputs = more
                return found
            if isinstance(error, AttributeError):  # of a property it would be taken for its absence
                raise Unsupported(
                    f"a probe of {type(self.root).__name__} failed: {error}. Give inputs that its forward takes: "
                    "model.probe(inputs). Its module paths work without."
                ) from error
            raise

    def refresh(self, *, thoroughly: bool = False) -> None:
        """Find the sites anew if the module has changed since they were found: see `Model.refresh`."""
        super().refresh(thoroughly=thoroughly)
        said = all(getattr(module, name, None) == value for module, name, value in self._flags)
        if not said or (self._rests_on is not None and not self._rests_on.hold()):
            self.forget()

    def forget(self) -> None:
        """Find everything out anew, when it is next asked for."""
        super().forget()
        self._anatomy, self._flags, self._rests_on = None, [], None

    def probe(self, inputs: Mapping[str, Any]) -> SemanticSites:
        """Find the sites anew with inputs of your own, such as images for a vision tower.

        Args:
            inputs: what the module's forward takes, by keyword.
        """
        before, self._probe_inputs = self._probe_inputs, inputs
        self.forget()
        try:
            self.anatomy  # noqa: B018 - inputs that the module refuses are not kept
        except BaseException:
            self._probe_inputs = before
            raise
        return self.sites

    @property
    def cfg(self) -> ModelConfig:
        """What the model is like, in TransformerLens's words: ``n_layers``, ``d_model``, ..."""
        return describe(self)

    @property
    def stream(self) -> Stream:
        """What is added to the residual stream, through which norms and multipliers, and what is done at its ends."""
        return Stream(self)

    def __getattr__(self, name: str) -> Any:
        found = None if name == "module" else part_of(self, name)
        return super().__getattr__(name) if found is None else found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *OURS})

    whereabouts = generation.whereabouts

    def beginnings(self) -> list[Site]:
        """Where forward passes begin: at the root, and at parts of it that are called by themselves."""
        parts = generation.parts_run_alone(self)
        return [*super().beginnings(), *(self.tree.place(path, part) for path, part in parts)]

    def kept_of(self, text: Any) -> int | None:
        """How many positions of a text stayed: candidates of speculative decoding are taken back."""
        return generation.kept_of(text)

    def generate(
        self,
        input: str | list[str] | Tensor | Mapping[str, Any],  # noqa: A002 - TransformerLens's name
        *,
        return_type: str = "input",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        hooks: Iterable[HookItem] = (),
        fwd_hooks: Iterable[tuple[Any, Any]] = (),
        **options: Any,
    ) -> Any:
        """Generate text with transformers' own ``generate``; hooks in scope fire at every step.

        ```python
        silent = ip.zero("blocks.3.hook_mlp_out", phase="generated")
        model.generate("The capital of France is", max_new_tokens=5, hooks=[silent])
        ```

        Args:
            input: text, a list of texts, token ids, or keywords for transformers.
            return_type: ``str``, ``tokens``, or ``input`` for whichever was given.
            prepend_bos: as in `to_tokens`.
            padding_side: where shorter texts are padded: by default at the left, so that all go
                on from their last token; at the right for an encoder.
            hooks: hooks and edits for this text, besides those in scope.
            fwd_hooks: pairs of a name and a function, likewise.
            **options: what transformers' ``generate`` takes.
        """
        hooks, fwd_hooks = list(hooks), list(fwd_hooks)
        some = hooks or fwd_hooks  # an empty scope would keep transformers from compiling
        with self.hooks(hooks, fwd_hooks=fwd_hooks) if some else nullcontext():
            return generation.generate(
                self,
                input,
                return_type=return_type,
                prepend_bos=prepend_bos,
                padding_side=padding_side,
                **options,
            )

    generate_batch = generate_batch

    @property
    def sites(self) -> SemanticSites:
        """What can be hooked: semantic sites by canonical name, with a sentence about each."""
        self.refresh(thoroughly=True)
        return SemanticSites(self.tree, self._seen, self._calls_of)

    def check(
        self,
        inputs: dict[str, Any] | None = None,
        *,
        layer: Some = None,
        differences: bool = False,
    ) -> Report:
        """Prove the promises on this very model; a site that fails its proof is not offered afterwards.

        Args:
            inputs: what the module's forward takes, by keyword; by default those of `probe`, or small random ones.
            layer: which blocks; by default the first, a middle and the last.
            differences: also compare gradients with central differences (meant for float32).
        """
        must_not_be_spread(self.root, "model.check()", "it looks at weights")
        if inputs is not None and self._anatomy is None:
            self.probe(inputs)
        self.anatomy  # noqa: B018 - with inputs that the probe had to find out
        inputs = self._probe_inputs if inputs is None else inputs  # type: ignore[assignment]
        return check(self, inputs, layer=layer, differences=differences)
