"""Monitors: what happens in any network while it runs or trains."""
