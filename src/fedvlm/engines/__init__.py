"""Where a method runs: batched (default), single, flower."""
