"""Logs, status, health checks and the live page."""
