"""Images at a site change: a resumed run keeps its samples, a new one takes today's where the change hides."""

import re
from dataclasses import replace

import numpy as np
import pytest

from fedvlm.deploy import messages
from fedvlm.deploy.messages import ReportedError
from fedvlm.deploy.operations.events import read_events
from fedvlm.deploy.server import engine
from fedvlm.deploy.site import service
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.snapshot import choose_samples, keep_samples
from fedvlm.engines.flower.engine import local_grid

METHOD = {"name": "fedot", "rounds": 2, "lr": 1e-3}


def least(place, count, name="art"):
    """Another `min_class_samples` in a site's policy."""
    path = place.site(name) / "policy.toml"
    text = re.sub(r"^min_class_samples = .*$", f"min_class_samples = {count}", path.read_text(), flags=re.M)
    assert f"min_class_samples = {count}" in text
    path.write_text(text)


def some_rows(place, keep):
    """Of the rows of art those that `keep` allows, by class and number within it."""
    mask = np.zeros(len(place.rows.labels), dtype=bool)
    for label in range(4):
        rows = np.flatnonzero((place.rows.domains == "art") & (place.rows.labels == label))
        mask[[row for number, row in enumerate(rows) if keep(label, number)]] = True
    return mask


def notes(result, name="art"):
    """What the record says of a site's data."""
    return [note for note in result.manifest["notes"] if note.startswith(f"{name} ")]


def opened(place, name="art"):
    return [event for event in read_events(place.site(name)) if event["kind"] == "opened"][-1]["samples"]


def said(place, name="art"):
    return [event["text"] for event in read_events(place.site(name)) if event["kind"] == "said"]


def test_a_new_run_takes_the_data_of_today_if_the_change_hides(place):
    """The counts of a round are those of today, too: no reply of the last run is sent again."""
    settings = place.settings(METHOD)
    place.run(settings, "first")
    before = opened(place)
    least(place, 2)
    place.change("art", some_rows(place, lambda label, number: number > 3))
    result = place.run(settings, "second")
    assert opened(place) < before and all("art" in line["clients"] for line in result.rounds)
    assert notes(result) == ["art has other data than in its last run of this experiment"]
    assert "0 samples added and 16 removed" in said(place)[-1]


def test_a_change_that_would_show_single_samples_waits_and_the_site_says_so(place):
    settings = place.settings(METHOD)
    place.run(settings, "first")
    before = opened(place)
    uploads = [line["hash"] for line in Ledger(place.site("art")).read().lines if line.get("costs") == "upload"]
    place.change("art", some_rows(place, lambda label, number: (label, number) != (1, 2)))
    result = place.run(settings, "second")
    assert opened(place) == before and all("art" in line["clients"] for line in result.rounds)
    assert "uses the samples that it had" in notes(result)[0]
    [text] = [text for text in said(place) if "used again" in text]
    assert "bee changed by fewer than 16 samples (0 samples added and 1 removed" in text
    again = [line for line in Ledger(place.site("art")).read().lines if line.get("costs") == "upload"]
    assert len(again) == len(uploads)  # the same replies, which cost nothing
    assert result.tables == place.run(settings, "first").tables


def test_noise_hides_any_change(place):
    settings = place.settings(METHOD, channel={"clip": 0.5, "noise_multiplier": 1.0})
    place.run(settings, "first")
    place.change("art", some_rows(place, lambda label, number: (label, number) != (1, 2)))
    assert notes(place.run(settings, "second")) == ["art has other data than in its last run of this experiment"]


def test_removed_classes_are_reported_by_number_and_at_the_site_by_name(place):
    settings = place.settings(METHOD)
    place.run(settings, "first")
    least(place, 2)
    place.change("art", some_rows(place, lambda label, number: label != 3))
    result = place.run(settings, "second")
    [note] = notes(result)
    assert "1 of its classes have no samples any more" in note and "dog" not in note
    assert "no samples are left of dog" in said(place)[-1]
    notices = [event for event in read_events(place.kit.folder) if event["kind"] == "notice"]
    assert notices[-1]["site"] == "art" and "1 of its classes" in notices[-1]["text"]


def test_a_resumed_run_keeps_its_samples(place):
    """Though the site was started again with many other images, some of them gone."""
    settings = place.settings(METHOD)
    place.run(settings, "whole")
    before = opened(place)
    least(place, 2)

    class Stops(Exception):
        pass

    grid = local_grid(place.desks)
    push, rounds = grid.push_messages, []

    def stop_in_second_round(messages):
        messages = list(messages)
        rounds.append(messages[0].metadata.group_id)
        if messages[0].metadata.message_type == "train" and rounds[-1] == "1":
            raise Stops
        return push(messages)

    grid.push_messages = stop_in_second_round
    third = place.settings({**METHOD, "lr": 3e-3})
    with pytest.raises(Stops):
        place.run(third, "stopped", grid=grid)
    place.change("art", some_rows(place, lambda label, number: number > 3))
    resumed = place.run(third, "stopped")
    assert opened(place) == before and all("art" in line["clients"] for line in resumed.rounds)
    assert "the run goes on with its samples" in said(place)[-1]
    assert [line["round"] for line in resumed.rounds] == [0, 1]


def test_another_version_is_named_and_another_protocol_refused(place, monkeypatch):
    monkeypatch.setattr(service.fedvlm, "__version__", "9.9.9")
    monkeypatch.setattr(engine, "__version__", "0.2.0")
    result = place.run(place.settings(METHOD), "mixed")
    assert notes(result) == ["art runs fedvlm 9.9.9, and the server 0.2.0"]
    monkeypatch.setattr(service, "PROTOCOL", 7)
    place.rules(quorum=1.0)
    with pytest.raises(Exception, match=r"'9.9.9' with protocol 7, and the server '0.2.0' with protocol 1; install"):
        place.run(place.settings({**METHOD, "lr": 5e-3}), "other")


def test_a_server_of_another_protocol_is_refused_by_the_site(place, monkeypatch):
    monkeypatch.setattr(engine, "PROTOCOL", 8)
    place.rules(quorum=1.0)
    with pytest.raises(Exception, match="it speaks protocol 1 of fedvlm and the server 8; install the same fedvlm"):
        place.run(place.settings(METHOD), "other")
    assert messages.PROTOCOL == 1


def test_images_that_are_gone_stop_a_method_that_needs_their_pixels(place):
    rows = place.rows
    folder = place.folder / "training"
    keep_samples(folder, rows)
    few = rows.select(np.arange(5, len(rows.labels)))
    chosen = choose_samples(folder, few, True, False, 16)
    assert chosen.status == "kept" and chosen.rows.content == list(rows.content)
    assert np.array_equal(chosen.rows.x.numpy(), rows.x.numpy())
    patched = replace(few, patches=few.x[:, None, :])
    with pytest.raises(ReportedError, match="images of the last run were removed"):
        choose_samples(folder, patched, True, False, 16)
