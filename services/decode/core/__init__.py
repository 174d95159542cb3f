"""What a decode worker decides: who has blocks, and until when. Pure."""
