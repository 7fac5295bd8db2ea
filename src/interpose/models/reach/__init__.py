"""How values inside a model are reached that are no whole output of a module."""
