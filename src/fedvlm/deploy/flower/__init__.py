"""Flower's processes, as we start them."""

from typing import Any

from fedvlm.errors import SettingsError


def replace_attributes(module: Any, **replacements: Any) -> None:
    """Ours for what Flower has; another Flower than those that were tested may not have it."""
    for name, value in replacements.items():
        if not hasattr(module, name):
            raise SettingsError(f"{module.__name__} of this Flower has no {name}; pip install 'fedvlm[flower]' again")
        setattr(module, name, value)
