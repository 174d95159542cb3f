"""The bundled demo model: its training text, training and evaluation."""
