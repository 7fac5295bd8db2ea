"""How the pocket model is made: the text it learns from, its tokenizer, its training and its evaluation."""
