"""``pdmesh plan``: what would happen, what to buy, and what papers' numbers come out here."""
