"""Many runs that differ in their changes, with as little arithmetic as causality allows: variants, sweeps, metrics."""

from interpose.sweeps import metrics

__all__ = ["metrics"]
