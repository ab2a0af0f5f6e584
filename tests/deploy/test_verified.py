"""Verified sums over sites: the same numbers as plain runs, and every deviation ends before anything leaves."""

import pytest

from fedvlm.deploy.statements import state_digest
from fedvlm.deploy.transcript import find_transcripts, verify_transcript
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import from_records
from fedvlm.storage.files import read_tensors
from fedvlm.tensors import max_relative_difference

METHODS = {
    "fedavg": {"name": "fedavg", "rounds": 2, "lr": 1e-2},
    "fedot": {"name": "fedot", "rounds": 2, "lr": 1e-3},
    "scaffold": {"name": "scaffold", "rounds": 2, "lr": 1e-2},
    "tofa": {"name": "tofa"},
    "ridge": {"name": "ridge"},
    "auto": {"name": "auto"},
    "zero-shot": {"name": "zero-shot"},
}
SUMS = ("tofa", "ridge", "auto")


def allow_all_methods(place):
    for name in place.desks:
        path = place.site(name) / "policy.toml"
        path.write_text(path.read_text().replace("methods = [", 'methods = ["*", '))


def channel_of(name):
    return {"verified": True, **({} if name in SUMS else {"clip": 1.0})}


def shared_of(result):
    return result.outcome("all")[0]


@pytest.mark.parametrize("name", METHODS)
def test_sites_and_server_reach_the_state_of_a_simulation(place, name):
    allow_all_methods(place)
    settings = place.settings(METHODS[name], channel=channel_of(name))
    deployed = place.run(settings)
    alone = place.alone(settings)
    assert max_relative_difference(shared_of(deployed), shared_of(alone)) < 1e-6
    rounds = deployed.manifest["identity"]["method"]["rounds"]
    for site in place.desks:  # what each site continued from is what the server has
        for path in place.site(site).glob(f"state/*/session/step-{rounds - 1}.safetensors"):
            stored, header = read_tensors(path)
            state = {key[6:]: value for key, value in stored.items() if key.startswith("state/")}
            assert header["statement"]["state"] == state_digest(state)
    [transcript] = find_transcripts(deployed.folder)
    lines = verify_transcript(transcript, {})
    assert f"{3 * (rounds + 1)} masked uploads are signed" in "\n".join(lines)


def test_curves_of_a_verified_run_are_sums_and_nothing_of_single_sites(place):
    result = place.run(place.settings(METHODS["fedavg"], channel=channel_of("fedavg")))
    line = result.rounds[0]
    assert 0 < line["accuracy"] <= 1 and 0 < line["validation"] <= 1 and line["loss"] > 0
    for client in line["clients"].values():
        assert client["validation_rows"] == client["test_rows"] == 0 and "loss" not in client
    assert "48" not in str([result.manifest.get(key) for key in ("clients", "counts", "samples")])


def overheard(place, settings):
    """All messages of a run, requests and replies."""
    grid, messages = local_grid(place.desks), []
    pull = grid.pull_messages

    def listen(ids):
        requests = {message.metadata.message_id: message for message in grid.messages}
        replies = pull(ids)
        for reply in replies:
            request = requests[reply.metadata.reply_to_message_id]
            messages.append((from_records(request.content, ""), from_records(reply.content, "")))
        return replies

    grid.pull_messages = listen
    place.run(settings, grid=grid)
    return messages


def test_only_masked_uploads_counts_and_signatures_leave_a_site(place):
    replies = [reply for _, reply in overheard(place, place.settings(METHODS["fedavg"], channel=channel_of("fedavg")))]
    kinds = [reply.header["kind"] for reply in replies]
    assert kinds == ["open"] * 3 + ["plan"] * 3 + ["counts"] * 3 + ["sum"] * 6 + ["end"] * 3
    for reply in replies:
        assert set(reply.arrays) <= {"shared/head", "text", "masked"}
        if reply.header["kind"] == "open":
            assert set(reply.header["samples"].values()) == {0}
        if reply.header["kind"] in ("plan", "counts", "sum"):
            assert reply.header.get("scores") is None
