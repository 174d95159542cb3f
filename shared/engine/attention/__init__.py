"""Attention over the paged pool: one page of contract (``base``), one file per implementation."""
