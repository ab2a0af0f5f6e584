"""Flower's processes, as we start them."""
