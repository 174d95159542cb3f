"""The data plane: tagged messages over UCX, and its twin in memory."""
