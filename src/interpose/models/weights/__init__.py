"""Weights and sizes, in the shapes the field is used to."""
