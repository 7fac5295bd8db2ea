"""Linear maps from features to labels, fitted for all layers at once with each fold held out in turn.

Ridge and class means need only sums over examples, which add up batch by batch in float64; logistic regression needs
all features. Nothing here knows of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Data = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Numbers of examples [example] and their features [layer, example, unit], batch by batch, as often as asked."""
Affine = tuple[Tensor, Tensor]
"""W [layer, row, unit] and b [layer, row] on features as they are; two classes have one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Labels to be read: ``target`` [example] (indices of classes, or numbers), and who is held out when."""

    target: Tensor
    classes: list[Any] | None
    fold_of: Tensor
    folds: int

    @property
    def columns(self) -> Tensor:
        """What a linear map should give, [example, column]."""
        if self.classes is None:
            return self.target[:, None]
        return torch.nn.functional.one_hot(self.target, len(self.classes)).double()

    def rounds(self) -> list[int | None]:
        """The folds to hold out, one after the other, and at last none."""
        return [*range(self.folds), None]


def fitted(data: Data, tasks: Sequence[Task], kind: str, strength: float) -> list[list[Affine]]:
    """For each task, the fit without each fold, and at last the one on everything.

    Args:
        data: the features.
        tasks: what is to be read of them.
        kind: ``ridge``, ``logistic`` or ``difference_of_means``.
        strength: of the penalty on weights.
    """
    if not strength > 0:
        raise ValueError(
            f"strength is above 0, or features that copy others have no fit; got {strength}."
        )
    if kind == "logistic":
        return _logistic(data, tasks, strength)
    return _from_sums(_summed(data, tasks), tasks, kind, strength)


def _summed(data: Data, tasks: Sequence[Task]) -> list[list[list[Tensor]]]:
    """For each task and fold: count [1], sums of x [layer, unit], y [column], xx' and xy' by layer, in float64."""
    sums: list[list[list[Tensor]]] = [[[] for _ in range(task.folds)] for task in tasks]
    for numbers, features in data():
        for task, of_folds in zip(tasks, sums):
            for fold in task.fold_of[numbers].unique().tolist():
                rows = (task.fold_of[numbers] == fold).nonzero()[:, 0]
                x = features[:, rows.to(features.device)].double()  # [layer, example, unit]
                y = task.columns[numbers[rows]].to(x.device)
                ones = x.new_ones(1)
                more = [ones * len(rows), x.sum(1), y.sum(0), x.mT @ x, x.mT @ y]
                held = of_folds[fold]
                of_folds[fold] = [a + b for a, b in zip(held, more)] if held else more
    return sums


def _from_sums(
    sums: Sequence[Sequence[Sequence[Tensor]]], tasks: Sequence[Task], kind: str, strength: float
) -> list[list[Affine]]:
    """For each task, the fit without each fold, and the one on everything."""
    solve: Callable[..., Affine] = _means if kind == "difference_of_means" else _ridge
    found = []
    for task, of_folds in zip(tasks, sums):
        fits = []
        for held in task.rounds():
            # Added up, not subtracted from the whole: nothing of what is held out may leave a trace.
            parts = [some for fold, some in enumerate(of_folds) if fold != held and some]
            together = [torch.stack(some).sum(0) for some in zip(*parts)]
            fits.append(_collapsed(solve(*together, strength), task))
        found.append(fits)
    return found


def _ridge(n: Tensor, x: Tensor, y: Tensor, xx: Tensor, xy: Tensor, strength: float) -> Affine:
    """By the normal equations of standardised features."""
    mean, wanted = x / n, y / n  # [layer, unit], [column]
    cov = xx / n - mean[:, :, None] * mean[:, None, :]
    scale = _scale(cov.diagonal(dim1=1, dim2=2), mean)
    cov = cov / scale[:, :, None] / scale[:, None, :]
    toward = (xy / n - mean[:, :, None] * wanted) / scale[:, :, None]  # [layer, unit, column]
    eye = torch.eye(cov.shape[1], dtype=cov.dtype, device=cov.device)
    weight = (torch.linalg.solve(cov + strength * eye, toward) / scale[:, :, None]).mT
    return weight, wanted - (weight @ mean[:, :, None])[..., 0]


def _means(n: Tensor, x: Tensor, y: Tensor, _xx: Tensor, xy: Tensor, _strength: float) -> Affine:
    """The nearest mean: |x - m|^2 without what all classes share."""
    mean = (x / n)[:, None]
    apart = (xy / y.clamp_min(1)).mT - mean  # [layer, class, unit]
    bias = -0.5 * apart.square().sum(-1) - (apart * mean).sum(-1)
    return apart, bias.masked_fill(y == 0, -torch.inf)  # a class without examples is never nearest


def _scale(variance: Tensor, mean: Tensor) -> Tensor:
    """The standard deviation; infinite for units that are constant up to rounding, so that they do not count."""
    still = variance <= 1e-12 * (mean.square() + variance.clamp_min(1e-300))
    return torch.where(still, torch.inf, variance.clamp_min(1e-300).sqrt())


def _logistic(data: Data, tasks: Sequence[Task], strength: float) -> list[list[Affine]]:
    """Layer by layer, fold by fold."""
    batches = list(data())
    order = torch.cat([numbers for numbers, _ in batches]).argsort()
    x = torch.cat([features for _, features in batches], 1)[:, order].double()
    found = []
    for task in tasks:
        fits = []
        for held in task.rounds():
            rows = (task.fold_of != (-1 if held is None else held)).to(x.device)
            y = task.columns.to(x.device)[rows]
            each = [_softmax_fit(layer[rows], y, strength) for layer in x]
            weight, bias = (torch.stack(parts) for parts in zip(*each))
            fits.append(_collapsed((weight, bias), task))
        found.append(fits)
    return found


def _softmax_fit(x: Tensor, y: Tensor, strength: float) -> Affine:
    """W [class, unit] and b [class] of one layer, by L-BFGS from zero with the gradient written out.

    It runs in coordinates in which the loss is about equally curved in all directions: W = V inverse(L), where LL' is a
    bound of the curvature. That takes tens of steps instead of thousands.
    """
    mean, n = x.mean(0), len(x)
    scale = _scale((x - mean).square().mean(0), mean)
    z = (x - mean) / scale
    eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    root = torch.linalg.cholesky(z.mT @ z / (4 * n) + strength * eye)
    inverse = torch.linalg.solve_triangular(root, eye, upper=False)
    turned, bias = z.new_zeros(y.shape[1], z.shape[1]), z.new_zeros(y.shape[1])

    def closure() -> Tensor:
        weight = turned @ inverse
        logs = (z @ weight.mT + bias).log_softmax(-1)
        error = (logs.exp() - y) / n
        turned.grad = (error.mT @ z + strength * weight) @ inverse.mT
        bias.grad = error.sum(0)
        loss: Tensor = -(y * logs).sum() / n + strength / 2 * weight.square().sum()
        return loss

    torch.optim.LBFGS(
        [turned, bias],
        max_iter=1000,
        tolerance_grad=1e-6,
        tolerance_change=1e-15,
        history_size=12,
        line_search_fn="strong_wolfe",
    ).step(closure)
    weight = turned.detach() @ inverse / scale
    return weight, bias.detach() - weight @ mean


def _collapsed(fit: Affine, task: Task) -> Affine:
    """Two classes as one row, positive for the second."""
    weight, bias = fit
    if task.classes is None or len(task.classes) > 2:
        return weight, bias
    return weight[:, 1:] - weight[:, :1], bias[:, 1:] - bias[:, :1]


def predicted(data: Data, tasks: Sequence[Task], fits: Sequence[Sequence[Affine]]) -> list[Tensor]:
    """For each task, what is read of each example by the fit that has not seen it, [layer, example]."""
    total = len(tasks[0].target)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in tasks]
    for numbers, features in data():
        for task, of_folds, parts in zip(tasks, fits, found):
            of = task.fold_of[numbers]
            for fold in of.unique().tolist():
                rows = (of == fold).nonzero()[:, 0]
                weight, bias = of_folds[fold]
                x = features[:, rows.to(features.device)].double()
                scores = x @ weight.mT + bias[:, None]  # [layer, example, row]
                one = scores[..., 0] if task.classes is None else (scores[..., 0] > 0).long()
                parts.append(
                    (numbers[rows], (one if scores.shape[-1] == 1 else scores.argmax(-1)).cpu())
                )
    made = []
    for parts in found:
        whole = torch.empty(len(parts[0][1]), total, dtype=parts[0][1].dtype, device="cpu")
        for numbers, values in parts:
            whole[:, numbers] = values
        made.append(whole)
    return made


def measures(task: Task, predictions: Tensor) -> dict[str, Tensor]:
    """How well predictions [layer, example] are right, by name, [layer]: the first is the one that counts."""
    target = task.target
    if task.classes is None:
        usual = torch.stack([target[task.fold_of != fold].mean() for fold in range(task.folds)])
        around = (target - usual[task.fold_of]).square().sum()
        return {"r2": 1 - (predictions - target).square().sum(1) / around}
    right = (predictions == target).double()
    classes = target.unique()
    balanced = torch.stack([right[:, target == one].mean(1) for one in classes]).mean(0)
    chance = target.bincount().max() / len(target)
    return {
        "accuracy": right.mean(1),
        "balanced": balanced,
        "chance": chance.double().expand(len(right)),
    }
