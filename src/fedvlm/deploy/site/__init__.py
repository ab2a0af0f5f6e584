"""A site's side of a deployment."""
