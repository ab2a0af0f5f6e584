"""Files on disk: atomic, checksummed, and larger than memory."""
