"""The methods of the field: each file is one, on the public surface alone, and pastes into a notebook."""
