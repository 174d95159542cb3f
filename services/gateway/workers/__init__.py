"""The mesh side: who is in the mesh, sessions with workers, and each request's way through them."""
