"""Connect server and sites through Flower: its SuperLink at the server, its fleet routes and records on the wire."""
