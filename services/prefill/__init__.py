"""Computes prompts and pushes their KV to decode workers, layer by layer: ``role.py``."""
