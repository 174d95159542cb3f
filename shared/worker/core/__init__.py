"""What a worker decides: the life of a request, and who gets blocks. Pure."""
