"""Distributed alignment search: the directions in which a model keeps a variable (Geiger et al. 2023).

Two texts of a pair, base and source, differ in a variable. If a subspace with orthonormal rows R [k, units] carries
it, then a run on the base with the source's coordinates in that subspace,

    value + R'R (value of the source - value),

gives the counterfactual answer: what the base would say with the source's value of the variable. R is trained so
that it does, and judged by pairs that training did not see. The model stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import interpose as ip
from interpose.models.selection import Some, entries
from interpose.progress import Progress, ShowProgress
from interpose.render.labelled import Labelled

_DRAWS = 5  # random subspaces, of which the mean is given
_EVIDENCE = (
    "Evidence that a variable can be set through this subspace, as far as the learned accuracy is above the "
    "placebos; not that the model computes with it alone: a trained direction may also work through paths that the "
    "model does not use by itself, and a full-vector patch that fails leaves nothing to find here."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Alignment(ip.Scores):
    """Interchange accuracy on held-out pairs, [layer, pos], with the subspaces and what to compare with.

    Attributes:
        baselines: accuracies [layer, pos] by name: ``none`` (no intervention), ``full vector`` (all of the value),
            ``random`` (as many random directions, mean of five draws), ``shuffled`` (trained and judged by targets of
            other pairs).
        directions: the subspaces, orthonormal rows, [layer, pos, dimensions, units].
        losses: of each step of training, [layer, pos, step].
        held_out: the numbers of the pairs that were not trained on.
        site: where they were exchanged.
        head: in which head; None for sites without heads.
    """

    baselines: dict[str, Tensor]
    directions: Tensor
    losses: Tensor
    held_out: list[int]
    site: str
    head: int | None = None

    def edit(
        self, source: Any, *, layer: int | None = None, pos: Any = None, source_pos: Any = None
    ) -> ip.Edit:
        """The exchange as an edit, for any texts: ``model.run_with_hooks(text, hooks=[found.edit(cache)])``.

        Args:
            source: a cache with the source's values at the site.
            layer: which, where several were searched.
            pos: which, where several were searched.
            source_pos: as in `ip.patch`, where the source is longer or shorter.
        """
        layers, positions = self.axes["layer"], self.axes["pos"]
        at = [self._only("layer", layers, layer), self._only("pos", positions, pos)]
        rows = self.directions[at[0], at[1]]
        place = {"layer": layers[at[0]], "pos": positions[at[1]], "head": self.head}
        return ip.rotate(self.site, rows, source, source_pos=source_pos, **place)

    def _only(self, name: str, there: list[Any], asked: Any) -> int:
        if asked is None and len(there) > 1:
            raise ValueError(f"several were searched; say which: {name}= one of {there}.")
        if asked is not None and asked not in there:
            raise ValueError(f"no {name} {asked!r} among {there}.")
        return 0 if asked is None else there.index(asked)

    def columns(self) -> dict[str, Sequence[Any]]:
        """What there is of every place, by name: also what to compare with."""
        baselines = {name: some.flatten().tolist() for name, some in self.baselines.items()}
        return {**ip.Scores.columns(self), **baselines}

    def view(self) -> Labelled:
        """The accuracy beside the baselines; axes of one entry are left out."""
        every = torch.stack([self.values, *self.baselines.values()])
        labels = {"intervention": ["learned", *self.baselines], **self.labels}
        shown = {name: some for name, some in labels.items() if len(some) > 1}
        values = every.reshape([len(some) for some in shown.values()])
        return Labelled(values=values, labels=shown, what=self.unit, limit=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Pairs that run together.

    Attributes:
        run: from hooks to logits: the base, from the searched layer on.
        source: the values of the sources there.
        goals: for ``true`` and for ``shuffled`` targets, from logits to their log-probabilities [pair], and to whether
            each is right [pair].
    """

    run: Callable[[list[Any]], Tensor]
    source: Any
    goals: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """What does not depend on the place that is searched."""

    model: ip.TransformerModel
    site: str
    head: int | None
    train: Sequence[ip.Batch]
    test: Sequence[ip.Batch]
    answers: tuple[Any, Any]
    shuffled: tuple[Any, Any] | None
    dimensions: int
    steps: int
    lr: float
    seed: int


def alignment_search(
    model: ip.TransformerModel,
    base: Any,
    source: Any,
    *,
    answer: Any,
    instead: Any = None,
    layer: Some,
    pos: int | str | Sequence[int | str] = -1,
    site: str = "resid_post",
    head: int | None = None,
    dimensions: int = 1,
    steps: int = 200,
    lr: float = 0.02,
    held_out: float | Sequence[int] = 0.25,
    placebo: bool = True,
    seed: int = 0,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> Alignment:
    """A subspace that carries a variable from one text into another, with its accuracy on pairs held out.

    ```python
    found = ip.alignment_search(model, bases, sources, answer=answers, layer=4, pos=-1)
    found.values, found.baselines, found.directions
    model.run_with_hooks(text, hooks=[found.edit(cache_of_another_text)])
    ```

    Args:
        model: a model of transformers, in eval mode.
        base: texts, or tokens.
        source: as many, each of its base's length: where the variable's value comes from.
        answer: the token that each base should be followed by with its source's value of the variable.
        instead: tokens to be ahead of. By default a pair is right if its target is ahead of all tokens.
        layer: a layer, or several to search each.
        pos: a position or a text (all its tokens), or several to search each; with ``layer``, a grid.
        site: a kind of site.
        head: for sites with heads, which.
        dimensions: how many directions.
        steps: how many batches are trained on.
        lr: of Adam, falling to zero.
        held_out: the share of pairs that is not trained on, or their numbers.
        placebo: whether to train on shuffled targets too, for as many steps.
        seed: of the first directions, of the order of batches, of what is held out.
        batch_size: how many pairs run together.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if steps < 1:
        raise ValueError(f"steps is at least 1; got {steps}.")
    batches = ip.batches(model, base, source, batch_size=2**31, prepend_bos=prepend_bos)
    if batches[0].corrupt is None:
        raise ValueError("alignment_search exchanges values between pairs: give base and source.")
    total = batches[0].total
    drawn = torch.Generator("cpu").manual_seed(seed)
    numbers = _held_out(held_out, total, drawn)
    search = _Search(
        model=model,
        site=site,
        head=head,
        train=_some(batches, set(range(total)) - numbers, batch_size),
        test=_some(batches, numbers, batch_size),
        answers=(answer, instead),
        shuffled=_shuffled(answer, instead, total, drawn) if placebo else None,
        dimensions=dimensions,
        steps=steps,
        lr=lr,
        seed=seed,
    )
    layers = entries(layer, len(model.blocks), "layer", "the model")
    positions = list(dict.fromkeys([pos] if isinstance(pos, (int, str)) else pos))
    rounds = steps * (1 + placebo) * len(layers) * len(positions)
    with Progress(progress, rounds, "step") as bar:
        found = [[_searched(search, one, place, bar) for place in positions] for one in layers]
    return _result(search, found, {"layer": layers, "pos": positions}, sorted(numbers))


def _result(
    search: _Search, found: list[list[dict[str, Any]]], axes: dict[str, Any], held_out: list[int]
) -> Alignment:
    """What was found at each place, as one."""

    def grid(part: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        return torch.stack([torch.stack([part(cell) for cell in row]) for row in found])

    def accuracy(name: str) -> Tensor:
        return grid(lambda cell: cell["accuracy"][name])

    cells = [cell for row in found for cell in row]
    dimensions = search.dimensions
    return Alignment(
        title=f"Alignment search at {search.site}, {dimensions} dimension{'s' * (dimensions != 1)}",
        values=accuracy("learned"),
        axes=axes,
        unit="interchange accuracy on held-out pairs",
        protocol={
            "trained_pairs": sum(map(len, search.train)),
            "held_out_pairs": len(held_out),
            "steps": search.steps,
            "lr": search.lr,
            "seed": search.seed,
            "forwards": sum(cell["forwards"] for cell in cells),
            "backwards": search.steps * len(cells) * (1 + (search.shuffled is not None)),
        },
        evidence=_EVIDENCE,
        baselines={name: accuracy(name) for name in cells[0]["accuracy"] if name != "learned"},
        directions=grid(lambda cell: cell["directions"]),
        losses=grid(lambda cell: cell["losses"]),
        held_out=held_out,
        site=search.site,
        head=search.head,
    )


def _searched(search: _Search, layer: int, pos: int | str, bar: Progress) -> dict[str, Any]:
    """One place: accuracies by name, directions [dimensions, units], losses [step]."""
    where: dict[str, Any] = {"layer": layer, "pos": pos, "head": search.head}
    train, test = ([_pairs(search, b, where) for b in some] for some in (search.train, search.test))

    def fresh(seed: int) -> Any:
        value = next(iter(train[0].source.values()))
        return ip.Rotation(value.shape[-1], k=search.dimensions, seed=seed).to(value.device)

    def swap(rotation: Any) -> Callable[[_Pairs], list[Any]]:
        return lambda pairs: [ip.rotate(search.site, rotation, pairs.source, **where)]

    learned = fresh(search.seed)
    losses = _train(search, train, learned, swap(learned), "true", bar)
    draws = [_accuracy(test, swap(fresh(search.seed + 1 + draw))) for draw in range(_DRAWS)]
    accuracy = {
        "learned": _accuracy(test, swap(learned)),
        "none": _accuracy(test, lambda _: []),
        "full vector": _accuracy(test, lambda p: [ip.patch(search.site, p.source, **where)]),
        "random": torch.stack(draws).mean(),
    }
    if search.shuffled is not None:
        other = fresh(search.seed)
        _train(search, train, other, swap(other), "shuffled", bar)
        accuracy["shuffled"] = _accuracy(test, swap(other), "shuffled")
    return {
        "accuracy": accuracy,
        "directions": learned.weight.detach().cpu(),
        "losses": losses,
        "forwards": 3 * (len(train) + len(test))
        + (len(accuracy) - 1 + _DRAWS) * len(test)
        + search.steps * (1 + (search.shuffled is not None)),
    }


def _pairs(search: _Search, batch: ip.Batch, where: dict[str, Any]) -> _Pairs:
    """Both runs, once: the source's as far as the site, the base's as far as its block."""
    model, layer, tokens = search.model, where["layer"], batch.clean
    there = ip.at(search.site, **where)
    if where["head"] is None and any("head" in s.axes for s in model.sites.select(there).values()):
        raise ValueError(
            f"{search.site!r} has heads, each with directions of its own. Say which: head=0."
        )
    with torch.no_grad():
        _, source = model.run_with_cache(batch.corrupt, names_filter=there, return_type=None)
        try:
            stream = model(tokens, stop_at_layer=layer)
            # with the mask of tokens, where they are padded
            rest: dict[str, Any] = {"start_at_layer": layer, **model.prepare(tokens)}
            model(stream, **rest)
        except ip.Unsupported:  # then each run is a whole one
            stream, rest = tokens, {}
    goals = {"true": _goal(batch, *search.answers)}
    if search.shuffled is not None:
        goals["shuffled"] = _goal(batch, *search.shuffled)
    return _Pairs(
        run=lambda hooks: model.run_with_hooks(stream, hooks=hooks, **rest),
        source=source,
        goals=goals,
    )


def _goal(
    batch: ip.Batch, targets: Any, instead: Any
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """From logits: the log-probability of targets, among all tokens or against one; and whether they are ahead."""
    if instead is None:
        rank = batch.measure(ip.metrics.rank(targets))
        likely = batch.measure(ip.metrics.probability(targets, log=True))
        return likely, lambda logits: rank(logits) == 0
    lead = batch.measure(ip.metrics.logit_difference(targets, instead))
    return lambda logits: logsigmoid(lead(logits)), lambda logits: lead(logits) > 0


def _train(
    search: _Search,
    pairs: Sequence[_Pairs],
    rotation: Any,
    swap: Callable[[_Pairs], list[Any]],
    goal: str,
    bar: Progress,
) -> Tensor:
    """Turn the directions until the swap gives what is wanted; the loss of each step."""
    drawn = torch.Generator("cpu").manual_seed(search.seed)
    optimizer = torch.optim.Adam([rotation.raw], lr=search.lr)
    order: list[int] = []
    losses = []
    for step in range(search.steps):
        order = order or torch.randperm(len(pairs), generator=drawn, device="cpu").tolist()
        some = pairs[order.pop()]
        with torch.enable_grad():
            loss = -some.goals[goal][0](some.run(swap(some))).mean()
            (rotation.raw.grad,) = torch.autograd.grad(loss, [rotation.raw])  # and of no parameter
        optimizer.param_groups[0]["lr"] = search.lr * (1 - step / search.steps)
        optimizer.step()
        losses.append(loss.detach())
        bar.step()
    return torch.stack(losses).cpu()


def _accuracy(
    pairs: Sequence[_Pairs], swap: Callable[[_Pairs], list[Any]], goal: str = "true"
) -> Tensor:
    with torch.no_grad():
        right = torch.cat([some.goals[goal][1](some.run(swap(some))) for some in pairs])
    return right.float().mean().cpu()


def _some(batches: Sequence[ip.Batch], numbers: set[int], size: int) -> list[ip.Batch]:
    """Batches of only these pairs."""
    found = []
    for batch in batches:
        rows = [row for row, number in enumerate(batch.numbers) if number in numbers]
        for at in range(0, len(rows), size):
            some = rows[at : at + size]
            assert batch.corrupt is not None
            found.append(
                dataclasses.replace(
                    batch,
                    clean=batch.clean[some],
                    corrupt=batch.corrupt[some],
                    numbers=tuple(batch.numbers[row] for row in some),
                )
            )
    return found


def _held_out(asked: float | Sequence[int], total: int, drawn: torch.Generator) -> set[int]:
    if isinstance(asked, (int, float)):
        order = torch.randperm(total, generator=drawn, device="cpu").tolist()
        numbers = set(order[: max(1, round(asked * total))] if asked > 0 else ())
    else:
        numbers = set(asked)
    if not numbers or not numbers < set(range(total)):
        raise ValueError(
            f"held_out={asked!r} of {total} pairs leaves none to train on or to judge by, or names one that is not "
            "there. Give a share between 0 and 1, or numbers of some of the pairs."
        )
    return numbers


def _shuffled(targets: Any, instead: Any, total: int, drawn: torch.Generator) -> tuple[Any, Any]:
    """Each pair with the answers of another."""
    same = isinstance(targets, (str, int)) or len({str(word) for word in targets}) == 1
    if same:
        raise ValueError(
            "all pairs have the same target, so that a constant push would do, and shuffled targets are the same. "
            "Give pairs with different targets, or say placebo=False."
        )
    if len(targets) != total:
        raise ValueError(f"{len(targets)} targets for {total} pairs: give one for each.")
    order = torch.randperm(total, generator=drawn, device="cpu").tolist()
    single = instead is None or isinstance(instead, (str, int))
    return [targets[n] for n in order], instead if single else [instead[n] for n in order]
