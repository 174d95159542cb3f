"""What the gateway decides: the life of a request here, all else in rooms of its own. Pure."""
