"""Records into tables."""
