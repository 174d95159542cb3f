"""What would happen: the mesh's own cores under a virtual clock, with a time model for what
computes. Imports cores, never a shell.

``baselines`` are other people's systems, by the rules that they published.
"""
