"""What is odd about data is said before a run, a line each, and groups stay together."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvlm.data import open_dataset
from fedvlm.data.clients import Clients
from fedvlm.data.partition import SampleList, list_samples, make_partition
from fedvlm.errors import DataError, SettingsError
from fedvlm.runner.run import execute
from fedvlm.runner.settings import build


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test_oddities_of_a_folder_are_said_before_the_run_and_a_finished_one_is_named(
    tmp_path: Path,
) -> None:
    mix = {"a": ("glioma", "normal"), "b": ("gliomas", "normal"), "c": ("normal",)}
    for site, classes in mix.items():
        for number in range(30):
            name = classes[number % len(classes)]
            draw(tmp_path / "d" / site / name / f"{number}.png", 100 * ord(site) + number)
    (tmp_path / "d" / "empty").mkdir()
    (tmp_path / "d" / "a" / "notes.txt").write_text("x")
    settings = build({"method": "alone", "data": str(tmp_path / "d"), "protocol": "own-test"})
    messages: list[str] = []
    record = execute(settings, tmp_path / "r", log=messages.append)
    assert messages == record.manifest["notes"]
    for words in (
        "ignored, because they are no images: a/notes.txt",
        "domain 'empty' has no images and is left out",
        "client 'c' has only one class: 'normal'",
        "too few validation samples for model selection (at most 10): a (4), b (4), c (4)",
        "class 'glioma' is only at client 'a'; if it is the class 'gliomas' of other clients, give both the same name",
    ):
        assert any(message.startswith(words) for message in messages), words
    messages.clear()
    execute(settings, tmp_path / "r", log=messages.append)
    assert messages == [f"already finished, read from {tmp_path / 'r'}; --force re-runs it"]


def test_a_finished_run_of_a_table_that_has_changed_since_is_not_read(tmp_path: Path) -> None:
    store, columns = tmp_path / "rows.npz", {"y": np.tile([0, 1], 30), "clients": np.repeat(["a", "b"], 30)}
    np.savez(store, x=np.random.default_rng(0).normal(size=(60, 4)), **columns)
    settings = build(
        {"method": "alone", "encoder": f"store:{store}", "protocol": "own-test", "clients": {"partition": "own"}}
    )
    record = execute(settings, tmp_path / "r")
    assert execute(settings, tmp_path / "r").manifest == record.manifest
    np.savez(store, x=np.random.default_rng(1).normal(size=(60, 4)), **columns)
    with pytest.raises(
        SettingsError, match=r"holds another run, which differs in(.|\n)*rows: there(.|\n)*delete that one"
    ):
        execute(settings, tmp_path / "r")
    store.unlink()
    assert execute(settings, tmp_path / "r").manifest == record.manifest


def manifest(folder: Path, lines: list[str]) -> str:
    (folder / "rows.csv").write_text("\n".join(["path,label,client,group,split", *lines]) + "\n")
    return str(folder / "rows.csv")


def patients(folder: Path, clients: str) -> SampleList:
    """Thirty of four images each, half of them at either client."""
    lines = []
    for number in range(120):
        draw(folder / f"{number}.png", number)
        client_id = clients[number // 60]
        lines.append(f"{number}.png,{number % 2},{client_id},patient {number // 4},")
    return list_samples(open_dataset(manifest(folder, lines)))


def test_a_group_of_a_manifest_is_in_one_part(tmp_path: Path) -> None:
    table = patients(tmp_path, "ab")
    assert table.groups is not None and "patient" not in "".join(table.groups.tolist())
    clients = Clients(partition="own", calibration_ratio=0.5)
    for seed in range(5):
        for member in make_partition(table, clients, seed).clients.values():
            parts = (member.train, member.validation, member.test, member.calibration)
            held = [set(table.groups[part].tolist()) for part in parts]
            assert sum(map(len, held)) == len(set.union(*held)) == 15
            assert [len(part) for part in parts] == [36, 8, 12, 4]


def test_a_group_is_not_both_public_and_somebody_s(tmp_path: Path) -> None:
    table = patients(tmp_path, "aa")
    for seed in range(5):
        division = make_partition(table, Clients(partition="own", public_ratio=0.2), seed)
        held = [division.public, *vars(division.clients["a"]).values()]
        names = [set(table.groups[part].tolist()) for part in held if isinstance(part, np.ndarray)]
        assert len(division.public) == 24
        assert sum(map(len, names)) == len(set.union(*names)) == 30


def test_a_group_in_two_places_is_refused_by_name(tmp_path: Path) -> None:
    for number in range(8):
        draw(tmp_path / f"{number}.png", number)
    across = [f"{n}.png,{n % 2},{'ab'[n // 4]},p," for n in range(8)]
    with pytest.raises(DataError, match="group '0' has samples at 'a' and at 'b'"):
        make_partition(list_samples(open_dataset(manifest(tmp_path, across))), Clients(partition="own"), 0)
    marked = [f"{n}.png,{n % 2},a,p,{('train', 'test')[n % 2]}" for n in range(8)]
    with pytest.raises(DataError, match="group '0' is in"):
        make_partition(list_samples(open_dataset(manifest(tmp_path, marked))), Clients(partition="own"), 0)
