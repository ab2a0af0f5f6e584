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
PUBLIC_NAMES = {"ClientApp": "flwr.clientapp", "ServerApp": "flwr.serverapp"}  # `api.NAME` is that of this module
INTERNAL_NAMES = {  # (module, name) that deploy/flower calls, and why; none is replaced
    ("flwr.common.serde", "message_to_proto"): "writes the header of a site's reply",
    ("flwr.proto", "fleet_pb2"): "connects a site, asks for requests and sends replies",
    ("flwr.proto", "heartbeat_pb2"): "keeps a site online",
    ("flwr.proto", "message_pb2"): "carries the parts of requests and replies",
    ("flwr.supercore", "telemetry"): "shows whether Flower would report its use",
    ("flwr.supercore.constant", "NOOP_FEDERATION_ID"): "names the one federation of a SuperLink in its database",
    ("flwr.supercore.inflatable.inflatable_object", "get_all_nested_objects"): "takes a message apart",
    ("flwr.supercore.inflatable.inflatable_object", "get_object_tree"): "lists the parts of a message",
    ("flwr.supercore.inflatable.inflatable_utils", "inflate_object_from_contents"): "puts a message together",
    ("flwr.supercore.task_identity", "TaskIdentity"): "says whose message it is that the server creates",
    ("flwr.superlink.main", "create_app"): "is the SuperLink with its database, whose state our grid reads and writes",
}
STATE_METHODS = (  # of the SuperLink's state that the server calls
    *("acknowledge_task_heartbeat", "activate_task", "claim_task", "cleanup_run", "create_node", "create_run"),
    *("deactivate_node", "delete_messages", "finish_task", "get_message_res", "get_node_id_by_public_key"),
    *("get_nodes", "get_object", "get_run_info", "object_store", "session", "start_session"),
    *("store_message_and_object_tree", "store_object"),
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
    modules = PUBLIC_NAMES | {"TaskIdentity": "flwr.supercore.task_identity"}
    if name not in modules:
        raise AttributeError(f"fedvlm does not use {name!r} of Flower")
    import_flower()
    return getattr(import_module(modules[name]), name)
