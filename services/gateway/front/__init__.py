"""What both doors share: callers, forms, answers as text, calls in progress."""
