"""What units of a model respond to and do: their examples, counts and effects, names for them, pages to look at."""
