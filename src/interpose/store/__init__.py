"""Activations on disk: filling a store from texts (harvest), and reading from one."""
