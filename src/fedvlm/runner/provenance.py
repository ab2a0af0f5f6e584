"""Which code a run was made by, and when."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """When a run was started, and by which versions of this code and of what it stands on."""
    return {
        "versions": {
            "fedvlm": version("fedvlm"),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "transformers")},
        },
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit(),
    }


def commit() -> dict[str, Any]:
    """The commit of this code and whether it was changed since; nothing if it is not a checkout."""

    def git(*words: str) -> str:
        here = Path(__file__).parents[1]
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()

    try:
        if not git("ls-files", "--", "__init__.py"):
            return {"commit": None, "dirty": None}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
