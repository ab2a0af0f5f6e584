"""One file per method; importing this package registers them all."""

import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from fedvlm import core

for _module in sorted(module_info.name for module_info in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")


class _CallablePackage(ModuleType):
    """Importing this package hides the function `fedvlm.methods`, so a call of the package is a call of that."""

    def __call__(self) -> dict[str, type[core.Method]]:
        return core.methods()


sys.modules[__name__].__class__ = _CallablePackage
