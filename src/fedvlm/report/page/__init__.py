"""One page that shows runs: a single file that asks nothing of any network."""
