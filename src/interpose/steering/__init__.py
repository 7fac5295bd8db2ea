"""Steering: directions from contrastive pairs, how strongly to add them, what they change, and files of them."""
