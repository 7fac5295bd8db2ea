"""Proving the promises on a live model."""
