"""Files: written whole or not at all, and read only after every field was checked."""
