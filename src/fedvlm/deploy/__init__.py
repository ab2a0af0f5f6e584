"""Run experiments between machines: identity, messages, server, sites and operations."""
