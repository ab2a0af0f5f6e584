"""Settings to a prepared run, its trainings, and a record."""
