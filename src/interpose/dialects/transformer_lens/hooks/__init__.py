"""Hooks with TransformerLens's arguments, and modules that carry hook points of their own."""
