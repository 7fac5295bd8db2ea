"""Many texts at once by transformers' continuous batching, with hooks and labelled rows."""
