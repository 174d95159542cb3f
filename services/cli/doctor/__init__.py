"""``pdmesh doctor``: what a machine must have, what it has, and what to do about the difference."""
