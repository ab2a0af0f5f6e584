"""What a server that asks for all it may learns at a site whose policy is that of init."""

import json

import pytest
import torch

from fedvlm.deploy.kits import read_site
from fedvlm.deploy.site.policy import example_policy
from fedvlm.deploy.site.service import Site
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import from_records

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
        requests = {message.metadata.message_id: message for message in grid.messages}
        replies = pull(ids)
        for message in replies:
            message_in = from_records(message.content, "")
            words.append(message_in.header)
            sent = from_records(requests[message.metadata.reply_to_message_id].content, "").arrays
            for key, value in message_in.arrays.items():
                arrays.append(value)
                if key in sent and sent[key].shape == value.shape:
                    arrays.append(value - sent[key])
        return replies

    grid.pull_messages = listen
    place.run(place.settings(**experiment), out=f"run-{len(list(place.folder.iterdir()))}", grid=grid)
    return words, arrays


def recovered(place, arrays):
    """Training, validation and test rows of the sites that stand in an array, up to length."""
    rows = torch.nn.functional.normalize(place.rows.x.double(), dim=1)
    matches = set()
    for array in arrays:
        if array.ndim and array.shape[-1] == rows.shape[1]:
            guess = torch.nn.functional.normalize(torch.tensor(array).double().reshape(-1, rows.shape[1]), dim=1)
            is_close = (torch.cdist(rows, guess) < SAME).any(1)
            matches |= set(torch.nonzero(is_close).flatten().tolist())
    return matches


@pytest.mark.parametrize("name", METHODS)
def test_no_row_label_or_name_of_a_site_reaches_the_server(curious, name):
    method = {"name": name} if name in ("tofa",) else {"name": name, "rounds": 3}
    words, arrays = overheard(curious, method=method, allow_small=True)
    assert len(words) >= 9 and recovered(curious, arrays) == set()
    # labels: nothing is as long as a part of a site's rows
    sizes = {int(n) for header in words if "samples" in header for n in header["samples"].values()}
    assert not sizes & {size for header in arrays for size in header.shape}
    assert not sizes & {len(header) for header in lists(words)}
    # names: of the site's files, folders and images
    text = json.dumps(words)
    names = [str(curious.folder), ".npz", "store:", *curious.rows.content]
    assert not [header for header in names if header in text]


def lists(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, list):
        yield value
    for inner_value in inner:
        yield from lists(inner_value)


def test_the_same_look_finds_every_row_where_a_site_allows_everything(curious):
    """So that the test above is one that can fail."""
    open = {"min_class_samples": 1, "min_samples": 1, "server_divides": "true"}
    text = example_policy(plain=True)
    lines = [line for line in text.splitlines() if line.split(" = ")[0] not in open]
    lines += [f"{key} = {value}" for key, value in open.items()]
    for name in curious.desks:
        (curious.site(name) / "policy.toml").write_text("\n".join(lines) + "\n")
        curious.desks[name] = Site(read_site(curious.site(name)))
    requests = {
        "method": {"name": "tofa", "min_class_samples": 1},
        "allow_small": True,
        "clients": {"shots": 1},
    }
    _, arrays = overheard(curious, **requests)
    assert len(recovered(curious, arrays)) == 12  # of each class at each site
