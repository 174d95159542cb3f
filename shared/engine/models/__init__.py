"""The model families and the one decoder they share."""
