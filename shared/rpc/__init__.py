"""gRPC between services: messages, streams, heartbeats, errors as statuses."""
