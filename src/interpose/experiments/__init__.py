"""Experiments as plain data: a model's name, texts, edits and metrics, the same in Python, files and commands."""
