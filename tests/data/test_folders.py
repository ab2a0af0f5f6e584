"""Images in folders and in archives of folders, and everything that may be wrong with them."""

import stat
from copy import deepcopy
from zipfile import ZipFile, ZipInfo

import pytest

from fedvlm.data import open_dataset
from fedvlm.errors import DataError, SettingsError
from tests.helpers.trees import grid, image, make_zip, plant

PATHS = grid(["art", "photo"], ["cat", "dog"])


# Folders


def test_folders_of_domains_and_classes_become_columns(tmp_path):
    data = open_dataset(f"folder:{plant(tmp_path, PATHS)}")
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [0, 0, 1, 1] * 2
    assert data.domains.tolist() == ["art"] * 4 + ["photo"] * 4
    assert set(data.clients.tolist()) == set(data.splits.tolist()) == {""}
    assert data.source.name(0) == "art/cat/0.png"
    assert data.source.read(0) == image("art/cat/0.png")


def test_folders_of_classes_alone_have_no_domain(tmp_path):
    data = open_dataset(str(plant(tmp_path, ["cat/1.jpg", "dog/2.JPEG"])))
    assert data.classes == ("cat", "dog")
    assert set(data.domains.tolist()) == {""}


def test_a_layout_says_what_the_folders_are(tmp_path):
    data = open_dataset(str(plant(tmp_path, PATHS)), layout="client/class")
    assert data.clients.tolist() == ["art"] * 4 + ["photo"] * 4
    assert set(data.domains.tolist()) == {""}


def test_a_layout_that_may_be_the_wrong_way_round_is_noted(tmp_path):
    paths = grid(["art", "photo"], ["cat", "cow", "dog", "owl"])
    assert open_dataset(str(plant(tmp_path, paths))).notes == ()
    swapped = open_dataset(str(tmp_path), layout="class/domain")
    assert swapped.classes == ("art", "photo")
    assert "has 2 classes (art, photo) and 4 domains (cat, cow, dog, owl)" in swapped.notes[0]
    assert 'swapped, set layout = "domain/class"' in swapped.notes[0]


def test_a_folder_whose_class_name_is_blank_is_refused(tmp_path):
    with pytest.raises(DataError, match="a class has an empty name"):
        open_dataset(str(plant(tmp_path, ["cat/1.png", "_/2.png"])))


def test_folders_called_train_and_test_are_splits(tmp_path):
    data = open_dataset(str(plant(tmp_path, grid(["Training", "test"], ["cat", "dog"]))))
    assert data.splits.tolist() == ["train"] * 4 + ["test"] * 4


def test_one_folder_around_everything_is_looked_through(tmp_path):
    plant(tmp_path, [f"PACS/{path}" for path in PATHS])
    assert set(open_dataset(str(tmp_path)).domains.tolist()) == {"art", "photo"}
    again = open_dataset(str(tmp_path), layout="domain/class")
    assert set(again.domains.tolist()) == {"art", "photo"}


def test_underscores_of_class_folders_are_blanks_in_class_names(tmp_path):
    assert open_dataset(str(plant(tmp_path, ["ice_cream/1.png"]))).classes == ("ice cream",)


def test_classes_called_by_numbers_are_ordered_as_numbers(tmp_path):
    data = open_dataset(str(plant(tmp_path, [f"{n}/1.png" for n in (0, 2, 10)])))
    assert data.classes == ("0", "2", "10")


def test_names_beyond_ascii_are_kept_and_one_in_both_unicode_forms(tmp_path):
    plant(tmp_path, ["künstler/café/1.png", "künstler/犬/1.png", "photo/cafe\u0301/写真.png"])
    data = open_dataset(str(tmp_path))
    assert data.classes == ("café", "犬")
    assert data.labels.tolist() == [0, 1, 0]
    assert data.source.read(2)


def test_hidden_files_and_others_are_ignored(tmp_path):
    plant(tmp_path, [*PATHS, ".cache/cat/1.png", "art/.hidden/1.png", "art/cat/.1.png"])
    (tmp_path / "art/cat/notes.txt").write_text("no image")
    assert len(open_dataset(str(tmp_path)).source) == 8


def test_a_folder_without_pictures_is_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=r"has no images; they end in \.png"):
        open_dataset(str(tmp_path))


def test_an_empty_class_is_named(tmp_path):
    plant(tmp_path, PATHS)
    (tmp_path / "art/unicorn").mkdir()
    with pytest.raises(DataError, match="class 'unicorn' has no images"):
        open_dataset(str(tmp_path))


def test_a_class_may_be_empty_in_one_domain_but_not_in_all(tmp_path):
    plant(tmp_path, [*PATHS, "art/horse/1.png"])
    (tmp_path / "photo/horse").mkdir()
    assert open_dataset(str(tmp_path)).classes == ("cat", "dog", "horse")


def test_classes_that_differ_only_in_case_are_refused(tmp_path):
    plant(tmp_path, ["art/Dog/1.png", "photo/dog/1.png"])
    with pytest.raises(DataError, match="'Dog' and 'dog' differ only in case"):
        open_dataset(str(tmp_path))


def test_pictures_at_several_depths_are_refused_with_an_example_of_each(tmp_path):
    plant(tmp_path, [*PATHS, "stray/1.png"])
    with pytest.raises(DataError, match=r"1 and 2 folders deep \(stray/1.png, art/cat/0.png\)"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(("paths", "depth"), [(["1.png"], 0), (["a/b/c/1.png", "d/b/c/1.png"], 3)])
def test_a_layout_that_cannot_be_guessed_says_what_was_found(tmp_path, paths, depth):
    with pytest.raises(DataError, match=f"cannot be guessed: its images are {depth} folders deep"):
        open_dataset(str(plant(tmp_path, paths)))


def test_a_layout_that_does_not_fit_is_refused(tmp_path):
    plant(tmp_path, PATHS)
    with pytest.raises(DataError, match="does not have the layout class"):
        open_dataset(str(tmp_path), layout="class")
    with pytest.raises(SettingsError, match="layout must name the folders above an image.*got 'style/class'"):
        open_dataset(str(tmp_path), layout="style/class")
    with pytest.raises(SettingsError, match="got 'domain'"):
        open_dataset(str(tmp_path), layout="domain")


def test_a_label_that_is_no_class_is_named(tmp_path):
    plant(tmp_path, PATHS)
    with pytest.raises(DataError, match=r"has the label 'dog', which is no class; .* cat"):
        open_dataset(str(tmp_path), classes=["cat"])
    with pytest.raises(DataError, match="class 'horse' has no images"):
        open_dataset(str(tmp_path), classes=["cat", "dog", "horse"])


def test_a_class_listed_twice_is_refused(tmp_path):
    with pytest.raises(DataError, match="'cat' is listed twice"):
        open_dataset(str(plant(tmp_path, PATHS)), classes=["cat", "dog", "cat"])


def test_a_given_order_of_classes_is_the_order_of_labels(tmp_path):
    data = open_dataset(str(plant(tmp_path, PATHS)), classes=["dog", "cat"])
    assert data.classes == ("dog", "cat")
    assert data.labels.tolist() == [1, 1, 0, 0] * 2


def test_links_that_lead_out_are_refused_and_links_inside_are_read(tmp_path):
    root = plant(tmp_path / "data", PATHS)
    (root / "art/cat/inside.png").symlink_to(root / "photo/cat/0.png")
    assert len(open_dataset(str(root)).source) == 9
    outside = plant(tmp_path, ["secret.png"]) / "secret.png"
    (root / "art/cat/out.png").symlink_to(outside)
    with pytest.raises(DataError, match=r"out.png is a link to .*secret.png, outside"):
        open_dataset(str(root))
    (root / "art/cat/out.png").unlink()
    (root / "more").symlink_to(tmp_path)
    with pytest.raises(DataError, match="more is a link to the folder"):
        open_dataset(str(root))
    (root / "more").unlink()
    (root / "art/cat/gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(DataError, match="which is not there; remove the link"):
        open_dataset(str(root))


def test_a_file_that_goes_away_is_named_when_it_is_read(tmp_path):
    data = open_dataset(str(plant(tmp_path, PATHS)))
    (tmp_path / "art/cat/0.png").unlink()
    with pytest.raises(DataError, match=r"art/cat/0\.png cannot be read"):
        data.source.read(0)


# Archives


def test_a_zip_is_read_in_place_and_equals_the_folder(tmp_path):
    folder = open_dataset(str(plant(tmp_path / "tree", PATHS)))
    data = open_dataset(str(make_zip(tmp_path / "tree.zip", [*PATHS, "__MACOSX/art/cat/._0.png"])))
    assert data.classes == folder.classes
    assert (data.labels == folder.labels).all()
    assert (data.domains == folder.domains).all()
    read = [data.source.read(row) for row in range(8)]
    assert read == [folder.source.read(row) for row in range(8)]
    copied = deepcopy(data.source)  # as it is sent to another process: without the open file
    assert copied.read(3) == read[3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree", "tree.zip"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../art/cat/1.png", "leads out of the archive"),
        ("art/../../cat/1.png", "leads out of the archive"),
        ("/etc/cat/1.png", "has an absolute name"),
        ("C:/cat/1.png", "has an absolute name"),
        ("art\\cat\\1.png", "has a backslash"),
    ],
)
def test_members_that_lead_out_are_refused_by_name(tmp_path, name, problem):
    path = make_zip(tmp_path / "bad.zip", [*PATHS, name])
    with pytest.raises(DataError, match=problem) as caught:
        open_dataset(str(path))
    assert repr(name) in str(caught.value)


def test_links_in_archives_are_refused_by_name(tmp_path):
    path = make_zip(tmp_path / "bad.zip", PATHS)
    link = ZipInfo("art/cat/link.png")
    link.create_system = 3
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match=r"'art/cat/link\.png' of .* is a link"):
        open_dataset(str(path))


def test_an_empty_class_of_an_archive_is_named(tmp_path):
    path = make_zip(tmp_path / "tree.zip", PATHS)
    with ZipFile(path, "a") as archive:
        archive.writestr("art/unicorn/", b"")
    with pytest.raises(DataError, match="class 'unicorn' has no images"):
        open_dataset(str(path))


def test_a_damaged_archive_is_named(tmp_path):
    path = tmp_path / "tree.zip"
    path.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(DataError, match=r"cannot be opened as a \.zip"):
        open_dataset(str(path))
    archive = bytearray(make_zip(path, PATHS).read_bytes())
    data = open_dataset(str(path))
    archive[60] ^= 0xFF
    path.write_bytes(archive)
    with pytest.raises(DataError, match=r"art/cat/0\.png of .* cannot be read"):
        data.source.read(0)
