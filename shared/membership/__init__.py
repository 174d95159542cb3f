"""Who belongs to a mesh: joining, and proving that one may; TLS below it."""
