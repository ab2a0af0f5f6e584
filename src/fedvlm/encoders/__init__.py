"""Where embeddings come from."""
