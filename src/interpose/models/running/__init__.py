"""Text in, logits out: forward, padding, generation."""
