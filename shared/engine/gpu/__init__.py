"""What keeps a GPU busy and its host from waiting; on a CPU the same names do little or nothing."""
