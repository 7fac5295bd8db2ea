"""Other weights that compute the same: norms folded, means taken off, factors balanced; proven on the model."""
