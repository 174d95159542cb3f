"""What a prefill worker decides: the life of a job. Pure."""
