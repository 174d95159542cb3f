"""The life of a process: loops, signals, drain, the cord to its parent."""
