"""Where KV lies: the pool of blocks, its copies to and from the wire, and the memory below."""
