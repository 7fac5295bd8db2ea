"""Names for what was found: canonical ones, and those of other systems."""
