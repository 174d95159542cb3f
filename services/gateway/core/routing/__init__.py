"""Which pair of workers takes a request, and what is known of workers for that."""
