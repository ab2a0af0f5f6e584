"""The ServerApp: fedvlm's own, whatever came with the run, for the request in its own folder."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from fedvlm.deploy.flower import replace_attributes
from fedvlm.deploy.flower.gate import TOKEN_FOLDER_VARIABLE, attach_token
from fedvlm.deploy.flower.kin import make_retrying
from fedvlm.engines.flower.api import import_flower

PULL_INTERVAL_SECONDS = 0.2  # seconds between looks for the rest of a reply, which is on this machine if it came


def limit_pull_time(pull: Callable[..., Any], grid: Any) -> Callable[..., Any]:
    """Half a reply is waited for as long as the whole one is: Flower waits for its rest for minutes
    after its site was killed, and for hours if the site sends a little now and then."""

    def pulled(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> Any:
        return pull(
            object_ids,
            pull_object_fn,
            max_time=max(getattr(grid, "until", inf) - monotonic(), 0.0),
            max_tries_per_object=None,
            initial_backoff=PULL_INTERVAL_SECONDS,
            backoff_cap=PULL_INTERVAL_SECONDS,
        )

    return pulled


def main() -> None:
    """`flwr-serverapp`, as our SuperExec calls it: the task's token comes by a pipe."""
    import_flower()
    attach_token()
    folder = Path(os.environ[TOKEN_FOLDER_VARIABLE])
    over_http: Any = import_module("flwr.superlink.grid.http_grid")
    again = make_retrying(over_http.make_simple_http_retry_invoker, retry_server_errors=False)
    replace_attributes(over_http, make_simple_http_retry_invoker=again)

    def run(grid: Any, context: Any, **words: Any) -> Any:
        from fedvlm.deploy.server import run_request

        replace_attributes(over_http, pull_objects=limit_pull_time(over_http.pull_objects, grid))
        run_request(grid, folder, str(context.run_config.get("request", "")))
        return context

    app = {"tool": {"flwr": {"app": {"components": {"serverapp": "fedvlm"}}}}}
    replace_attributes(
        import_module("flwr.superlink.runtime.run_serverapp"),
        install_from_fab=lambda *words, **options: None,
        get_fab_metadata=lambda *words: ("fedvlm/fedvlm-app", "1.0.0"),
        get_project_dir=lambda *words: folder,
        get_project_config=lambda *words: app,
        get_fused_config_from_dir=lambda place, config: config,
        run_=run,
    )
    sys.argv += ["--token", sys.stdin.read()]
    import_module("flwr.superlink.cli").flwr_serverapp()


if __name__ == "__main__":
    main()
