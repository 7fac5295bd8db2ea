"""Names: what a user may write, and where in a module tree it leads."""
