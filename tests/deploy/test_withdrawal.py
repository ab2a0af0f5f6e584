"""A site that leaves: it answers no more, and plain sums are as if it had never been there."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedvlm.channel import outliers
from fedvlm.cli import app
from fedvlm.deploy import withdrawal
from fedvlm.deploy.identity.enrolment import accept_certificate, admit_site, create_join_request, read_request
from fedvlm.deploy.identity.keys import Signer
from fedvlm.deploy.kits import read_server, read_site
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.policy import ALL_METHODS, example_policy
from fedvlm.deploy.site.service import Site
from fedvlm.deploy.withdrawal import WITHDRAWAL_FILE, WITHDRAWAL_PREFIX, apply_withdrawal, withdraw
from fedvlm.engines.flower.messages import Message, from_bytes, to_bytes
from fedvlm.errors import DataError, FedVLMError, SettingsError
from fedvlm.record import Record
from fedvlm.storage.files import check_index, read_json
from fedvlm.tensors import max_relative_difference

TOFA = {"name": "tofa"}
RUN = "kits/server/runs/one"


@pytest.fixture(autouse=True)
def open_to_all(place):
    """Policies that let every method and small classes through."""
    for name in place.desks:
        text = example_policy((ALL_METHODS,), plain=True).replace("min_class_samples = 16", "min_class_samples = 1")
        (place.site(name) / "policy.toml").write_text(text)


def shared(place, out=RUN):
    return Record(place.folder / out).outcome("all")[0]


def withdraw_site(place, name="photo", records=()):
    return apply_withdrawal(place.kit, withdraw(place.site(name), "A. Person"), records)


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
    before_withdrawal = shared(place)
    expected = without(place, settings)
    assert max_relative_difference(before_withdrawal, expected) > 1e-3
    site, [result] = withdraw_site(place)
    assert site == "photo" and result.removed, result
    assert max_relative_difference(shared(place), expected) < 1e-6
    summary = read_json(before.folder / "trainings" / "0-all.json")
    assert summary["withdrawn"] == ["photo"]
    check_index(before.folder)


def test_a_second_site_withdraws_from_what_the_first_has_left(place):
    settings = place.settings(TOFA, allow_small=True)
    place.run(settings, RUN)
    withdraw_site(place, "photo")
    place.desks.pop("photo")
    expected = without(place, settings, "art")
    _, [result] = withdraw_site(place, "art")
    assert result.removed and max_relative_difference(shared(place), expected) < 1e-6


def test_both_ledgers_say_so_and_the_site_is_out_of_later_rounds(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    withdraw_site(place)
    out = [line for line in Ledger(place.site("photo")).read().lines if line["kind"] == "withdrawal"]
    history = Ledger(place.kit.folder).read()
    assert [line["by"] for line in out] == ["A. Person"] and out[0]["bytes"] > 0
    assert [line["content"] for line in history.lines] == [line["content"] for line in out]
    assert [(line["site"], line["what"]) for line in history.lines] == [("photo", "removed")]
    later = place.run(place.settings({"name": "fedavg", "rounds": 1}, allow_small=True), "later")
    assert "its key was revoked" in later.rounds[0]["missing"]["photo"]


def test_a_site_that_has_withdrawn_answers_nothing_even_before_its_server_knows(place):
    withdraw(place.site("photo"), "A. Person")
    rounds = place.run().rounds
    assert all("this site has withdrawn" in line["missing"]["photo"] for line in rounds)


def test_a_site_comes_back_by_a_new_key(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    withdraw_site(place)
    folder = place.site("photo")
    request = read_request(place.kit, create_join_request(folder).path)
    accept_certificate(folder, admit_site(place.kit, request))
    place.desks["photo"] = Site(read_site(folder))
    place.kit = read_server(place.kit.folder)
    assert "photo" in place.run(out="later").rounds[0]["clients"]


REASONS = {
    "trained": ({"name": "fedavg", "rounds": 2}, {}, "trained or averaged"),
    "noise_multiplier": ({**TOFA, "noise_multiplier": 1.0}, {}, "the uploads had noise"),
    "robust": (TOFA, {"aggregation": "median"}, "a robust rule"),
    "verified": ({"name": "fedavg", "rounds": 1}, {"clip": 0.5, "verified": True}, "trained"),
    "summed": (TOFA, {"verified": True}, "the server has seen only a verified sum"),
    "followed": (
        {**TOFA, "min_class_clients": 3, "rounds": 2},
        {},
        "uploads of round 2 depend on its earlier",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_only_a_new_run_forgets(place, case):
    method, channel, reason = REASONS[case]
    place.run(place.settings(method, allow_small=True, channel=channel), RUN)
    before = shared(place)
    _, [result] = withdraw_site(place)
    assert not result.removed and reason in result.reason and "only a new run is without it" in str(result)
    assert max_relative_difference(shared(place), before) == 0
    assert place.kit.folder.joinpath("sites", "photo.json").exists() is False


def test_a_bound_that_bit_is_not_undone(place, monkeypatch):
    monkeypatch.setattr(outliers, "MAX_NORM_TO_MEDIAN", 1.0)
    place.run(place.settings(TOFA, allow_small=True), RUN)
    _, [result] = withdraw_site(place)
    assert not result.removed and "the bound changed uploads" in result.reason


def test_a_masked_upload_is_not_sent_again(place):
    """What only a sum was to show would else be shown by leaving."""
    channel = {"clip": 0.5, "verified": True}
    place.run(place.settings({"name": "fedavg", "rounds": 1}, allow_small=True, channel=channel), RUN)
    assert from_bytes(withdraw(place.site("photo"), "A. Person").read_bytes()).arrays == {}


def signed(place, by, file, **changes):
    """The file once more, changed and signed by another site or the same."""
    message = from_bytes(file.read_bytes())
    words = {key: array for key, array in message.header.items() if key not in ("checksum", "signature")}
    values = {key: changes.get("values", lambda array: array)(array) for key, array in message.arrays.items()}
    about = {**words, **changes.get("about", {})}
    prefix = changes.get("prefix", WITHDRAWAL_PREFIX)
    sign = Signer(place.site(by) / "key", prefix)
    file.write_bytes(to_bytes(sign(Message(about, values))))
    return file


LIES = {
    "what it never sent": ("photo", {"values": lambda tensor: tensor + 1}, "not what was accepted"),
    "nothing of the kind": ("photo", {"values": lambda tensor: tensor[:0]}, "not what was accepted"),
    "another's": ("art", {}, "not signed"),
    "another's upload": ("art", {"about": {"client": "art"}}, "not what was accepted"),
    "a reply's signature": ("photo", {"prefix": b"fedvlm parcel\n"}, "not signed"),
    "another federation's": ("photo", {"about": {"federation": "ab" * 32}}, "another federation"),
    "a site that is none": ("photo", {"about": {"client": "nobody"}}, "no certificate"),
    "odd words": ("photo", {"about": {"client": 7}}, "not a withdrawal"),
    "odd uploads": ("photo", {"about": {"uploads": [{"training": "0" * 24}]}}, "not a withdrawal"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_takes_nothing_out(place, lie):
    by, changes, reason = LIES[lie]
    place.run(place.settings(TOFA, allow_small=True), RUN)
    before = shared(place)
    file = signed(place, by, withdraw(place.site("photo"), "A. Person"), **changes)
    with pytest.raises(FedVLMError, match=reason):
        apply_withdrawal(place.kit, file)
    assert max_relative_difference(shared(place), before) == 0
    assert sorted(path.stem for path in (place.kit.folder / "sites").iterdir()) == sorted(place.desks)


def test_a_damaged_file_takes_nothing_out(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    file = withdraw(place.site("photo"), "A. Person")
    data = file.read_bytes()
    for bad in (b"", data[:-4], data[:200], b"x" * 100, data[:-1] + bytes([data[-1] ^ 1])):
        file.write_bytes(bad)
        with pytest.raises(FedVLMError):
            apply_withdrawal(place.kit, file)
    with pytest.raises(DataError, match="cannot be read"):
        apply_withdrawal(place.kit, file.with_name("none"))


def test_a_withdrawal_counts_once(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    withdraw_site(place)
    once = shared(place)
    with pytest.raises(SettingsError, match="its key was revoked"):
        apply_withdrawal(place.kit, place.site("photo") / WITHDRAWAL_FILE)
    assert max_relative_difference(shared(place), once) == 0


def test_one_that_a_crash_cut_short_is_carried_out_again_to_the_same(place, monkeypatch):
    place.run(place.settings(TOFA, allow_small=True), RUN)

    def crash(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedvlm.deploy.withdrawal.revoke_site", crash)
    with pytest.raises(KeyboardInterrupt):
        withdraw_site(place)
    once = shared(place)
    monkeypatch.undo()
    site, results = apply_withdrawal(place.kit, place.site("photo") / WITHDRAWAL_FILE)
    assert site == "photo" and results == [] and max_relative_difference(shared(place), once) == 0


def test_a_withdrawal_waits_for_a_run_that_is_going_on(place):
    result = place.run(place.settings(TOFA, allow_small=True), RUN)
    file = withdraw(place.site("photo"), "A. Person")
    with Record(result.folder).lock(), pytest.raises(FedVLMError, match="another process is"):
        apply_withdrawal(place.kit, file)
    assert (place.kit.folder / "sites" / "photo.json").exists()


def test_a_run_that_is_not_finished_says_so(place, monkeypatch):
    monkeypatch.setattr("fedvlm.runner.training.finish_training", stop)
    with pytest.raises(KeyboardInterrupt):
        place.run(place.settings(TOFA, allow_small=True), RUN)
    _, [result] = withdraw_site(place)
    assert not result.removed and "not finished" in result.reason


def stop(*words):
    raise KeyboardInterrupt


def test_the_note_of_a_withdrawal_cannot_be_unwritten_by_damage(place):
    withdraw(place.site("photo"), "A. Person")
    (place.site("photo") / withdrawal.WITHDRAWN_FILE).write_text("{")
    assert "this site has withdrawn" in place.run().rounds[0]["missing"]["photo"]


def test_the_command_at_the_site_and_at_the_server(place):
    place.run(place.settings(TOFA, allow_small=True), RUN)
    go = CliRunner()
    folder = str(place.site("photo"))
    assert "nobody is named" in str(go.invoke(app, ["deploy", "withdraw", folder]).exception)
    output = go.invoke(app, ["deploy", "withdraw", folder, "--by", "A. Person"]).output
    assert "no longer answers" in output and WITHDRAWAL_FILE in output
    done = go.invoke(app, ["deploy", "withdraw", str(place.kit.folder), f"{folder}/{WITHDRAWAL_FILE}"])
    assert "one, 0-all: removed from the shared tensors" in done.output, done.exception
    assert "photo takes part in no later round" in done.output
