"""Sites and server without their processes: whole runs, with kits, keys, policies and ledgers."""

import json

import numpy as np
import pytest
import torch

from fedvlm import tensors
from fedvlm.classifier.personalised import Personalised
from fedvlm.deploy.kits import REFERENCE_FILE, read_site
from fedvlm.deploy.server import launch
from fedvlm.deploy.server.engine import RemoteEngine, SiteOpening
from fedvlm.deploy.server.run import check_deployable
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.policy import example_policy
from fedvlm.deploy.site.service import Site, UnsignedMessageError
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import Message, from_records, seal
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.record import Record
from fedvlm.result import Result
from fedvlm.storage.files import read_tensors, write_tensors

NAMES = ["art", "photo", "sketch"]
METHOD = {"name": "fedot", "rounds": 3, "lr": 1e-3}


def head(result):
    return {"": read_tensors(result.folder / "trainings/0-all.safetensors")[0]["shared/head"]}


def test_sites_with_their_own_rows_give_what_one_process_gives(place):
    deployed, alone = place.run(), place.alone()
    assert deployed.tables == alone.tables
    assert tensors.max_relative_difference(head(deployed), head(alone)) < 1e-6
    counts = deployed.manifest["clients"]
    assert counts == alone.manifest["clients"] and deployed.manifest["sites"] == NAMES
    unseen = deployed.unseen().logits(place.rows.x[:5])
    assert torch.allclose(unseen, alone.unseen().logits(place.rows.x[:5]), atol=1e-4)
    classifier = Personalised.from_pretrained(place.site("photo") / "classifiers" / "fedot-all-0")
    expected = alone.personalised("photo")
    assert tensors.max_relative_difference(classifier.local, expected.local) < 1e-6
    assert classifier.predict(place.rows.x[:9]) == expected.predict(place.rows.x[:9])


def test_no_site_tells_row_by_row_what_it_hit(place):
    for about in place.run().trainings().values():
        assert about["scores"].keys() >= set(about["train"])
        for scores in about["scores"].values():
            assert not {"hits", "confusion", "recall", "scores"} & scores.keys()


@pytest.mark.parametrize(
    "protocol",
    [
        {"protocol": "leave-one-domain-out"},
        {"protocol": "cross-device", "counts": [2], "unseen": 1},
        {"protocol": "source-target", "target": "photo"},
    ],
    ids=lambda settings_case: settings_case["protocol"],
)
@pytest.mark.parametrize("selection", ["last", "validation"])
def test_every_protocol_gives_what_one_process_gives(place, protocol, selection):
    settings = place.settings(selection=selection, **protocol)
    assert place.run(settings).tables == place.alone(settings).tables


def test_the_channel_is_applied_at_the_sites(place):
    settings = place.settings(channel={"clip": 0.01, "quantise": True})
    deployed, alone = place.run(settings), place.alone(settings)
    assert tensors.max_relative_difference(head(deployed), head(alone)) < 1e-5
    sizes = [line["clients"]["art"]["bytes_up"] for line in deployed.rounds]
    assert sizes == [line["clients"]["art"]["bytes_up"] for line in alone.rounds]
    assert sizes[0] < alone.rounds[0]["clients"]["art"]["bytes_down"] / 2


def test_personal_state_survives_a_restart_between_any_two_messages(place):
    """A new process and an empty Context for every message: the files alone go on."""
    grid = local_grid(place.desks)
    push = grid.push_messages

    def restart(messages):
        for name in NAMES:
            place.desks[name] = Site(read_site(place.site(name)))
            grid.keep(name, Message({}))
        return push(messages)

    grid.push_messages = restart
    deployed = place.run(grid=grid)
    alone = place.alone()
    assert tensors.max_relative_difference(head(deployed), head(alone)) < 1e-6
    assert deployed.tables == alone.tables


def test_a_second_run_goes_on_from_the_files_of_the_first(place, monkeypatch):
    """The server is stopped in round 2; another Flower run, with other Contexts, ends the same."""
    grid, requests = local_grid(place.desks), []
    push = grid.push_messages

    def stop(messages):
        messages = list(messages)
        requests.append(messages[0].metadata.group_id)
        if requests[-1] == "2":
            raise KeyboardInterrupt
        return push(messages)

    grid.push_messages = stop
    with pytest.raises(KeyboardInterrupt):
        place.run(grid=grid)
    folders = list((place.site("art") / "state").iterdir())
    assert len(folders) == 1 and (folders[0] / "local.safetensors").exists()
    result = place.run()
    assert tensors.max_relative_difference(head(result), head(place.alone())) < 1e-6
    assert [line["round"] for line in result.rounds] == [0, 1, 2]


def test_nothing_local_is_in_any_message_or_in_the_server_record(place):
    place.run()
    for name in NAMES:
        ledger = Ledger(place.site(name)).read()
        out = [line for line in ledger.lines if line["direction"] == "out"]
        assert not ledger.broken and len(out) == 5  # open, three rounds, adapt
        assert all("skew" not in field for line in out for field in line["fields"])
        assert [line["round"] for line in out] == [0, 0, 1, 2, 3]
    saved, _ = read_tensors(place.folder / "run" / "trainings" / "0-all.safetensors")
    assert list(saved) == ["shared/head"]
    with pytest.raises(SettingsError, match="skew of 'photo' never left its site"):
        Result(place.folder / "run").personalised("photo")


def test_auto_runs_over_sites_under_the_policy_of_init_and_leaves_each_its_classifier(place):
    place.run(place.settings({"name": "auto", "rounds": 3}))
    for name in NAMES:
        classifier = Personalised.from_pretrained(place.site(name) / "classifiers" / "auto-all-0")
        assert len(classifier.predict(place.rows.x[:5])) == 5


def test_a_site_may_lack_a_class(place, rows):
    place.change("photo", keep=rows.labels != 2)
    result = place.run()
    assert result.manifest["clients"]["photo"]["train"] < result.manifest["clients"]["art"]["train"]


def test_a_site_with_another_class_is_refused(place):
    place.rules(quorum=1.0)
    place.change("photo", classes=np.array(["ant", "bee", "cow", "dog"]))
    printed = []
    place.desks["photo"].log_text = printed.append
    with pytest.raises(FederationError, match="photo: it has images of 1 classes that") as error:
        place.run()
    assert "cow" not in str(error.value)  # its name is for the people of the site
    assert "site photo has images of 'cow', which is not a class" in printed[0]


def test_a_site_with_another_encoder_is_refused(place):
    place.rules(quorum=1.0)
    place.change("sketch", encoder=np.array("toy@1"))
    with pytest.raises(FederationError, match="art and sketch do not have the same encoder: '0'"):
        place.run()


def test_sites_whose_prompts_end_in_other_words_do_not_fit():
    remote, first = object.__new__(RemoteEngine), {"shared/prompt": torch.zeros(2, 4)}
    about = {"encoder": "demo@0", "classes": ["ant"], "dim": 4, "template": "a {}"}
    site_headers = {"same": about, "other": {**about, "template": "a {}."}}
    remote.sites = {name: SiteOpening(header, first, None) for name, header in {"a": about, **site_headers}.items()}
    assert remote.describe_difference("a", "same") is None
    assert "do not have the same template; all" in remote.describe_difference("a", "other")


def test_a_site_whose_class_texts_differ_is_refused(place):
    place.rules(quorum=1.0)
    place.change("sketch", text=place.rows.text.roll(1, 0).numpy())
    with pytest.raises(FederationError, match="art and sketch start from different tensors"):
        place.run()


def test_a_reference_goes_with_the_first_message_and_is_asked_for_if_missing(place):
    method = {"name": "faa-clip", "rounds": 1}
    settings = place.settings(method)
    with pytest.raises(DataError, match="needs public reference samples.*deploy reference"):
        place.run(settings)
    write_tensors(place.kit.folder / REFERENCE_FILE, {"image": place.rows.x[:20]}, {})
    grid = local_grid(place.desks)
    sizes = []
    push = grid.push_messages
    grid.push_messages = lambda messages: (
        sizes.append([len(from_records(m.content, "").arrays) for m in messages]),
        push(messages),
    )[1]
    place.run(settings, grid=grid)
    stored, _ = read_tensors(next((place.site("art") / "state").iterdir()) / "reference.safetensors")
    assert torch.equal(stored["reference"], place.rows.x[:20]) and sizes[0] == [1, 1, 1]


def test_a_request_that_the_server_did_not_sign_is_dropped_without_a_word(place):
    site = place.desks["art"]
    header = {"kind": "open", "training": "0", "round": 0, "nonce": "x", "spec": {}}
    for about in (header, {"kind": []}, {}):
        with pytest.raises(UnsignedMessageError):
            site.answer(seal(Message(about)), Message({}))
    [line] = Ledger(place.site("art")).read().lines  # of the first; the others are counted later
    assert (line["direction"], line["strangers"], line["fields"]) == ("dropped", 1, {})


def test_a_site_that_signs_with_another_key_is_left_out(place):
    place.desks["art"].sign = place.desks["photo"].sign
    place.run()
    assert sorted(Result(place.folder / "run").rounds[0]["clients"]) == ["photo", "sketch"]


def test_consent_is_asked_for_at_the_site_and_the_server_is_told_why(place):
    place.asks_for_consent("art")
    place.rules(quorum=1.0)
    with pytest.raises(FederationError, match="refused by its policy: nobody at this site has"):
        place.run()
    assert Ledger(place.site("art")).read().lines[-1]["direction"] == "refused"
    place.consents("art")
    place.run()


def test_a_large_upload_is_kept_back(place):
    text = example_policy(plain=True).replace("max_upload_bytes = 50000000", "max_upload_bytes = 10")
    (place.site("art") / "policy.toml").write_text(text)
    place.rules(quorum=1.0)
    with pytest.raises(FederationError, match="but this site sends at most 10"):
        place.run()


def test_what_a_federation_cannot_run_is_refused_before_any_site_is_asked(place):
    for overrides, error in (
        ({"smoke": True}, "smoke"),
        ({"source": {}}, "name the classes in the experiment"),
        ({"channel": {"verified": True}, "method": "tofa", "selection": "validation"}, "selection"),
    ):
        with pytest.raises(SettingsError, match=error):
            check_deployable(place.kit, place.settings(**{"method": METHOD, **overrides}))


def test_ctrl_c_stops_the_run_at_the_server_too(place, monkeypatch):
    monkeypatch.setattr(launch.processes, "is_server_up", lambda kit: True)

    def interrupt(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "wait_for_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch.run_over_sites(place.kit, place.settings(), place.folder / "run")
    request, stop = (json.loads((place.kit.folder / name).read_text()) for name in ("request.json", "stop.json"))
    assert request["out"] == str(place.folder / "run") and stop == [request["id"]]


def test_a_run_that_the_server_does_not_begin_is_given_up(place, monkeypatch):
    monkeypatch.setattr(launch.processes, "is_server_up", lambda kit: True)
    monkeypatch.setattr(launch, "MAX_PENDING_SECONDS", -1.0)
    with pytest.raises(FederationError, match="has not started the run.*superlink.log"):
        launch.run_over_sites(place.kit, place.settings(), place.folder / "run")


def test_a_training_is_known_by_what_it_is(place):
    """The same experiment finds its files again; another has files of its own."""
    place.run()
    place.run(place.settings({**METHOD, "lr": 1e-4}), out="other")
    assert len(list((place.site("art") / "state").iterdir())) == 2
    specs = [json.loads(path.read_text()) for path in place.site("art").glob("state/*/training.json")]
    assert {spec["identity"]["method"]["lr"] for spec in specs} == {1e-3, 1e-4}


def test_again_removes_nothing_of_a_run_that_is_going_on(place, monkeypatch):
    monkeypatch.setattr(launch.processes, "is_server_up", lambda kit: True)
    result = place.run()
    files = {path: path.read_bytes() for path in result.folder.rglob("*.safetensors")}
    assert files
    with Record(result.folder).lock(), pytest.raises(FedVLMError, match="another process is working"):
        launch.run_over_sites(place.kit, place.settings(), result.folder, again=True)
    assert {path: path.read_bytes() for path in files} == files and Record(result.folder).result() is not None
    assert not (place.kit.folder / "request.json").exists()  # no second run was asked for


def test_again_removes_nothing_where_no_server_answers(place, monkeypatch):
    monkeypatch.setattr(launch.processes, "is_server_up", lambda kit: False)
    result = place.run()
    with pytest.raises(FederationError, match="no server answers"):
        launch.run_over_sites(place.kit, place.settings(), result.folder, again=True)
    assert Record(result.folder).result() is not None
