"""What happens to an upload on its way to the server."""
