"""Sweeps: one experiment at many places, with as little arithmetic as causality allows."""

from interpose.sweeps import metrics

__all__ = ["metrics"]
