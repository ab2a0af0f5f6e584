"""The table and the image of who has what."""

import numpy as np
import pytest
from PIL import Image

from fedvlm.data.clients import Clients
from fedvlm.data.partition import count_table, make_partition
from fedvlm.errors import DataError, SettingsError
from fedvlm.report.plots import draw_partition
from tests.helpers.plain_rows import make_rows


def test_the_table_counts_every_row_once():
    table = make_rows(400, classes=5)
    partition = make_partition(table, Clients("dirichlet", count=4, alpha=1.0), 0)
    counts = count_table(partition, table)
    assert counts.shape == (4, 5)
    assert counts.sum(0).tolist() == [80] * 5
    sizes = [len(m.train) + len(m.validation) + len(m.test) for m in partition.clients.values()]
    assert counts.sum(1).tolist() == sizes
    train = count_table(partition, table, parts=["train"])
    assert train.sum(1).tolist() == [len(m.train) for m in partition.clients.values()]


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (4, 7), (120, 3)])
def test_the_picture_shows_a_bubble_for_every_filled_cell_only(tmp_path, clients, classes):
    counts = np.zeros((clients, classes), dtype=np.int64)
    names = [f"client-{index}" for index in range(clients)], [f"class {index}" for index in range(classes)]
    counts[0, 0] = 5
    sparse = draw_partition(counts, *names, tmp_path / "few.png")
    dense = draw_partition(counts + 5, *names, tmp_path / "deep" / "many.png")
    ink = []
    for path in (sparse, dense):
        with Image.open(path) as image:
            assert max(image.size) < 4000
            ink.append(int((np.asarray(image.convert("L")) < 250).sum()))
    assert ink[0] < ink[1] or clients * classes == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"end it in \.png, \.svg or \.pdf"):
        draw_partition(np.ones((1, 1), dtype=np.int64), ["a"], ["b"], tmp_path / "image.txt")
    with pytest.raises(DataError, match="nothing to draw"):
        draw_partition(np.zeros((1, 1), dtype=np.int64), ["a"], ["b"], tmp_path / "image.png")
    assert list(tmp_path.iterdir()) == []
