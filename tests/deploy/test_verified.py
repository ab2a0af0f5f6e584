"""Verified sums over sites: the same numbers as plain runs, and every deviation ends before anything leaves."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.deploy.identity.certificates import read_own_certificate
from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.plan import hash_tensors
from fedvlm.deploy.server.run import choose_mode, join_late
from fedvlm.deploy.site.peers import add_peer, read_peers
from fedvlm.deploy.statements import EndStatement
from fedvlm.deploy.transcript import Transcript, find_transcripts, verify_transcript
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import from_records
from fedvlm.errors import DataError, FederationError, SettingsError
from fedvlm.storage.files import read_tensors, write_tensors
from fedvlm.tensors import max_relative_difference
from tests.deploy.conftest import CLASSES

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
            assert header["statement"]["state"] == hash_tensors(state)
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


def test_a_run_asks_for_verified_sums_unless_somebody_decided_otherwise(place):
    kit = replace(place.kit, plain=False)
    chosen = choose_mode(kit, place.settings({"name": "auto"}))
    assert chosen.channel.verified and chosen.method.name == "auto"
    noisy = place.settings(METHODS["fedavg"], channel={"clip": 1.0, "noise_multiplier": 1.0})
    assert choose_mode(kit, noisy) == noisy
    assert choose_mode(place.kit, place.settings(METHODS["fedavg"])) == place.settings(METHODS["fedavg"])
    for method, sites, reason in (
        ("fens", 3, "aggregates single uploads"),
        ("fedavg", 3, "set channel.clip"),
        ("auto", 2, "at least 3 sites, got 2"),
    ):
        with pytest.raises(SettingsError, match=f"{reason}(.|\n)*can recover most .*plain = true"):
            choose_mode(replace(kit, sites=kit.sites[:sites]), place.settings({"name": method}))


def test_a_plain_run_says_what_the_server_could_learn(place):
    plain = place.run(place.settings(METHODS["fedavg"]))
    assert any("can recover most of a site's training embeddings" in note for note in plain.manifest["notes"])


def test_a_tampered_transcript_is_found(place, tmp_path):
    result = place.run(place.settings(METHODS["fedavg"], channel=channel_of("fedavg")))
    [transcript] = find_transcripts(result.folder)
    lines = verify_transcript(transcript, read_peers(place.site("art")))
    assert sum("(not compared)" in line for line in lines) == 1  # art itself is not its own peer
    for number, (file, tamper) in enumerate(
        {
            "plan.json": lambda data: data.replace(b'"seed":0', b'"seed":1'),
            "agreements.json": lambda data: data.replace(b'"data": "', b'"data": "0'),
            "sum-0.safetensors": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            "end.safetensors": None,
            "sum-1.safetensors": None,
        }.items()
    ):
        folder = tmp_path / f"copy-{number}"
        shutil.copytree(transcript.folder, folder)
        path = folder / file
        if tamper is not None:
            path.write_bytes(tamper(path.read_bytes()))
        elif file == "end.safetensors":  # a whole file of its own checksum, with another state
            state, header = read_tensors(path)
            write_tensors(path, {key: value + 1e-3 for key, value in state.items()}, header)
        else:  # an upload of the round before, in place of this one
            flat, header = read_tensors(path)
            first, _ = read_tensors(folder / "sum-0.safetensors")
            write_tensors(path, {**flat, "upload/photo": first["upload/photo"]}, header)
        with pytest.raises(DataError, match=re.escape(str(folder))):
            verify_transcript(Transcript(folder), {})
    stranger = {"photo": replace(read_peers(place.site("art"))["photo"], fingerprint="0000 " * 5 + "0000")}
    with pytest.raises(DataError, match="the key of photo is not the one that init compared"):
        verify_transcript(transcript, stranger)


def test_peers_are_added_compared_renewed_and_removed(place):
    folder, runner = place.site("art"), CliRunner()

    def call(*words):
        done = runner.invoke(app, ["deploy", "peers", str(folder), *words])
        return done.exit_code, " ".join((done.output + str(done.exception or "")).split())

    photo = read_own_certificate(place.site("photo")).fingerprint
    assert photo in call()[1] and "read it out to the others" in call()[1]
    assert call("--fingerprint", photo.upper()) == (0, "this is the fingerprint of photo")
    assert call("--fingerprint", "0" * 24)[0] == 1
    assert "photo is no longer a peer" in call("--remove", "photo")[1]
    assert photo not in call()[1]
    assert "nobody is named" in call("--add", "photo", "--fingerprint", photo)[1]
    assert "24 hexadecimal digits" in call("--add", "photo", "--fingerprint", "abc", "--by", "A. Person")[1]
    assert "compared by A. Person" in call("--add", "photo", "--fingerprint", photo, "--by", "A. Person")[1]
    other = ["--add", "photo", "--fingerprint", "0" * 24, "--by", "B. Person"]
    assert "--renew" in call(*other)[1]
    assert "compared by B. Person" in call(*other, "--renew")[1]


def test_a_late_site_takes_a_state_that_enough_compared_peers_have_signed(place):
    settings = place.settings(METHODS["fedavg"], channel=channel_of("fedavg"))
    result = place.run(settings, "kits/server/runs/one")
    folder = place.site("art")

    def join():
        log_event = EventLog(place.kit.folder)
        return join_late(local_grid(place.desks), place.kit, place.kit.folder / "runs" / "one", "art", log_event)

    with pytest.raises(FederationError, match="a verified sum must have at least 3 members"):
        join()  # two of its peers have signed
    add_peer(folder, "art", read_own_certificate(folder).fingerprint, "A. Person")  # stands for a third
    assert join()["0-all"]["test_rows"] > 0
    [transcript] = find_transcripts(result.folder)
    entries, state = transcript.read_end()
    transcript.write_end({entry["member"]: EndStatement(**entry) for entry in entries}, {"head": state["head"] + 1e-3})
    with pytest.raises(FederationError, match="the training failed there"):
        join()
    assert "the members have not signed this state" in (folder / "events.jsonl").read_text()


def sum_settings(place, classes=CLASSES):
    method = {"name": "ridge", "ridge": 1e-3, "class_prior": False}
    return place.settings(method, channel={"verified": True}, source={"classes": list(classes)})


def art(place, keep, n_classes=4):
    """Give the site art some of its samples, in a store of the first classes."""
    keep = np.isin(np.arange(len(place.rows.labels)), keep)
    place.change("art", keep, classes=np.array(CLASSES[:n_classes]), text=place.rows.text[:n_classes].numpy())


def test_a_small_change_shows_whatever_order_the_server_gives_the_classes(place):
    allow_all_methods(place)
    place.run(sum_settings(place), "first")
    own = np.flatnonzero(place.rows.domains == "art")
    art(place, own[1:])
    with pytest.raises(FederationError, match="1 samples of a class have changed since"):
        place.run(sum_settings(place, CLASSES[::-1]), "again")


def test_a_small_change_shows_against_every_earlier_sum_and_not_only_the_last(place):
    allow_all_methods(place)
    own = np.flatnonzero(place.rows.domains == "art")
    ants = own[place.rows.labels[own] == 0]
    rest = np.setdiff1d(own, ants)
    for name, kept in (("first", own), ("second", np.union1d(rest, ants[17:]))):
        art(place, kept)
        place.run(sum_settings(place), name)
    art(place, np.union1d(rest, ants[1:]))
    with pytest.raises(FederationError, match="1 samples of a class have changed since"):
        place.run(sum_settings(place), "third")


def test_a_federation_grows_by_a_class_as_if_it_had_it_from_the_start(place):
    allow_all_methods(place)
    for name in place.desks:
        keep = (place.rows.labels < 3) & (place.rows.domains == name)
        place.change(name, keep, classes=np.array(CLASSES[:3]), text=place.rows.text[:3].numpy())
    place.run(sum_settings(place, CLASSES[:3]), "three")
    for name in place.desks:
        place.change(name)
    grown = place.run(sum_settings(place), "four")
    assert max_relative_difference(shared_of(grown), shared_of(place.alone(sum_settings(place)))) < 1e-6
