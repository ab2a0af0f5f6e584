"""Run the processes of a server: Flower's SuperLink behind access control, and our ServerApp for each run.

python -m fedvlm.deploy.flower.server superlink FOLDER HOST PORT

Requests for runs are files in the server's folder, and the ServerApp reads and writes the SuperLink's database, so the
port serves nobody but sites.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

from fedvlm.deploy.flower.access import AccessMiddleware, NewMessages, Scope, SiteKeys
from fedvlm.deploy.flower.fleet import HEARTBEAT_INTERVAL_SECONDS, deflate_message, object_ids
from fedvlm.deploy.kits import RUN_REQUEST_FILE, RUN_STATES_FILE, STOP_FILE
from fedvlm.deploy.operations.security_log import RefusalLog
from fedvlm.engines import flower as api
from fedvlm.engines.flower import import_flower
from fedvlm.errors import FedVLMError
from fedvlm.storage.files import read_json, write_json

DATABASE_FILE = "superlink.db"  # Flower's own, in the server's folder
SERVER_NODE = 1  # the SuperLink's own number among its nodes
OWNER = "fedvlm"  # of nodes and runs in Flower's database
LOOK_SECONDS = 0.1  # between looks for a request
TASK_HEARTBEAT_SECONDS = 10.0  # Flower ends a run without a heartbeat for a minute


def create_superlink(folder: Path) -> Any:
    """Create the app of Flower's SuperLink with the database of this folder; nothing guards it yet."""
    import_flower()
    os.environ["FLWR_DATABASE"] = str(folder / DATABASE_FILE)
    from flwr.superlink.main import create_app

    app = create_app()
    app.state.enable_supernode_auth = True
    return app


def guard_superlink(app: Any, folder: Path, new_messages: NewMessages) -> Any:
    """Put the app behind the access control of this folder."""
    keys, refusals = SiteKeys(folder, register_node, deactivate_node), RefusalLog(folder)
    app.add_middleware(AccessMiddleware, is_signed=keys, new_messages=new_messages, log_refusal=refusals)
    return app


def register_node(scope: Scope, key: bytes) -> None:
    """Register a node for a site's key, as Flower knows it."""
    state = scope["app"].state.linkstate_factory.state()
    if state.get_node_id_by_public_key(key) is None:
        state.create_node(OWNER, OWNER, key, HEARTBEAT_INTERVAL_SECONDS)


def deactivate_node(scope: Scope, key: bytes) -> None:
    """Deactivate the node of a revoked key at once: nobody waits for it, or sends it anything."""
    state = scope["app"].state.linkstate_factory.state()
    if (node := state.get_node_id_by_public_key(key)) is not None:
        state.deactivate_node(node)


def run_superlink(folder: Path, host: str, port: int) -> None:
    """Serve the SuperLink of a server's folder, and start the runs that are asked for."""
    from fedvlm.deploy.flower.port import serve

    app, new_messages = create_superlink(folder), NewMessages()
    guard_superlink(app, folder, new_messages)
    RunStarter(folder, app.state.linkstate_factory.state(), new_messages.announce).start()
    certificate, key = str(folder / "server.pem"), str(folder / "server.key")
    serve(app, host=host, port=port, ssl_certfile=certificate, ssl_keyfile=key, timeout_graceful_shutdown=1)


class RunStarter(Thread):
    """Start a ServerApp for each request in the folder; a process that has imported everything waits for the next."""

    def __init__(self, folder: Path, state: Any, announce: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.folder, self.state, self.announce = folder, state, announce
        self.last_request = self._requested()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}  # by request
        self.tasks: dict[str, tuple[int, int]] = {}  # Flower's numbers of a request's run and its task
        self.last_beat = 0.0
        (folder / STOP_FILE).unlink(missing_ok=True)
        write_json(folder / RUN_STATES_FILE, {})

    def run(self) -> None:
        spare: subprocess.Popen[bytes] | None = self._start_process()
        while True:
            sleep(LOOK_SECONDS)
            try:
                if (id := self._requested()) not in ("", self.last_request):
                    self._begin(id, spare)
                    spare = None
                    self.last_request = id
                self._stop_requested()
                self._end_finished()
                self._send_heartbeats()
            except Exception as error:  # such as a full disk; the next look may succeed
                sys.stderr.write(f"the server cannot look after its runs ({type(error).__name__}: {error})\n")
                sys.stderr.flush()
                sleep(1.0)
            if (spare is None and not self.processes) or (spare is not None and spare.poll() is not None):
                spare = self._start_process()

    def _requested(self) -> str:
        with suppress(FedVLMError, AttributeError):  # there is none, or it is just being written
            return str(read_json(self.folder / RUN_REQUEST_FILE).get("id", ""))
        return ""

    def _start_process(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "fedvlm.deploy.flower.server", "serverapp", str(self.folder)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=end_with_parent)

    def _begin(self, id: str, spare: "subprocess.Popen[bytes] | None") -> None:
        process = spare or self._start_process()
        run, task = create_run(self.state)
        self.processes[id], self.tasks[id] = process, (run, task)
        self._write_state(id, "running")
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(f"{id} {run} {task}\n".encode())
        Thread(target=self._announce_messages, args=[process], daemon=True).start()

    def _announce_messages(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        while process.stdout.read(1):
            self.announce()

    def _stop_requested(self) -> None:
        path = self.folder / STOP_FILE
        if path.exists():
            for id in read_json(path):
                if id in self.processes:
                    self.processes[id].terminate()
            path.unlink(missing_ok=True)

    def _end_finished(self) -> None:
        for id, process in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[id]
                self._write_state(id, "ended")
                run, task = self.tasks.pop(id)
                self.state.finish_task(task, "stopped" if process.returncode else "completed", "")
                self.state.cleanup_run(run)

    def _send_heartbeats(self) -> None:
        if monotonic() - self.last_beat > TASK_HEARTBEAT_SECONDS:
            self.last_beat = monotonic()
            for _, task in self.tasks.values():
                self.state.acknowledge_task_heartbeat(task)

    def _write_state(self, id: str, word: str) -> None:
        write_json(self.folder / RUN_STATES_FILE, {**read_json(self.folder / RUN_STATES_FILE), id: word})


def end_with_parent() -> None:
    """End this process when its parent is killed (called in a new child)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def create_run(state: Any) -> tuple[int, int]:
    """Create a run in Flower's database that is running, without an app; return its number and its task's."""
    from flwr.supercore.constant import NOOP_FEDERATION_ID

    run = state.create_run("fedvlm/fedvlm", "1.0.0", "", {}, NOOP_FEDERATION_ID, None, OWNER, "flwr-serverapp")
    task = state.get_run_info(run_ids=[run])[0].primary_task_id
    state.claim_task(task)
    state.activate_task(task)
    return run, task


def run_server_app(folder: Path) -> None:
    """Wait for a request on standard input, then carry it out as Flower's ServerApp."""
    app, state = import_flower(), create_superlink(folder).state.linkstate_factory.state()
    server_app = create_server_app(folder)
    words = sys.stdin.readline().split()
    if not words:  # the server has ended
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    id, run, task = words[0], int(words[1]), int(words[2])

    def announce() -> None:
        sys.stdout.buffer.write(b".")
        sys.stdout.buffer.flush()

    context = app.Context(run, SERVER_NODE, {}, app.RecordDict(), {"request": id})
    server_app(database_grid(state, run, task, announce), context)


def create_server_app(folder: Path) -> Any:
    from fedvlm.deploy.server.run import run_request

    app = api.ServerApp()

    def main(grid: Any, context: Any) -> None:
        run_request(grid, folder, str(context.run_config["request"]))

    app.main()(main)
    return app


def database_grid(state: Any, run: int, task: int, announce: Callable[[], None]) -> Any:
    """Create what we call of Flower's Grid over the SuperLink's database: a message is there as a whole or not."""
    app = import_flower()
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    identity = api.TaskIdentity
    identity.run_id, identity.task_id, identity.node_id = run, task, SERVER_NODE

    class DatabaseGrid:
        def __init__(self) -> None:
            self.arriving: dict[str, Any] = {}  # replies whose parts are not all there, by the request's id

        def create_message(
            self, content: Any, message_type: str, dst_node_id: int, group_id: str, ttl: Any = None
        ) -> Any:
            return app.Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

        def get_node_ids(self) -> Iterable[int]:
            return list(state.get_nodes(run))

        def push_messages(self, messages: Iterable[Any]) -> list[str | None]:
            ids = [self._push(message) for message in messages]
            announce()
            return ids

        def _push(self, message: Any) -> str | None:
            parts, tree = deflate_message(message)
            message.content = app.RecordDict()  # it travels in parts
            with state.session():
                session = state.start_session(run)
                stored, needed = state.store_message_and_object_tree(message, tree, session)
                stored = stored and all(state.store_object(run, session, id, parts[id]) for id in needed)
            return str(message.metadata.message_id) if stored else None

        def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
            awaited = set(message_ids) - self.arriving.keys()
            for reply in state.get_message_res(awaited, run) if awaited else ():
                self.arriving[reply.metadata.reply_to_message_id] = reply
                state.delete_messages({reply.metadata.reply_to_message_id})
            replies = {id: self._complete(reply) for id, reply in self.arriving.items()}
            self.arriving = {id: reply for id, reply in self.arriving.items() if replies[id] is None}
            return [reply for reply in replies.values() if reply is not None]

        def _complete(self, reply: Any) -> Any:
            """Return a reply with its content once all parts are there; what cannot be read stays empty."""
            id = reply.metadata.message_id
            try:
                tree = state.object_store.get_object_tree(id)
                parts = {name: state.get_object(run, name) for name in object_ids(tree)}
                if b"" in parts.values():
                    return None
                inflated: Any = inflate_object_from_contents(id, parts)
            except Exception:  # whatever a site has sent
                return reply
            state.object_store.delete(id)
            content = inflated.content if inflated.has_content() else None
            error = inflated.error if inflated.has_error() else None
            # Of a site's own metadata nothing counts: it could name another site's request.
            return app.Message(metadata=reply.metadata, content=content, error=error)

    return DatabaseGrid()


if __name__ == "__main__":
    if sys.argv[1] == "superlink":
        run_superlink(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        run_server_app(Path(sys.argv[2]))
