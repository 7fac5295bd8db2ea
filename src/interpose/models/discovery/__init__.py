"""Finding out what the parts of a model are, from one probe forward."""
