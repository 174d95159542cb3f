"""``make compose-test``: a real Docker engine, the three images, and tests/compose against them."""
