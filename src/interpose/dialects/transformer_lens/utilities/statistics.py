"""How sure one can be of a mean over examples: errors, intervals, p values. No model is needed."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interpose.results.bootstrap import bootstrap

_STATISTICS = ("mean", "median")
_ALTERNATIVES = ("two-sided", "greater", "less")
_AT_ONCE = 256


def derive_generator(seed: int, *labels: object) -> torch.Generator:
    """A random generator for a seed and some labels: the same in every process, another for other labels."""
    text = ":".join(map(str, (seed, *labels)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return torch.Generator(device="cpu").manual_seed(number % 2**63)


def standard_error(x: Tensor, *, dim: int = -1) -> Tensor:
    """The standard error of the mean along a dimension, which goes away."""
    samples = _samples(x, dim, least=2)
    return samples.std(-1) / math.sqrt(samples.shape[-1])


def bootstrap_ci(
    x: Tensor,
    *,
    dim: int = -1,
    statistic: str = "mean",
    confidence: float = 0.95,
    n_resamples: int = 1000,
    generator: torch.Generator | None = None,
    chunk_size: int = _AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """Low and high end of a percentile bootstrap interval along a dimension, which goes away.

    Samples that are all alike give an interval of no width, however few they are; for shares of
    successes `success_rate_ci` is exact.

    Args:
        x: floating-point samples.
        dim: the dimension that counts them.
        statistic: ``mean`` or ``median``.
        confidence: how much of the resampled statistics lies inside.
        n_resamples: how often to draw as many samples as there are, with replacement.
        generator: of random numbers, on the CPU; by default one with the seed 0.
        chunk_size: means nothing here: as many draws are held as fit in little memory.
    """
    _one_of("statistic", statistic, _STATISTICS)
    _check_confidence(confidence)
    if n_resamples < 1 or chunk_size < 1:
        raise ValueError(
            f"n_resamples and chunk_size are 1 or more; got {n_resamples} and {chunk_size}"
        )
    low, high = bootstrap(
        _samples(x, dim, least=1),
        confidence=confidence,
        resamples=n_resamples,
        seed=0 if generator is None else generator,
        statistic=statistic,
        fewest=1,
    )
    return low.to(x.device), high.to(x.device)


def sign_flip_permutation_pvalue(
    effects: Tensor,
    *,
    dim: int = -1,
    n_permutations: int = 1000,
    generator: torch.Generator | None = None,
    alternative: str = "two-sided",
    exact_max_n: int = 12,
) -> Tensor:
    """How often a mean this far from zero comes up if each effect could as well have the other sign.

    Up to ``exact_max_n`` effects every choice of signs is tried, and the p value is exact. Otherwise
    it is ``(hits + 1) / (n_permutations + 1)`` of random choices.

    Args:
        effects: floating-point effects, such as differences of pairs.
        dim: the dimension that counts them, which goes away.
        n_permutations: how many random choices.
        generator: of random numbers, on the CPU; by default one with a fixed seed.
        alternative: ``two-sided``, ``greater`` or ``less``.
        exact_max_n: up to how many effects to try everything.
    """
    _one_of("alternative", alternative, _ALTERNATIVES)
    if n_permutations < 1:
        raise ValueError(f"n_permutations is 1 or more; got {n_permutations}")
    samples = _samples(effects, dim, least=1)
    samples = samples if samples.dtype == torch.float64 else samples.float()
    count = samples.shape[-1]
    observed = samples.mean(-1, keepdim=True)
    if count <= exact_max_n:
        every = torch.tensor(list(itertools.product((1.0, -1.0), repeat=count))).to(samples)
        return _hits(samples, every, observed, alternative) / len(every)
    generator = generator or derive_generator(0)
    hits = torch.zeros_like(observed[..., 0])
    for done in range(0, n_permutations, _AT_ONCE):
        shape = (min(_AT_ONCE, n_permutations - done), count)
        signs = (2 * _integers(2, shape, generator) - 1).to(samples)
        hits = hits + _hits(samples, signs, observed, alternative)
    return (hits + 1) / (n_permutations + 1)


def _hits(samples: Tensor, signs: Tensor, observed: Tensor, alternative: str) -> Tensor:
    """How many choices of signs [choice, sample] give a mean at least as far out."""
    means = (samples[..., None, :] * signs).mean(-1)
    if alternative == "two-sided":
        means, observed = means.abs(), observed.abs()
    elif alternative == "less":
        means, observed = -means, -observed
    # Sums of the same numbers in another order are the same sum, but for rounding.
    rounding = 100 * torch.finfo(means.dtype).eps * observed.abs()
    return (means >= observed - rounding).sum(-1).to(means.dtype)


@dataclass(frozen=True, slots=True)
class SuccessRateInterval:
    """A share of successes, and the interval that it is in with some confidence."""

    point_estimate: float
    ci_low: float
    ci_high: float
    n_trials: int
    n_successes: int
    confidence: float


def success_rate_ci(successes: Sequence[bool], *, confidence: float = 0.95) -> SuccessRateInterval:
    """The exact (Clopper-Pearson) interval of a share of successes.

    Args:
        successes: what came of each trial.
        confidence: how often at least such an interval has the true rate in it.
    """
    _check_confidence(confidence)
    trials = len(successes)
    if not trials:
        raise ValueError("no trials, so no rate: successes is empty.")
    good = sum(1 for success in successes if success)
    tail = (1 - confidence) / 2
    # The upper end for successes is what the lower end for failures leaves.
    low, missed = _lower(good, trials, tail), _lower(trials - good, trials, tail)
    return SuccessRateInterval(good / trials, low, 1 - missed, trials, good, confidence)


def _lower(good: int, trials: int, tail: float) -> float:
    """The rate at which so many successes or more have the probability ``tail``."""
    if good == 0:
        return 0.0
    counts = torch.arange(good, trials + 1, dtype=torch.float64, device="cpu")
    total = torch.tensor(float(trials), dtype=torch.float64, device="cpu")
    ways = (total + 1).lgamma() - (counts + 1).lgamma() - (total - counts + 1).lgamma()
    low, high = 0.0, 1.0
    for _ in range(100):
        rate = (low + high) / 2
        if rate in (low, high):
            break
        logs = ways + counts * math.log(rate) + (total - counts) * math.log1p(-rate)
        if float(logs.logsumexp(0).exp()) < tail:
            low = rate
        else:
            high = rate
    return (low + high) / 2


def _integers(below: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, below, shape, generator=generator, device="cpu")


def _samples(x: Tensor, dim: int, *, least: int) -> Tensor:
    """Samples along the last dimension."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"samples are a floating-point tensor; got {kind}")
    if x.ndim == 0 or x.shape[dim] < least:
        have = 0 if x.ndim == 0 else x.shape[dim]
        raise ValueError(f"at least {least} samples are needed along dim {dim}; there are {have}.")
    return x.movedim(dim, -1)


def _one_of(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(f"{what} is one of {', '.join(known)}; got {given!r}")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is between 0 and 1; got {confidence}")
