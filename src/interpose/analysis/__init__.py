"""Ready-made looks at a model, one file per question, each on the public API alone."""
