"""One file per method; importing this package registers them all."""

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(module_info.name for module_info in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
