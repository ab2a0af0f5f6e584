"""Run experiments between machines: identity, messages, server, sites and operations."""

from fedvlm.errors import SettingsError

try:
    import cryptography  # noqa: F401
    import httpx  # noqa: F401
    import pydantic  # noqa: F401
except ImportError as error:
    raise SettingsError(f"a deployment needs the package {error.name}; pip install 'fedvlm[flower]'") from error
