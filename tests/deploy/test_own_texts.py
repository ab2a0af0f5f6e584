"""Descriptions that a site brings of its own go round in TOFA's first exchange, and come back."""

import json
from dataclasses import replace

import pytest

from fedvlm.deploy.kits import read_site, write_site
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.policy import ALL_METHODS, example_policy
from fedvlm.deploy.site.service import Site
from fedvlm.errors import FederationError
from fedvlm.record import Record

TEXTS = {
    "art": {"ant": ["a red square"], "bee": ["a green square", "green all over"]},
    "photo": {"cat": ["a blue square"]},
}


@pytest.fixture
def described(place, small_images):
    """Sites with images, the demo encoder and, two of them, texts of their own."""
    for name in place.desks:
        kit = replace(read_site(place.site(name)), data=str(small_images / name), encoder="demo")
        if name in TEXTS:
            path = place.folder / f"{name}.json"
            path.write_text(json.dumps({name: TEXTS[name]}))
            kit = replace(kit, texts=str(path))
        write_site(kit)
        text = example_policy((ALL_METHODS,), plain=True).replace("min_class_samples = 16", "min_class_samples = 1")
        (place.site(name) / "policy.toml").write_text(text)
        place.desks[name] = Site(read_site(place.site(name)))
    return place


def test_own_texts_go_round_in_one_exchange_and_are_weighed_in_the_second(described):
    place = described
    settings = place.settings({"name": "tofa", "rounds": 2}, allow_small=True)
    result = place.run(settings)
    assert [sorted(line["clients"]) for line in result.rounds] == [sorted(place.desks)] * 2
    shared = Record(result.folder).outcome("all")[0]
    has_own_text = (shared["client texts"].norm(dim=1) > 0).tolist()
    assert has_own_text == [True, True, True, False]  # nobody brings a sentence of a dog
    lines = [ledger_line for ledger_line in Ledger(place.site("art")).read().lines if ledger_line["direction"] == "out"]
    assert "texts" in lines[1]["fields"] and "scores" in lines[2]["fields"]


def test_own_texts_need_two_exchanges_and_the_site_says_so(described):
    settings = described.settings({"name": "tofa"}, allow_small=True)
    with pytest.raises(FederationError, match="the settings do not fit this site"):
        described.run(settings)
