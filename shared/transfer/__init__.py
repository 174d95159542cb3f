"""The protocol that moves KV: both ends, as tables and pure cores."""
