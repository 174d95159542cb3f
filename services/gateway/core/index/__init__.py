"""Which worker has the KV of which prefix, and who could send it to whom."""
