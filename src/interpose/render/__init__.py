"""Text, HTML and PNG from plain data. Knows nothing of models; everything that prints itself builds on it."""
