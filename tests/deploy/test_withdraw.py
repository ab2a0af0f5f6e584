"""A site that leaves: it answers no more, and plain sums are as if it had never been there."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedvlm.channel import compare
from fedvlm.cli import app
from fedvlm.deploy import withdrawn
from fedvlm.deploy.admission import accept, admit, join_request, read_request
from fedvlm.deploy.explain import example
from fedvlm.deploy.forget import forget
from fedvlm.deploy.keys import Signer
from fedvlm.deploy.kits import read_server, read_site
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.policy import ANY
from fedvlm.deploy.site import Site
from fedvlm.deploy.withdrawn import FILE, PREFIX, withdraw
from fedvlm.engines.flower.wire import Parcel, from_bytes, to_bytes
from fedvlm.errors import DataError, FedVLMError, SettingsError
from fedvlm.record import Record
from fedvlm.storage.sealed import check_index, read_json
from fedvlm.tensors import difference

TOFA = {"name": "tofa"}
RUN = "kits/server/runs/one"


@pytest.fixture(autouse=True)
def open_to_all(place):
    """Policies that let every method and small classes through."""
    for name in place.desks:
        text = example((ANY,)).replace("min_class_samples = 16", "min_class_samples = 1")
        (place.site(name) / "policy.toml").write_text(text)


def shared(place, out=RUN):
    return Record(place.folder / out).outcome("all")[0]


def leave(place, name="photo", records=()):
    return forget(place.kit, withdraw(place.site(name), "A. Person"), records)


def without(place, settings, name="photo", out="without"):
    """The same run among the others, from the start."""
    desks = dict(place.desks)
    place.desks.pop(name)
    place.kit = replace(place.kit, sites=tuple(place.desks))
    place.run(settings, out)
    place.desks, place.kit = desks, read_server(place.kit.folder)
    return shared(place, out)


@pytest.mark.parametrize(
    "method",
    [TOFA, {**TOFA, "text": False}, {**TOFA, "min_class_clients": 2, "rounds": 2}],
    ids=["one exchange", "statistics alone", "an exchange that counts before"],
)
def test_what_is_shared_after_a_withdrawal_is_that_of_a_run_without_the_site(place, method):
    settings = place.settings(method, allow_small=True)
    before = place.run(settings, RUN)
    there = shared(place)
    want = without(place, settings)
    assert difference(there, want) > 1e-3
    site, [said] = leave(place)
    assert site == "photo" and said.done, said
    assert difference(shared(place), want) < 1e-6
    told = read_json(before.folder / "trainings" / "0-all.json")
    assert told["withdrawn"] == ["photo"]
    check_index(before.folder)


def test_a_second_site_withdraws_from_what_the_first_has_left(place):
    settings = place.settings(TOFA, allow_small=True)
    place.run(settings, RUN)
    leave(place, "photo")
    place.desks.pop("photo")
    want = without(place, settings, "art")
    _, [said] = leave(place, "art")
    assert said.done and difference(shared(place), want) < 1e-6


def test_both_ledgers_say_so_and_the_site_is_out_of_later_rounds(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    leave(place)
    out = [one for one in Ledger(place.site("photo")).read().lines if one["kind"] == "withdrawal"]
    came = Ledger(place.kit.folder).read()
    assert [one["by"] for one in out] == ["A. Person"] and out[0]["bytes"] > 0
    assert [one["content"] for one in came.lines] == [one["content"] for one in out]
    assert [(one["site"], one["what"]) for one in came.lines] == [("photo", "taken out")]
    later = place.run(place.settings({"name": "fedavg", "rounds": 1}, allow_small=True), "later")
    assert "its key was revoked" in later.rounds[0]["missing"]["photo"]


def test_a_site_that_has_withdrawn_answers_nothing_even_before_its_server_knows(place):
    withdraw(place.site("photo"), "A. Person")
    rounds = place.run().rounds
    assert all("this site has withdrawn" in one["missing"]["photo"] for one in rounds)


def test_a_site_comes_back_by_a_new_key(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    leave(place)
    folder = place.site("photo")
    request = read_request(place.kit, join_request(folder).path)
    accept(folder, admit(place.kit, request))
    place.desks["photo"] = Site(read_site(folder))
    place.kit = read_server(place.kit.folder)
    assert "photo" in place.run(out="later").rounds[0]["clients"]


REASONS = {
    "trained": ({"name": "fedavg", "rounds": 2}, {}, "trained or averaged"),
    "noise_multiplier": ({**TOFA, "noise_multiplier": 1.0}, {}, "the uploads had noise"),
    "robust": (TOFA, {"aggregation": "median"}, "a robust rule"),
    "secure": ({"name": "fedavg", "rounds": 1}, {"clip": 0.5, "secure": True}, "trained"),
    "followed": (
        {**TOFA, "min_class_clients": 3, "rounds": 2},
        {},
        "answered round 2 to what it had",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_only_a_new_run_forgets(place, case):
    method, channel, why = REASONS[case]
    place.run(place.settings(method, allow_small=True, channel=channel), RUN)
    before = shared(place)
    _, [said] = leave(place)
    assert not said.done and why in said.why and "only a new run forgets it" in str(said)
    assert difference(shared(place), before) == 0
    assert place.kit.folder.joinpath("sites", "photo.json").exists() is False


def test_a_bound_that_bit_is_not_undone(place, monkeypatch):
    monkeypatch.setattr(compare, "LONGEST", 1.0)
    place.run(place.settings(TOFA, allow_small=True), RUN)
    _, [said] = leave(place)
    assert not said.done and "the bound on changes was at work" in said.why


def test_a_masked_upload_is_not_sent_again(place):
    """What only a sum was to show would else be shown by leaving."""
    channel = {"clip": 0.5, "secure": True}
    place.run(
        place.settings({"name": "fedavg", "rounds": 1}, allow_small=True, channel=channel), RUN
    )
    assert from_bytes(withdraw(place.site("photo"), "A. Person").read_bytes()).arrays == {}


def signed(place, by, file, **changes):
    """The file once more, changed and signed by another site or the same."""
    parcel = from_bytes(file.read_bytes())
    words = {key: one for key, one in parcel.about.items() if key not in ("checksum", "signature")}
    values = {
        key: changes.get("values", lambda one: one)(one) for key, one in parcel.arrays.items()
    }
    about = {**words, **changes.get("about", {})}
    prefix = changes.get("prefix", PREFIX)
    sign = Signer(place.site(by) / "key", prefix)
    file.write_bytes(to_bytes(sign(Parcel(about, values))))
    return file


LIES = {
    "what it never sent": ("photo", {"values": lambda one: one + 1}, "not what was accepted"),
    "nothing of the kind": ("photo", {"values": lambda one: one[:0]}, "not what was accepted"),
    "another's": ("art", {}, "not signed"),
    "another's upload": ("art", {"about": {"client": "art"}}, "not what was accepted"),
    "a reply's signature": ("photo", {"prefix": b"fedvlm parcel\n"}, "not signed"),
    "another federation's": ("photo", {"about": {"federation": "ab" * 32}}, "another federation"),
    "a site that is none": ("photo", {"about": {"client": "nobody"}}, "no certificate"),
    "odd words": ("photo", {"about": {"client": 7}}, "no withdrawal"),
    "odd uploads": ("photo", {"about": {"uploads": [["0" * 24]]}}, "no withdrawal"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_takes_nothing_out(place, lie):
    by, changes, why = LIES[lie]
    place.run(place.settings(TOFA, allow_small=True), RUN)
    before = shared(place)
    file = signed(place, by, withdraw(place.site("photo"), "A. Person"), **changes)
    with pytest.raises(FedVLMError, match=why):
        forget(place.kit, file)
    assert difference(shared(place), before) == 0
    assert sorted(one.stem for one in (place.kit.folder / "sites").iterdir()) == sorted(place.desks)


def test_a_damaged_file_takes_nothing_out(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    file = withdraw(place.site("photo"), "A. Person")
    data = file.read_bytes()
    for bad in (b"", data[:-4], data[:200], b"x" * 100, data[:-1] + bytes([data[-1] ^ 1])):
        file.write_bytes(bad)
        with pytest.raises(FedVLMError):
            forget(place.kit, file)
    with pytest.raises(DataError, match="cannot be read"):
        forget(place.kit, file.with_name("none"))


def test_a_withdrawal_counts_once(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    leave(place)
    once = shared(place)
    with pytest.raises(SettingsError, match="its key was revoked"):
        forget(place.kit, place.site("photo") / FILE)
    assert difference(shared(place), once) == 0


def test_one_that_a_crash_cut_short_is_carried_out_again_to_the_same(place, monkeypatch):
    place.run(place.settings(TOFA, allow_small=True), RUN)

    def crash(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedvlm.deploy.forget.revoke", crash)
    with pytest.raises(KeyboardInterrupt):
        leave(place)
    once = shared(place)
    monkeypatch.undo()
    site, said = forget(place.kit, place.site("photo") / FILE)
    assert site == "photo" and said == [] and difference(shared(place), once) == 0


def test_a_withdrawal_waits_for_a_run_that_is_going_on(place):
    result = place.run(place.settings(TOFA, allow_small=True), RUN)
    file = withdraw(place.site("photo"), "A. Person")
    with Record(result.folder).lock(), pytest.raises(FedVLMError, match="another process is"):
        forget(place.kit, file)
    assert (place.kit.folder / "sites" / "photo.json").exists()


def test_a_run_that_is_not_finished_says_so(place, monkeypatch):
    monkeypatch.setattr("fedvlm.runner.training.finish", stop)
    with pytest.raises(KeyboardInterrupt):
        place.run(place.settings(TOFA, allow_small=True), RUN)
    _, [said] = leave(place)
    assert not said.done and "not finished" in said.why


def stop(*words):
    raise KeyboardInterrupt


def test_the_note_of_a_withdrawal_cannot_be_unwritten_by_damage(place):
    withdraw(place.site("photo"), "A. Person")
    (place.site("photo") / withdrawn.NOTE).write_text("{")
    assert "this site has withdrawn" in place.run().rounds[0]["missing"]["photo"]


def test_the_command_at_the_site_and_at_the_server(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    go = CliRunner()
    folder = str(place.site("photo"))
    assert "nobody is named" in str(go.invoke(app, ["deploy", "withdraw", folder]).exception)
    told = go.invoke(app, ["deploy", "withdraw", folder, "--by", "A. Person"]).output
    assert "answers no more" in told and FILE in told
    done = go.invoke(app, ["deploy", "withdraw", str(place.kit.folder), f"{folder}/{FILE}"])
    assert "one, 0-all: taken out of what is shared" in done.output, done.exception
    assert "photo is out of all later rounds" in done.output
