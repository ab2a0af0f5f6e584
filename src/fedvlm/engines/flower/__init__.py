"""The engine on Flower: the same verbs, as messages."""
