"""Plugins: registries that other packages add to through entry points, and scripts by their path."""

import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar
from warnings import warn

from fedvlm.errors import FedVLMError, OutsideWarning, SettingsError, suggest_path

E = TypeVar("E")
_LOADED: set[str] = set()  # entry-point groups that were searched
_LOADING = RLock()


def load_outside(group: str) -> None:
    """Import the modules that other packages name in an entry-point group; they register themselves.

    Once per process. What cannot be loaded is warned of in a line, and the others are loaded.
    """
    with _LOADING:
        if group in _LOADED:
            return
        _LOADED.add(group)  # before loading, because a plugin may ask for the list itself
        for point in entry_points(group=group):
            try:
                point.load()
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                warn(
                    f"the entry point {point.name} = {point.value} of group {group} cannot be "
                    f"loaded and is left out ({reason}); repair or uninstall it",
                    OutsideWarning,
                    stacklevel=2,
                )


def import_file(path: Path) -> None:
    """Execute a Python file of the user's own, which registers methods or other parts."""
    if not path.is_file() or path.suffix != ".py":
        raise SettingsError(f"--import {path}: there is no such Python file; {suggest_path(path)}name a .py file")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = module_from_spec(spec)
    if path.stem in sys.modules:
        raise SettingsError(f"--import {path}: a module {path.stem!r} is loaded already; rename the file")
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except SettingsError as error:
        raise SettingsError(f"--import {path}: {error}") from error
    except Exception as error:
        raise SettingsError(f"--import {path} failed with {type(error).__name__}: {error}; correct the file") from error


def require(module: str, need: str, extra: str, kind: type[FedVLMError] = SettingsError) -> Any:
    """Import an optional package; `need` says what it is needed for, and `extra` installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise kind(f"{need}; pip install 'fedvlm[{extra}]'") from error


def add_entry(table: dict[str, E], kind: str, name: str, entry: E) -> None:
    """Add an entry to a registry under a unique name."""
    if not name or not name.isprintable() or ":" in name:
        raise SettingsError(f"{kind} {name!r}: a name is one printable line without a colon; choose another")
    if name in table and table[name] != entry and not _is_redefinition(table[name], entry):
        raise SettingsError(f"{kind} {name!r}: the name is taken; choose another")
    table[name] = entry


def _is_redefinition(registered: object, entry: object) -> bool:
    """Tell whether it is the same class or function again, as when a notebook cell is run twice."""
    return qualified_name(registered) == qualified_name(entry) and "<" not in qualified_name(entry)[1]


def qualified_name(entry: object) -> tuple[str, str]:
    return entry.__module__, getattr(entry, "__qualname__", "<")
