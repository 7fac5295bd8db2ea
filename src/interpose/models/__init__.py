"""Models of transformers: what their parts mean, found out from the live model."""
