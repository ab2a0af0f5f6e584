"""What ends half-way between a server, a SuperNode and a site's process leaves nobody waiting."""

import signal
import sys
from importlib import import_module
from types import SimpleNamespace

import httpx
import pytest

from fedvlm.deploy import flower as deploy_flower
from fedvlm.deploy.flower import server as flower_server
from fedvlm.deploy.flower import site as flower_site
from fedvlm.deploy.site.service import describe_supernode_exit
from fedvlm.engines.flower import import_flower
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import Message, to_records

RUN = 7


class Node:
    """A SuperNode's memory, and a message of a run that it is about to fetch."""

    def __init__(self, kind):
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
        )
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supercore.run import Run

        self.store = ObjectStoreFactory().store()
        self.state = kind(self.store)
        self.state.set_node_id(1)
        self.state.store_run(Run.create_empty(RUN))
        content = to_records(Message({"kind": "round"}))
        self.message = local_grid({}).create_message(content, "train", 1, "0")
        self.message.metadata.__dict__["_run_id"] = RUN
        self.message.metadata.__dict__["_message_id"] = self.message.object_id
        self.tree = get_object_tree(self.message)
        self.parts = {id: message_part.deflate() for id, message_part in get_all_nested_objects(self.message).items()}

    def fetch(self, pull, **calls):
        return pull(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (self.message, self.tree),
            get_run=None,
            get_fab=None,
            trusted_entities=None,
            **calls,
        )

    def task(self):
        return self.state.create_task("flwr-clientapp", RUN, "")

    @property
    def replies(self):
        return self.state.get_messages_legacy(is_reply=True)


def node_state():
    import_flower()
    return import_module("flwr.supernode.nodestate.in_memory_nodestate").InMemoryNodeState


def ends(*args):
    from flwr.supercore.run import RunNotRunningException

    raise RunNotRunningException


@pytest.mark.parametrize("when", ["pull_object", "confirm_message_received"])
def test_a_run_that_ends_while_its_message_comes_in_leaves_nothing_of_it(when):
    """The site's process would wait for the rest of the message for an hour."""
    kind = node_state()
    internal = import_module("flwr.supernode.start_client_internal")
    node = Node(kind)
    calls = {
        "pull_object": lambda run, id: node.parts[id],
        "confirm_message_received": lambda run, id: None,
    }
    pull = flower_site.handle_ended_run(internal._pull_and_store_message)
    assert node.fetch(pull, **{**calls, when: ends}) is None
    assert node.state.get_messages_legacy(run_ids=[RUN]) == []
    assert [task.status.status for task in node.state.get_tasks()] == ["finished"]
    assert node.store.get(node.message.object_id) is None


@pytest.mark.parametrize("has_started", [True, False])
def test_a_task_that_fails_without_an_answer_is_answered_by_its_supernode(has_started):
    """Flower's SuperNode asks for nothing else before it has an answer."""
    node = Node(flower_site.answering_state(node_state()))
    node.state.store_message(node.message)
    id = node.task()
    if has_started:
        node.state.get_messages_legacy(run_ids=[RUN], is_reply=False)
    assert node.state.finish_task(id, "failed", "it cannot be read")
    [reply] = node.replies
    assert reply.has_error() and reply.metadata.reply_to_message_id == node.message.object_id


def test_a_task_that_was_answered_is_not_answered_again():
    from flwr.app import Error, Message

    node = Node(flower_site.answering_state(node_state()))
    node.state.store_message(node.message)
    id = node.task()
    site_reply = Message(Error(0, "said by the site"), reply_to=node.message)
    site_reply.metadata.__dict__["_message_id"] = site_reply.object_id
    node.state.store_message(site_reply)
    assert node.state.finish_task(id, "failed", "the app failed")
    assert [reply.error.reason for reply in node.replies] == ["said by the site"]


def test_an_answer_that_never_comes_in_whole_does_not_keep_a_supernode(monkeypatch):
    """Its process failed between the announcement of its parts and the parts."""
    from flwr.app import Error, Message
    from flwr.supercore.inflatable.inflatable_object import get_object_tree

    kind = node_state()
    memory = import_module("flwr.supercore.object_store.in_memory_object_store")
    internal = import_module("flwr.supernode.start_client_internal")
    node = Node(kind)
    store = flower_site.bounded_store(memory.InMemoryObjectStore)()
    reply = Message(Error(0, "said by the site"), reply_to=node.message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    node.state.store_message(reply)
    store.preregister(RUN, get_object_tree(reply))
    monkeypatch.setattr(flower_site, "REPLY_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(internal, "time", SimpleNamespace(sleep=lambda seconds: None))
    internal._push_messages(
        node.state,
        store,
        send=lambda message, tree, took: ({reply.object_id}, "session"),
        push_object=lambda *words: pytest.fail("there is nothing to send"),
    )
    assert node.state.get_messages_legacy() == [] and store.get(reply.object_id) is None


@pytest.mark.parametrize("status", [401, 403])
def test_a_task_that_is_no_more_does_not_end_the_process_that_took_it(monkeypatch, status):
    """Flower takes it for the end of its process, which lives for one task; ours has others."""
    import_flower()
    monkeypatch.setattr(signal, "raise_signal", lambda number: pytest.fail("a signal"))
    monkeypatch.setattr("os.kill", lambda pid, number: pytest.fail("a signal"))
    calls = []

    def answer(request):
        calls.append(request.url.path)
        return httpx.Response(status, json={"detail": "no"})

    real = httpx.Client
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "Client", lambda **options: real(transport=transport))
    spec = SimpleNamespace(runtime_api_address="127.0.0.1:9", insecure=True, token="x")
    with pytest.raises(httpx.HTTPStatusError):
        flower_site.run_assigned_task(lambda message, context: pytest.fail("no message"), spec)
    assert len(set(calls)) >= 2  # the input was asked for, and its end was told


def test_nobody_outlives_the_superexec_that_does_the_work(monkeypatch, capfd):
    """Neither a SuperNode nor a SuperLink, which would take messages and runs and leave them."""
    monkeypatch.setattr(deploy_flower, "SHUTDOWN_SECONDS", 0.0)
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    child = deploy_flower.LinkedSubprocess().Popen([sys.executable, "-c", "raise SystemExit(3)"])
    child.watch.join(60)
    assert ended == [1]
    stderr = capfd.readouterr().err
    assert deploy_flower.SUPEREXEC_ENDED in stderr and "3" in stderr
    check_refusal(stderr, "", deploy_flower.SUPEREXEC_ENDED)


def check_refusal(output, killed, reason):
    node = SimpleNamespace(tail=lambda: output, killed=killed)
    error = describe_supernode_exit(SimpleNamespace(name="art", address="x"), node)
    assert f"stopped: {reason}; start it again" in error and "its key" not in error


def test_a_supernode_that_was_killed_or_lost_its_server_is_not_taken_for_one_that_is_refused():
    check_refusal("", "SIGKILL", "its SuperNode was ended by SIGKILL")
    check_refusal(f"an error\n{flower_site.CONNECTION_LOST}\n", "", flower_site.CONNECTION_LOST)


def test_a_superlink_starts_its_superexec_as_its_kin(monkeypatch, tmp_path):
    import_flower()
    started = []
    monkeypatch.setattr(deploy_flower.LinkedSubprocess, "Popen", lambda command, env: started.append(command))
    monkeypatch.setattr(flower_server, "install_middleware", lambda folder: None)
    monkeypatch.setattr("flwr.superlink.cli.flower_superlink", lambda: None)
    monkeypatch.setattr(sys, "argv", ["superlink", str(tmp_path), "127.0.0.1", "8443"])
    flower_server.run_superlink()
    assert [command[2:4] for command in started] == [["fedvlm.deploy.flower.server", "superexec"]]
