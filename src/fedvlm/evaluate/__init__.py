"""Protocols, scores and metrics: the one place where anything is measured."""
