"""Takes KV over from prefill workers and generates, one token a step: ``role.py``."""
