"""Other systems' names on this engine: their documented code runs with only the import line changed."""
