"""What a machine can do with a model: measured at the first start, and kept for later ones."""
