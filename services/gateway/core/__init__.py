"""What the gateway decides: admission, routing, the life of a request. Pure."""
