"""`processed`: a model that computes the same with simpler weights, as TransformerLens's flags make them.

The result still runs transformers' own forward. Each step is refused where the model's structure speaks
against it, and proven on a probe forward where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.processing import centre, copies, fold, heads, observed
from interpose.models.transformer import TransformerModel

Some = TypeVar("Some", bound=TransformerModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One flag: what it is planned by, what writes it, and what proves more than the model's output."""

    plan: Callable[[TransformerModel], Any]
    apply: Callable[[Any], None]
    check: Callable[[TransformerModel], None] | None = None
    unties: bool = True
    """Whether it writes to the embedding or to the unembedding, so that they must be two."""


STEPS: dict[str, Step] = {
    "fold_ln": Step(plan=fold.plan, apply=fold.apply),
    "center_writing_weights": Step(
        plan=centre.plan_writers, apply=centre.centre_writers, check=centre.check_nothing_added
    ),
    "center_unembed": Step(plan=centre.plan_unembed, apply=centre.centre_unembed),
    "fold_value_biases": Step(plan=heads.plan_values, apply=heads.fold_value_biases, unties=False),
    "refactor_factored_attn_matrices": Step(
        plan=heads.plan_factors, apply=heads.refactor, unties=False
    ),
}
"""The flags in the order in which they are done."""


def processed(
    model: Some,
    *,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
    copy: bool = True,
) -> Some:
    """A model that computes the same with simpler weights. The model given stays as it is.

    ```python
    simple = processed(model)
    simple.blocks[0].attn.W_Q          # has the weight of the norm before it in it
    processed(model, **{flag: why is None for flag, why in exact_flags(model).items()})
    ```

    A flag that would not be exact on this model is refused with `Unsupported`. Embeddings that were tied
    to the unembedding are not any more, if a flag writes to either. A linear map without a bias gets one
    where it needs one; transformers cannot load such a model again, so ``save_pretrained`` then refuses.

    Args:
        model: whose weights; not changed.
        fold_ln: what the norms before attention, MLPs and the unembedding multiply with and add goes into
            the maps that read them; of those that read a norm which takes off the mean, also the mean
            over the stream's features, which reads nothing. Norms after a branch stay.
        center_writing_weights: whatever writes to the stream writes with mean zero over its features.
        center_unembed: logits have mean zero over the vocabulary; log-probabilities stay.
        fold_value_biases: the biases of values go through ``W_O`` into ``b_O``.
        refactor_factored_attn_matrices: ``W_Q`` and ``W_K`` of each head, with their biases, become the
            balanced factors of a singular value decomposition of their product; ``W_V`` and ``W_O`` too,
            with all the size in ``W_V``. Biases of values go first.
        copy: process a copy. False changes the module itself, for one that nobody else holds; should a
            proof fail, it stays half processed.
    """
    asked: dict[str, bool | None] = {
        "fold_ln": fold_ln,
        "center_writing_weights": center_writing_weights,
        "center_unembed": center_unembed,
        "fold_value_biases": fold_value_biases,
        "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
    }
    return process(model, asked, copy=copy)[0]


def process(
    model: Some, flags: Mapping[str, bool | None], *, copy: bool = True
) -> tuple[Some, tuple[str, ...]]:
    """What `processed` does, and the flags that were done.

    Args:
        model: whose weights; not changed.
        flags: True for what must be done, None for what is to be done unless the model's structure speaks
            against it, False for what is not wanted.
        copy: as in `processed`.
    """
    made = copies.rewrapped(model, copies.copied(model.module) if copy else model.module)
    plans: dict[str, Any] = {}
    for flag, step in STEPS.items():
        if flags.get(flag) is not False:
            try:
                plans[flag] = _explained(made, flag, step.plan)
            except Unsupported:
                if flags.get(flag):
                    raise
    if not plans:
        return made, ()
    before, names = observed.output(made), set(made.module.state_dict())
    unties = next((flag for flag in plans if STEPS[flag].unties), None)
    if unties is not None:
        _explained(made, unties, partial(_untie, before=before))
    centred = False
    for flag, plan in plans.items():
        centred = centred or flag == "center_unembed"
        taken = partial(_take, step=STEPS[flag], plan=plan, before=before, centred=centred)
        _explained(made, flag, taken)
    if unties is not None:
        copies.settle_ties(made.module)
    new = [name for name in made.module.state_dict() if name not in names]
    copies.refuse_saving(made.module, new)
    return made, tuple(plans)


def exact_flags(model: TransformerModel) -> dict[str, str | None]:
    """For each flag of `processed` why it is not exact on this model; None for those that are.

    Each is tried by itself on a copy of the model, unless its structure speaks against it already.

    Args:
        model: not changed.
    """
    found: dict[str, str | None] = {}
    for flag, step in STEPS.items():
        try:
            _explained(model, flag, step.plan)
            processed(model, **{other: other == flag for other in STEPS})
            found[flag] = None
        except Unsupported as error:
            found[flag] = str(error.__cause__)
    return found


def _explained(model: TransformerModel, flag: str, act: Callable[[TransformerModel], Any]) -> Any:
    """Do something for a flag; a refusal says which flag and which model it is about."""
    try:
        return act(model)
    except Unsupported as error:
        raise Unsupported(f"{flag} is not exact on {model.tree.label}: {error}") from error


def _untie(model: TransformerModel, *, before: Tensor) -> None:
    """Part the embedding and the unembedding."""
    copies.untie(model)
    try:
        _prove(model, before=before, centred=False)
    except Unsupported as error:
        raise Unsupported(
            "its forward computes something else once embedding and unembedding are two (it looks "
            "at config.tie_word_embeddings)."
        ) from error


def _take(model: TransformerModel, *, step: Step, plan: Any, before: Tensor, centred: bool) -> None:
    """Take one step, and prove that it changed nothing else."""
    step.apply(plan)
    _prove(model, before=before, centred=centred)
    if step.check is not None:
        step.check(model)


def _prove(model: TransformerModel, *, before: Tensor, centred: bool) -> None:
    """Refuse a model that no longer computes what it did."""
    after = observed.output(model)
    old, new = before.double(), after.double()
    if centred:
        old, new = old.log_softmax(-1), new.log_softmax(-1)
    far = float((old - new).abs().max() / old.abs().max().clamp_min(1e-30))
    allowed = observed.tolerance(model)
    if not far <= allowed:  # also where it is no number
        dtype = str(before.dtype).removeprefix("torch.")
        raise Unsupported(
            f"on a probe, outputs change by {far:.2g} of their size, where {dtype} allows "
            f"{allowed:.0e}. Something reads what was changed, and was not found."
        )
