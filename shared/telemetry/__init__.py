"""Metrics, receipts, moments, loop lag: what a service says of itself."""
