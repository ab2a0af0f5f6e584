"""Pure functions, tested by their laws."""
