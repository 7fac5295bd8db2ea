"""Sparse autoencoders: what they compute, how they stand in a model, how they are trained, and their files."""
