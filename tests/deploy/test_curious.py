"""What a server that asks for all it may learns at a site whose policy is that of init."""

import json

import pytest
import torch

from fedvlm.deploy.explain import EXAMPLE
from fedvlm.deploy.kits import read_site
from fedvlm.deploy.site import Site
from fedvlm.engines.flower.local import local_grid
from fedvlm.engines.flower.wire import from_records

METHODS = ["auto", "fedavg", "fedot", "fedprox", "tofa"]  # of init's, those that rows alone do for
SAME = 1e-3  # between a row and what is taken for it, both of length 1


@pytest.fixture(params=["few", "many"])
def curious(request, tmp_path, rows_like, place_of):
    """Fifteen training rows of each class at each site, one too few for statistics; and 36."""
    return place_of(tmp_path, rows_like(300 if request.param == "few" else 720))


def overheard(place, **experiment):
    """All that comes to the server in a run: words, and arrays with what they changed by."""
    grid, words, arrays = local_grid(place.desks), [], []
    pull = grid.pull_messages

    def listen(ids):
        asked = {one.metadata.message_id: one for one in grid.messages}
        replies = pull(ids)
        for one in replies:
            came = from_records(one.content, "")
            words.append(came.about)
            sent = from_records(asked[one.metadata.reply_to_message_id].content, "").arrays
            for key, value in came.arrays.items():
                arrays.append(value)
                if key in sent and sent[key].shape == value.shape:
                    arrays.append(value - sent[key])
        return replies

    grid.pull_messages = listen
    place.run(
        place.settings(**experiment), out=f"run-{len(list(place.folder.iterdir()))}", grid=grid
    )
    return words, arrays


def recovered(place, arrays):
    """Training, validation and test rows of the sites that stand in an array, up to length."""
    rows = torch.nn.functional.normalize(place.rows.x.double(), dim=1)
    found = set()
    for one in arrays:
        if one.ndim and one.shape[-1] == rows.shape[1]:
            guess = torch.nn.functional.normalize(
                torch.tensor(one).double().reshape(-1, rows.shape[1]), dim=1
            )
            near = (torch.cdist(rows, guess) < SAME).any(1)
            found |= set(torch.nonzero(near).flatten().tolist())
    return found


@pytest.mark.parametrize("name", METHODS)
def test_no_row_label_or_name_of_a_site_reaches_the_server(curious, name):
    method = {"name": name} if name in ("tofa",) else {"name": name, "rounds": 3}
    words, arrays = overheard(curious, method=method, allow_small=True)
    assert len(words) >= 9 and recovered(curious, arrays) == set()
    # labels: nothing is as long as a part of a site's rows
    sizes = {int(n) for one in words if "rows" in one for n in one["rows"].values()}
    assert not sizes & {size for one in arrays for size in one.shape}
    assert not sizes & {len(one) for one in lists(words)}
    # names: of the site's files, folders and images
    told = json.dumps(words)
    names = [str(curious.folder), ".npz", "store:", *curious.rows.content]
    assert not [one for one in names if one in told]


def lists(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, list):
        yield value
    for one in inner:
        yield from lists(one)


def test_the_same_look_finds_every_row_where_a_site_allows_everything(curious):
    """So that the test above is one that can fail."""
    open = {"min_class_samples": 1, "min_samples": 1, "server_divides": "true"}
    text = EXAMPLE
    lines = [one for one in text.splitlines() if one.split(" = ")[0] not in open]
    lines += [f"{key} = {value}" for key, value in open.items()]
    for name in curious.desks:
        (curious.site(name) / "policy.toml").write_text("\n".join(lines) + "\n")
        curious.desks[name] = Site(read_site(curious.site(name)))
    asked = {
        "method": {"name": "tofa", "min_class_samples": 1},
        "allow_small": True,
        "clients": {"shots": 1},
    }
    _, arrays = overheard(curious, **asked)
    assert len(recovered(curious, arrays)) == 12  # of each class at each site
