"""Running a model: rows and buffers in, tokens and KV out. torch lives here and nowhere else."""
