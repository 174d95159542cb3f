"""What something will take, from what it took: steps, transfers, answers. Pure; no numpy."""
