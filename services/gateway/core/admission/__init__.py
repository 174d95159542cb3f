"""Who may come in, who waits for whom, and what is refused before it is computed."""
