"""Models from scratch: a small transformer with TransformerLens's parameters, trained with an ordinary loop."""
