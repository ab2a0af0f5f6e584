"""A site with a valid key that lies: it is missing, by name, and the run ends as without it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedvlm.deploy.site.policy import example_policy
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import FederationError
from fedvlm.storage.files import read_tensors

NAN, INF = float("nan"), float("inf")
SENTENCE = "<img src=x onerror=alert(1)> patient Jane Doe: see http://example.org"
METHOD = {"name": "fedot", "rounds": 1, "lr": 1e-3}


def set_field(*path, value):
    """A lie in the words: at this place, this value."""

    def lie(about, arrays):
        about = inner = json.loads(json.dumps(about))
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return about, arrays

    return lie


def delete_field(*path):
    def lie(about, arrays):
        about = inner = json.loads(json.dumps(about))
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return about, arrays

    return lie


def send(change):
    """A lie in the tensors."""
    return lambda about, arrays: (about, change({key: array.copy() for key, array in arrays.items()}))


def filled(value):
    return send(lambda arrays_in: {key: np.full_like(array, value) for key, array in arrays_in.items()})


def with_one(value):
    def change(arrays_in):
        for array in arrays_in.values():
            array.flat[0] = value
        return arrays_in

    return send(change)


OPEN = {
    "another encoder": set_field("encoder", value="toy@9"),
    "a sentence as encoder": set_field("encoder", value=f"{SENTENCE}@0"),
    "a sentence as template": set_field("template", value=SENTENCE),
    "a sentence as tensor": set_field("local", value=[SENTENCE]),
    "an encoder that is no word": set_field("encoder", value=["toy@0"]),
    "other classes": set_field("classes", value=["ant", "bee", "cat", "cow"]),
    "no classes": set_field("classes", value=[]),
    "a class more": set_field("classes", value=["ant", "bee", "cat", "dog", "eel"]),
    "another width": set_field("dim", value=17),
    "a width of nothing": set_field("dim", value=0),
    "a scale of NaN": set_field("scale", value=NAN),
    "a negative scale": set_field("scale", value=-20.0),
    "another scale": set_field("scale", value=21.0),
    "local tensors of other names": set_field("local", value=["head"]),
    "local tensors that are no list": set_field("local", value={"skew": 1}),
    "ten million rows": set_field("samples", "train", value=10**7),
    "more rows than fit": set_field("samples", "train", value=10**30),
    "negative rows": set_field("samples", "test", value=-1),
    "half a row": set_field("samples", "validation", value=0.5),
    "no rows said": delete_field("samples"),
    "another training": set_field("opened", value="0" * 24),
    "first tensors of NaN": filled(NAN),
    "first tensors of others": filled(0.5),
    "no first tensors": send(lambda arrays_in: {}),
    "a tensor more": send(lambda arrays_in: {**arrays_in, "shared/x": np.zeros(3, np.float32)}),
    "a strange tensor": send(lambda arrays_in: {**arrays_in, "passwords": np.zeros(3, np.float32)}),
    "a strange word": set_field("hello", value=1),
}
ROUND = {
    "infinite numbers": filled(INF),
    "one NaN": with_one(NAN),
    "numbers of 3e38": filled(3e38),
    "one number of -3e38": with_one(-3e38),
    "another shape": send(lambda arrays_in: {k: v[:-1] for k, v in arrays_in.items()}),
    "a turned shape": send(lambda arrays_in: {k: v.T.copy() for k, v in arrays_in.items()}),
    "no dimension": send(lambda arrays_in: {k: np.float32(1.0) for k in arrays_in}),
    "doubles": send(lambda arrays_in: {k: v.astype(np.float64) for k, v in arrays_in.items()}),
    "whole numbers": send(lambda arrays_in: {k: v.astype(np.int64) for k, v in arrays_in.items()}),
    "complex numbers": send(lambda arrays_in: {k: v.astype(np.complex64) for k, v in arrays_in.items()}),
    "texts": send(lambda arrays_in: {k: v.astype("<U9") for k, v in arrays_in.items()}),
    "an upload of nothing": send(lambda arrays_in: {}),
    "a tensor more": send(lambda arrays_in: {**arrays_in, "more": np.zeros(4, np.float32)}),
    "its local tensor": send(lambda arrays_in: {**arrays_in, "skew": np.zeros((4, 4), np.float32)}),
    "another name": send(lambda arrays_in: {f"{k}2": v for k, v in arrays_in.items()}),
    "no upload": set_field("uploads", value=False),
    "an upload that is no truth": set_field("uploads", value="yes"),
    "a version of the future": set_field("version", value=7),
    "a version of the past": set_field("version", value=0),
    "a version that is no number": set_field("version", value=None),
    "a loss of NaN": set_field("scores", "loss", value=NAN),
    "a loss that is a word": set_field("scores", "loss", value="low"),
    "more hits than rows": set_field("scores", "test_hits", value=10**6),
    "more rows than it opened with": set_field("scores", "test_rows", value=10**6),
    "negative hits": set_field("scores", "validation_hits", value=-1),
    "no hits": delete_field("scores", "test_hits"),
    "no scores": delete_field("scores"),
    "scores that are a list": set_field("scores", value=[1, 2]),
    "scores of single rows": set_field("scores", "hits", value="ff"),
    "an infinite number told": set_field("described", "condition", value=INF),
    "a sentence told": set_field("described", SENTENCE, value=1.0),
    "an error in its own words": set_field("error", value={"code": SENTENCE, "numbers": {SENTENCE: 1}}),
    "a word told": set_field("described", "condition", value="fine"),
    "another client's name": set_field("client", value="photo"),
    "no client": delete_field("client"),
    "another round": set_field("round", value=5),
    "another nonce": set_field("nonce", value="0" * 32),
    "a masked upload": set_field("masked", value="no"),
    "an error of no kind": set_field("error", value=["<script>", {"a": 1}]),
    "an error of a whole book": set_field("error", value={"code": "x" * 10**6, "numbers": {}}),
}
ADAPT = {
    "a loss of NaN in the end": set_field("scores", "loss", value=NAN),
    "an upload in the end": send(lambda arrays_in: {"head": np.zeros((4, 16), np.float32)}),
    "a metric that is a list": set_field("scores", "AUC", value=[[1.0]]),
    "numbers that are none": set_field("described", "orthogonality", value=None),
}
LIES = [
    *(pytest.param("open", lie, id=f"open: {name}") for name, lie in OPEN.items()),
    *(pytest.param("round", lie, id=f"round: {name}") for name, lie in ROUND.items()),
    *(pytest.param("adapt", lie, id=f"adapt: {name}") for name, lie in ADAPT.items()),
]


class Liar:
    """An honest site until a request of one kind comes; then what it signs is not true."""

    def __init__(self, site, kind, lie):
        self.site, self.kind, self.lie = site, kind, lie

    def answer(self, request, state):
        reply, state = self.site.answer(request, state)
        if request.header["kind"] == self.kind:
            about, arrays = self.lie(reply.header, reply.arrays)
            reply = self.site.sign(Message(about, arrays))
        return reply, state


@pytest.fixture(scope="module")
def place(tmp_path_factory, rows_like, place_of):
    return place_of(tmp_path_factory.mktemp("lies"), rows_like())


def run(place, out, kind="", lie=None, **settings):
    desks = {**place.desks, "sketch": Liar(place.desks["sketch"], kind, lie)}
    grid = local_grid(desks)
    return place.run(place.settings(METHOD, **settings), out, grid)


def end(result):
    return json.loads((result.folder / "trainings" / "0-all.json").read_text())["scores"]


def test_a_liar_that_does_not_lie_takes_part(place):
    result = run(place, "honest")
    assert sorted(result.rounds[0]["clients"]) == sorted(end(result)) == ["art", "photo", "sketch"]


@pytest.mark.parametrize(("kind", "lie"), LIES)
def test_a_lie_stops_nobody_and_is_not_accepted(place, kind, lie, request):
    result = run(place, request.node.callspec.id.replace(" ", "-").replace(":", ""), kind, lie)
    [line] = result.rounds
    honest_sites = ["art", "photo"]
    texts = [path.read_text() for path in [*result.folder.rglob("*.json*"), *place.kit.folder.glob("*.jsonl")]]
    assert texts and not any("Jane" in text for text in texts)  # a site's own words do not enter the record
    if kind == "adapt":
        assert sorted(end(result)) == honest_sites
        return
    assert sorted(line["clients"]) == honest_sites and list(line["missing"]) == ["sketch"]
    assert 0 < len(line["missing"]["sketch"]) < 600
    shared = read_tensors(result.folder / "trainings/0-all.safetensors")[0]
    assert all(tensor.isfinite().all() for tensor in shared.values())


def test_below_the_quorum_a_lie_stops_the_run_before_its_checkpoint(place):
    kit = place.kit
    place.kit = replace(kit, quorum=1.0)
    try:
        with pytest.raises(FederationError, match="sketch"):
            run(place, "quorum", "round", filled(3e38))
    finally:
        place.kit = kit
    assert not list((place.folder / "quorum" / "trainings").glob("*.checkpoint"))


@pytest.mark.parametrize("method", [{"name": "tofa"}, {"name": "auto", "rounds": 3}, {"name": "fedgh", "rounds": 1}])
@pytest.mark.parametrize("value", [-1e6, 1e14])
def test_statistics_that_cannot_be_stop_nobody(place, method, value):
    """They may be believed (bounds on poisoning are another matter), but what is kept is finite."""
    for name in place.desks:
        (place.site(name) / "policy.toml").write_text(example_policy(("*",), plain=True))
    settings = place.settings(method)
    liar = Liar(place.desks["sketch"], "round", filled(value))
    result = place.run(settings, f"{method['name']}-{value:g}", local_grid({**place.desks, "sketch": liar}))
    shared = read_tensors(result.folder / "trainings/0-all.safetensors")[0]
    assert all(not tensor.isnan().any() for tensor in shared.values() if tensor.is_floating_point())
