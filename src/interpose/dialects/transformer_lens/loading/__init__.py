"""What `from_pretrained` knows of names, and what it can leave out of a model."""
