"""Stores of activations and other tools: what they wrote, read; and what they read, written."""
