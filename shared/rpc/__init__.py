"""Calls between services: streams, heartbeats, servers and channels, errors as statuses."""
