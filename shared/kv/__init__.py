"""Blocks of KV: allocation, prefix cache, layout. Pure."""
