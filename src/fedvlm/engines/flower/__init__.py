"""Import Flower late and list every name of it that fedvlm uses, public and internal.

tests/engines/flower/test_api.py reports which name a new version of Flower has changed. Only this module and
`deploy/flower` import flwr.
"""

import os
from importlib import import_module
from typing import Any

from fedvlm.errors import SettingsError

# Flower reports its use and looks for updates unless told not to, before it is first imported.
QUIET_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
PUBLIC_NAMES = {  # `api.NAME` is that of this module of Flower
    "ClientApp": "flwr.clientapp",
    "Grid": "flwr.serverapp",
    "TaskIdentity": "flwr.supercore.task_identity",
}
INTERNAL_NAMES = (  # what deploy/flower calls or replaces, module and name
    ("flwr.cli.app", "app"),
    ("flwr.clientapp", "ClientApp"),
    ("flwr.common.constant", "HEARTBEAT_DEFAULT_INTERVAL"),
    ("flwr.common.constant", "NOOP_ACCOUNT_NAME"),
    ("flwr.common.constant", "NOOP_FLWR_AID"),
    ("flwr.common.constant", "ErrorCode.CLIENT_APP_RAISED_EXCEPTION"),
    ("flwr.common.constant", "SubStatus.COMPLETED"),
    ("flwr.common.constant", "SubStatus.FAILED"),
    ("flwr.proto.fleet_pb2", "DeactivateNodeRequest"),
    ("flwr.proto.runtime_pb2", "SendTaskHeartbeatRequest"),
    ("flwr.supercore", "telemetry"),
    ("flwr.supercore.cli", "flower_superexec"),
    ("flwr.supercore.constant", "TaskType"),
    ("flwr.supercore.heartbeat", "HeartbeatSender"),
    ("flwr.supercore.interceptors", "RuntimeTokenHttpInterceptor"),
    ("flwr.supercore.interceptors", "RuntimeVersionHttpInterceptor"),
    ("flwr.supercore.object_store.object_store_factory", "InMemoryObjectStore.get"),
    ("flwr.supercore.protobuf.client", "ProtobufClient._send"),
    ("flwr.supercore.retry", "exponential"),
    ("flwr.supercore.retry", "make_simple_http_retry_invoker"),
    ("flwr.supercore.run", "RunNotRunningException"),
    ("flwr.supercore.runtime", "RuntimeHttpClient.from_server_address"),
    ("flwr.supercore.superexec.executor", "LaunchResult.accepted"),
    ("flwr.supercore.superexec.executor", "LaunchResult.failed"),
    ("flwr.supercore.superexec.executor.subprocess_executor", "SubprocessExecutor.launch"),
    ("flwr.supercore.superexec.run_superexec", "AutoExecPlugin.supported_task_types"),
    ("flwr.supercore.superexec.run_superexec", "make_simple_http_retry_invoker"),
    ("flwr.superlink.cli", "flower_superlink"),
    ("flwr.superlink.cli", "flwr_serverapp"),
    ("flwr.superlink.cli.flower_superlink", "uvicorn.run"),
    ("flwr.superlink.extensions", "get_middleware"),
    ("flwr.superlink.grid.http_grid", "make_simple_http_retry_invoker"),
    ("flwr.superlink.grid.http_grid", "pull_objects"),
    ("flwr.superlink.runtime.run_serverapp", "get_fab_metadata"),
    ("flwr.superlink.runtime.run_serverapp", "get_fused_config_from_dir"),
    ("flwr.superlink.runtime.run_serverapp", "get_project_config"),
    ("flwr.superlink.runtime.run_serverapp", "get_project_dir"),
    ("flwr.superlink.runtime.run_serverapp", "install_from_fab"),
    ("flwr.superlink.runtime.run_serverapp", "run_"),
    ("flwr.supernode.cli", "flower_supernode"),
    ("flwr.supernode.fleet_http_connection", "FleetHttpClient.ActivateNode"),
    ("flwr.supernode.fleet_http_connection", "FleetHttpClient.DeactivateNode"),
    ("flwr.supernode.fleet_http_connection", "HeartbeatSender"),
    ("flwr.supernode.fleet_http_connection", "make_simple_http_retry_invoker"),
    ("flwr.supernode.main", "create_app"),
    ("flwr.supernode.runtime.run_clientapp", "pull_task_input"),
    ("flwr.supernode.runtime.run_clientapp", "push_message"),
    ("flwr.supernode.runtime.run_clientapp", "push_task_output"),
    ("flwr.supernode.nodestate.in_memory_nodestate", "CLIENT_APP_CRASHED_ERROR"),
    ("flwr.supernode.nodestate.nodestate_factory", "InMemoryNodeState.finish_task"),
    ("flwr.supernode.start_client_internal", "_pull_and_store_message"),
    ("flwr.supernode.start_client_internal", "subprocess"),
    ("flwr.supernode.start_client_internal", "time"),
)


def import_flower() -> Any:
    """Import Flower's message types, late and without telemetry."""
    os.environ.update(QUIET_ENVIRONMENT)
    try:
        import flwr.app
    except ImportError as error:
        raise SettingsError(f"Flower cannot be imported ({error}); pip install 'fedvlm[flower]'") from error
    from flwr.supercore import telemetry

    if telemetry.FLWR_TELEMETRY_ENABLED != "0":
        raise SettingsError(
            "Flower was imported with telemetry on, before fedvlm could turn it off; set FLWR_TELEMETRY_ENABLED=0 "
            "before importing flwr"
        )
    return flwr.app


def __getattr__(name: str) -> Any:
    if name not in PUBLIC_NAMES:
        raise AttributeError(f"fedvlm does not use {name!r} of Flower")
    import_flower()
    return getattr(import_module(PUBLIC_NAMES[name]), name)
