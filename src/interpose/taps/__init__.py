"""How a site is reached in the live model: torch hooks, containers, and who is listening in this context."""
