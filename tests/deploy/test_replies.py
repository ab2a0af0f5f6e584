"""What leaves a site: every field of every reply is one that the page lists, and says no more."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedvlm.deploy.kits import read_site, write_site
from fedvlm.deploy.messages import (
    ERROR_MESSAGES,
    OPTIONAL_SCORES,
    SCORE_COUNTS,
    EvaluationReply,
    OpenReply,
    RoundReply,
    SumReply,
    public_encoder_name,
)
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.service import Site
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import from_records

PAGE = Path(__file__).parents[2] / "docs" / "security" / "security.md"
NAMES = ["art", "photo", "sketch"]


def listed(head):
    """The names in the first column of the table with this heading."""
    lines = iter(PAGE.read_text().splitlines())
    assert any(line.startswith(f"| {head} |") for line in lines)
    next(lines)
    names = set()
    for line in lines:
        if not line.startswith("|"):
            break
        names |= {field_name.strip(" `") for field_name in line.split("|")[1].split(",")}
    return names


def replies(place, *experiments):
    """Every reply of whole runs, as the server gets it."""
    grid, replies_seen = local_grid(place.desks), []
    pull = grid.pull_messages

    def listen(ids):
        out = pull(ids)
        for reply in out:
            assert not reply.has_error(), reply.error.reason
            message = from_records(reply.content, "")
            replies_seen.append((message.header, message.arrays))
        return out

    grid.pull_messages = listen
    for number, settings in enumerate(experiments):
        place.run(settings, f"run-{number}", grid)
    return replies_seen


def test_the_page_lists_every_field_of_every_reply():
    assert listed("field of a reply") == {
        *OpenReply.model_fields,
        *RoundReply.model_fields,
        *SumReply.model_fields,
        *EvaluationReply.model_fields,
        "error",
    }
    assert listed("score") == {*SCORE_COUNTS, *OPTIONAL_SCORES}


@pytest.mark.parametrize("method", ["fedot", "tofa", "auto", "fedavg"])
def test_no_reply_says_more_than_the_page(place, method):
    settings = place.settings({"name": method, "rounds": 3 if method == "auto" else 1})
    replies_seen = replies(place, settings)
    assert {about["kind"] for about, _ in replies_seen} == {"open", "round", "adapt"}
    for about, arrays in replies_seen:
        assert set(about) <= listed("field of a reply") and "error" not in about
        assert set(about.get("scores", {})) <= listed("score")
        assert about["kind"] == "round" or about["kind"] == "open" or not arrays


SECRETS = ["cow", "hunter2", "/srv/patients", "Traceback", ".npz", "moo"]


def everything(place, out):
    """All that the server has heard or written, in one text."""
    replies_seen = replies(place, *out)
    files = [entry for entry in (place.folder / "run-0").rglob("*") if entry.is_file()]
    # a signature is drawn: any three letters come up in one sooner or later
    words = [{key: entry for key, entry in about.items() if key != "signature"} for about, _ in replies_seen]
    return json.dumps(words) + "".join(entry.read_bytes().decode("latin-1") for entry in files)


def test_names_of_refused_classes_and_files_stay_at_the_site(place):
    place.change("photo", classes=np.array(["ant", "bee", "cow", "dog"]))
    text = everything(place, [place.settings()])
    assert not [secret for secret in SECRETS if secret in text]
    assert "it has images of 1 classes" in text
    assert "cow" in json.dumps(Ledger(place.site("photo")).read().lines, ensure_ascii=False)


def test_a_file_that_cannot_be_read_is_named_to_the_site_alone(place):
    printed = []
    kit = read_site(place.site("photo"))
    write_site(replace(kit, encoder="store:/srv/patients/moo.npz"))
    place.desks["photo"] = Site(read_site(place.site("photo")), printed.append)
    text = everything(place, [place.settings()])
    assert not [secret for secret in SECRETS if secret in text]
    assert any("/srv/patients/moo.npz" in secret for secret in printed)


def test_a_trace_of_the_program_stays_at_the_site(place):
    printed = []
    place.desks["photo"].log_text = printed.append

    def fail(*words):
        raise KeyError("/srv/patients hunter2")

    place.desks["photo"].handler.answer = fail
    text = everything(place, [place.settings()])
    assert not [secret for secret in SECRETS if secret in text]
    assert any("Traceback" in secret and "hunter2" in secret for secret in printed)
    assert ERROR_MESSAGES["failure"] in text


@pytest.mark.parametrize(
    ("encoder", "expected"),
    [
        ("demo@1a2b", "demo@1a2b"),
        ("https://nurse:hunter2@box.example/embed@1a2b", "1a2b"),
        ("/srv/patients/model.onnx@1a2b", "1a2b"),
        ("openai/clip-vit-base-patch32@1a2b", "1a2b"),
        ("1a2b", "1a2b"),
    ],
)
def test_an_encoder_is_told_by_its_fingerprint_and_never_by_path_or_address(encoder, expected):
    assert public_encoder_name(encoder) == expected
