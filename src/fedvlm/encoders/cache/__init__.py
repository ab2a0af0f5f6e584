"""Embeddings on disk: every image is encoded once."""
