"""Clients on one side, workers on the other: admission, routing, streams, retries."""
