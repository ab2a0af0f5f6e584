"""The ServerApp: fedvlm's own, whatever came with the run, for the request in its own folder."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from fedvlm.deploy.flower import put
from fedvlm.deploy.flower.gate import PASS, carry
from fedvlm.engines.flower.api import flower


def main() -> None:
    """`flwr-serverapp`, as our SuperExec calls it: the task's token comes by a pipe."""
    flower()
    carry()
    folder = Path(os.environ[PASS])

    def run(grid: Any, context: Any, **words: Any) -> Any:
        from fedvlm.deploy.server import conduct

        conduct(grid, folder)
        return context

    app = {"tool": {"flwr": {"app": {"components": {"serverapp": "fedvlm"}}}}}
    put(
        import_module("flwr.superlink.runtime.run_serverapp"),
        install_from_fab=lambda *words, **options: None,
        get_fab_metadata=lambda *words: ("fedvlm/fedvlm-app", "1.0.0"),
        get_project_dir=lambda *words: folder,
        get_project_config=lambda *words: app,
        get_fused_config_from_dir=lambda *words: {},
        run_=run,
    )
    sys.argv += ["--token", sys.stdin.read()]
    import_module("flwr.superlink.cli").flwr_serverapp()


if __name__ == "__main__":
    main()
