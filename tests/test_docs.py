"""What the pages say of names, defaults and lists is what the code has."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

import pytest

from fedvlm.channel.settings import Channel
from fedvlm.core import Frozen, make, methods
from fedvlm.data.clients import Clients, PartitionKind
from fedvlm.deploy.kits import ServerKit
from fedvlm.encoders import ENCODERS
from fedvlm.errors import FedVLMError
from fedvlm.evaluate.protocols import protocols
from fedvlm.runner.load import check_needs
from fedvlm.runner.settings import Settings

DOCS = Path(__file__).parents[1] / "docs"


def table(page, head):
    """The cells of the table that begins with this heading."""
    lines = iter((DOCS / page).read_text().splitlines())
    assert any(line.startswith(f"| {head} |") for line in lines), f"{page} has no table {head}"
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def written(default):
    """A default as the pages write it."""
    if default is MISSING or default is None:
        return "none"
    if default in ("", (), {}):
        return "empty"
    if isinstance(default, str):
        return f"`{default}`"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    if isinstance(default, Clients):
        return "by domain"
    if isinstance(default, Channel):
        return "off"
    return f"`{str(default).lower().replace('e-0', 'e-')}`"


def defaults(kind, without=()):
    known_fields = {field.name: field for field in fields(kind) if field.name not in without}
    return {
        name: written(field.default if field.default_factory is MISSING else field.default_factory())
        for name, field in known_fields.items()
    }


@pytest.mark.parametrize(
    ("page", "head", "kind", "without"),
    [
        ("security/channel.md", "`channel.`", Channel, ()),
        ("how-to/deploy.md", "`server.toml`", ServerKit, ("folder", "sites", "rehearsal")),
    ],
)
def test_a_table_of_settings_has_every_name_and_default(page, head, kind, without):
    documented = {row[0].strip("`"): row[1] for row in table(page, head)}
    assert documented == defaults(kind, without)


def test_the_settings_page_has_every_partition():
    ways = [row[0].strip("`") for row in table("reference/settings.md", "`clients.partition`")]
    assert sorted(ways) == sorted(get_args(PartitionKind))


def test_encoders_offer_what_the_page_says():
    documented = {}
    for names, offers in table("explanation/concepts.md", "encoder"):
        for form in re.findall(r"`([^`]+)`", names):
            documented[form] = tuple(offers.split(", "))
    assert documented == {kind.form: kind.offers for kind in ENCODERS.values()}


def test_every_protocol_and_engine_is_on_the_page():
    rows = table("explanation/concepts.md", "`protocol`")
    assert {row[0].strip("`") for row in rows} == set(protocols())
    text = (DOCS / "explanation/concepts.md").read_text()
    engines = text[text.index("## Engines") : text.index("## Protocols")]
    [choice] = [get_args(field.type) for field in fields(Settings) if field.name == "engine"]
    assert [row[0].strip("`") for row in table("explanation/concepts.md", "`engine`")] == list(choice)
    assert all(f"`{name}`" in engines for name in choice)


def image_alone(name):
    """Whether a method runs on pooled embeddings alone, set to do without text if it can be."""
    without = {"head": "random", "text": False}
    chosen = {field.name for field in fields(methods()[name])} & without.keys()
    method = make(name, **{key: without[key] for key in chosen})
    try:
        check_needs(method, "a black box", {"image"})
        method.init(Frozen(("ant", "bee"), 16, 1.0, None))
    except FedVLMError:
        return set()
    return chosen or {"nothing"}


def test_the_methods_for_a_black_box_of_images_are_those_the_page_names():
    methods_by_need = {"head": set(), "text": set(), "nothing": set()}
    for name in methods():
        for key in image_alone(name):
            methods_by_need[key].add(name)
    documented = {
        re.findall("`([^`]+)`", row[0])[0].split(" ")[0]: set(re.findall("`([^`]+)`", row[1]))
        for row in table("explanation/concepts.md", "set")
    }
    assert documented == {key: names for key, names in methods_by_need.items() if names}
