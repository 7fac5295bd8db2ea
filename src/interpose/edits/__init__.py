"""Edits: controllers that are plain data, so they can be printed, compared and saved."""
