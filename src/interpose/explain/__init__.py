"""What errors say: the word that was meant, what there is, where it was raised. Knows nothing of torch's hooks."""
