"""Runs, hooks and caches on any PyTorch module."""
