"""What services say to each other: messages as bytes, and as our own records."""
