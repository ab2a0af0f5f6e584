import json

import numpy as np
import pytest
import torch

from fedvlm.data.splits import SPLIT_ALIASES, SPLITS
from fedvlm.encoders import fingerprint, open_encoder
from fedvlm.encoders.store import open_store, save_store
from fedvlm.errors import DataError, EncoderError, SettingsError

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(6, 4)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2])
CLASSES = np.array(["cat", "dog", "owl"])


def store(tmp_path, **columns):
    np.savez(tmp_path / "rows.npz", **columns)
    return tmp_path / "rows.npz"


def test_rows_get_unit_norm_and_keep_their_direction(tmp_path):
    rows = open_store(store(tmp_path, x=X.astype(np.float16) * 7, y=Y, classes=CLASSES))
    assert torch.allclose(rows.x.norm(dim=1), torch.ones(6), atol=1e-6)
    cosines = (rows.x * torch.tensor(X)).sum(1) / torch.tensor(X).norm(dim=1)
    assert cosines.min() > 0.9999
    assert rows.x.dtype == torch.float32
    assert rows.classes == ("cat", "dog", "owl")
    assert rows.labels.tolist() == Y.tolist()
    assert rows.domains.tolist() == [""] * 6


def test_saved_rows_come_back_as_they_were(tmp_path):
    columns = {
        "x": X,
        "labels": Y,
        "classes": CLASSES,
        "domains": np.array(list("aabbcc")),
        "clients": np.array(["one"] * 6),
        "splits": np.array(["train", "test"] * 3),
        "groups": np.array(list("112233")),
        "text": X[:3] * 3,
        "patches": DRAW.normal(size=(6, 2, 4)).astype(np.float16),
        "scale": 31.5,
    }
    before = open_store(store(tmp_path, **columns))
    after = open_store(save_store(tmp_path / "deep" / "again", before))
    assert torch.equal(before.x, after.x)
    assert before.text is not None
    assert torch.equal(before.text, after.text)
    assert torch.equal(before.patches, after.patches)
    for column in ("labels", "domains", "clients", "splits", "groups"):
        assert getattr(before, column).tolist() == getattr(after, column).tolist()
    for word in ("name", "classes", "content", "scale", "encoder", "fingerprint"):
        assert getattr(before, word) == getattr(after, word)
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == [
        "again.json",
        "again.safetensors",
    ]


def test_groups_of_chosen_classes_are_those_of_their_rows(tmp_path):
    path = store(tmp_path, x=X, y=Y, classes=CLASSES, groups=np.array(list("abcdef")))
    assert open_store(path, ["owl", "cat"]).groups.tolist() == ["0", "2", "3", "5"]
    assert open_store(store(tmp_path, x=X, y=Y)).groups is None


def test_a_flipped_byte_is_noticed(tmp_path):
    file = save_store(tmp_path / "s", open_store(store(tmp_path, x=X, y=Y, classes=CLASSES)))
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(DataError, match=r"is damaged or not the one s.json was written for"):
        open_store(file)


def test_paths_say_domain_and_class(tmp_path):
    paths = np.array([f"{d}/{c}/{i}.jpg" for i, d in enumerate("pq") for c in ("dog", "ant", "cow")])
    rows = open_store(store(tmp_path, features=X, paths=paths))
    assert rows.classes == ("ant", "cow", "dog")
    assert rows.labels.tolist() == [2, 0, 1, 2, 0, 1]
    assert rows.domains.tolist() == ["p"] * 3 + ["q"] * 3


def test_text_is_there_only_if_every_chosen_class_has_it(tmp_path):
    file = store(tmp_path, x=X, y=Y, classes=CLASSES, text=X[:2], text_classes=np.array(["owl", "cat"]))
    assert open_store(file).text is None
    some = open_store(file, classes=["cat", "owl"])
    assert some.text is not None
    assert torch.allclose(some.text, torch.nn.functional.normalize(torch.tensor(X[[1, 0]]), dim=1))
    assert some.labels.tolist() == [0, 1, 0, 1]
    assert torch.allclose(some.x, open_store(file).x[[0, 2, 3, 5]])
    assert some.fingerprint != open_store(file).fingerprint


def test_one_array_per_split_becomes_one_table(tmp_path):
    parts = {"train_x": X, "train_y": Y, "val_x": X[:2], "val_y": Y[:2], "test_x": X[2:3]}
    rows = open_store(store(tmp_path, **parts, test_y=Y[2:3]))
    assert rows.splits.tolist() == ["train"] * 6 + ["validation"] * 2 + ["test"]
    assert rows.labels.tolist() == [*Y, *Y[:2], *Y[2:3]]
    assert rows.classes == ("class 0", "class 1", "class 2")
    assert rows.content[0] == rows.content[6] != rows.content[1]
    with pytest.raises(DataError, match=r"test_x is \(1, 4\) and test_y is"):
        open_store(store(tmp_path, **parts))


def test_splits_of_a_store_have_the_names_that_a_manifest_takes(tmp_path):
    words = np.array(["training", "Val", "testing", " train", "valid", "test"])
    rows = open_store(store(tmp_path, x=X, y=Y, splits=words))
    assert rows.splits.tolist() == ["train", "validation", "test"] * 2
    parts = {"training_x": X, "training_y": Y, "valid_x": X[:2], "valid_y": Y[:2]}
    assert open_store(store(tmp_path, **parts)).splits.tolist() == ["train"] * 6 + ["validation"] * 2
    (tmp_path / "rows.csv").write_text("e0,e1,label,split\n1,0,a,training\n0,1,b,val\n1,1,a,test\n")
    assert open_store(tmp_path / "rows.csv").splits.tolist() == ["train", "validation", "test"]
    with pytest.raises(DataError, match=r"rows\.npz: row 1 has the split 'dev'; a split is train, val or test"):
        open_store(store(tmp_path, x=X, y=Y, splits=np.array(["train", "dev"] * 3)))
    assert SPLITS == ("train", "validation", "test") and set(SPLIT_ALIASES.values()) == {"", *SPLITS}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"classes": np.array(["cat", "", "owl"])}, "a class has an empty name"),
        ({"scale": 0.0}, "scale must be a number above 0, got 0"),
        ({"x": X.astype(np.float64) * 1e300}, r"row 0 of x holds -?[0-9.]+e\+\d+, beyond the range of float32"),
    ],
)
def test_a_store_with_an_empty_class_a_wrong_scale_or_huge_numbers_is_refused(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        open_store(store(tmp_path, **{"x": X, "y": Y, **columns}))


def test_a_store_opens_as_an_encoder_that_cannot_see(tmp_path):
    file = store(tmp_path, x=X, y=Y, classes=CLASSES, text=X[:3])
    encoder = open_encoder(f"store:{file}", classes=["dog", "cat"])
    assert encoder.offers == {"image", "text"}
    assert encoder.dim == 4
    assert encoder.embedded.classes == ("dog", "cat")
    assert fingerprint(encoder) != fingerprint(open_encoder(f"store:{tmp_path}"))
    with pytest.raises(EncoderError, match="holds embeddings and no weights"):
        encoder.embed([b""], patches=False)


def test_safetensors_with_strings_beside_it_are_read(tmp_path):
    from safetensors.numpy import save_file

    save_file({"features": X}, tmp_path / "s.safetensors")
    words = {"labels": ["cow", "ant", "cow", "ant", "cow", "ant"], "domains": list("aabbcc")}
    (tmp_path / "s.json").write_text(json.dumps(words))
    rows = open_store(tmp_path)
    assert rows.classes == ("ant", "cow")
    assert rows.labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert rows.domains.tolist() == list("aabbcc")


def test_half_precision_of_either_kind_is_read(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.tensor(X).bfloat16(), "y": torch.tensor(Y)}, tmp_path / "s.safetensors")
    assert open_store(tmp_path).x.dtype == torch.float32


def broken(row, value):
    x = X.copy()
    x[row] = value
    return {"x": x, "y": Y}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (broken(3, np.nan), "row 3 of x holds NaN or infinity, one of 1"),
        (broken((4, 1), np.inf), "row 4 of x holds NaN or infinity"),
        (broken(2, 0), "row 2 of x is zero"),
        ({"x": X, "y": Y[:5]}, "y has 5 rows and x has 6"),
        ({"x": X, "y": Y, "domains": np.array(["a"])}, "domains has 1 rows"),
        ({"x": X, "y": Y + 1, "classes": CLASSES}, "row 2 has label 3, there are 3 classes"),
        ({"x": X, "y": Y - 2}, "row 0 has label -2"),  # -1 is a sample without a label
        ({"x": X, "y": Y / 2}, "labels are float64"),
        ({"x": X, "y": Y, "text": X[:3, :3]}, r"text is \(3, 3\)"),
        ({"x": X, "y": Y, "text": X[:2]}, r"text is \(2, 4\)"),
        ({"x": X, "y": Y, "text": X[:3] * 0}, "row 0 of text is zero"),
        ({"x": X, "y": Y, "patches": X}, "patches are"),
        ({"x": X, "y": Y, "patches": np.full((6, 2, 4), np.nan)}, "row 0 of patches"),
        ({"x": X, "y": Y, "colour": X, "size": X}, "unknown arrays: colour, size"),
        ({"y": Y}, "has no embeddings; call the array x or features"),
        ({"x": X}, "has no labels; call the array y or labels"),
        ({"x": X[0], "y": Y}, r"x is torch.float32 of \(4,\)"),
        ({"x": X, "y": Y, "classes": np.array(["a", "a", "b"])}, "is listed twice"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        open_store(store(tmp_path, **columns))


def test_unknown_classes_are_refused_with_the_nearest(tmp_path):
    file = store(tmp_path, x=X, y=Y, classes=CLASSES)
    with pytest.raises(SettingsError, match="did you mean 'dog'"):
        open_store(file, classes=["dogg"])
    strange = store(tmp_path, x=X, y=np.array(["cat"] * 5 + ["fox"]), classes=CLASSES)
    with pytest.raises(SettingsError, match="'fox'"):
        open_store(strange)


def test_what_is_not_a_store_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no store"):
        open_store(tmp_path / "nothing.npz")
    with pytest.raises(DataError, match="holds 0 stores"):
        open_store(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="is not a store"):
        open_store(tmp_path / "a.txt")
    for name in ("a.npz", "a.safetensors"):
        (tmp_path / name).write_bytes(b"not at all")
        with pytest.raises(DataError, match="cannot be read"):
            open_store(tmp_path / name)


def test_objects_are_never_unpickled(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        open_store(store(tmp_path, x=X, y=np.array([{}] * 6, dtype=object)))
