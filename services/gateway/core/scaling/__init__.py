"""How many workers the load needs, and what to change of a mesh now."""
