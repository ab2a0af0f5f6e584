import json

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from fedvlm.encoders import fingerprint, open_encoder
from fedvlm.errors import EncoderError, SettingsError
from tests.helpers import tiny_models

DRAW = np.random.default_rng(0)
WEIGHT = DRAW.normal(size=(3, 5)).astype(np.float32)
TABLE = DRAW.normal(size=(20, 5)).astype(np.float32)


def model(path, inputs, outputs, nodes, **constants):
    graph = helper.make_graph(
        nodes,
        "tower",
        [helper.make_tensor_value_info(*info) for info in inputs],
        [helper.make_tensor_value_info(*info) for info in outputs],
        [numpy_helper.from_array(value, key) for key, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path.parent.mkdir(exist_ok=True)
    onnx.save(made, path)
    return path


def image_tower(path, size=8, batch="batch", channels=3, weight=WEIGHT):
    """The mean colour through a matrix."""
    nodes = [
        helper.make_node("ReduceMean", ["pixels", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "weight"], ["image_embeds"]),
    ]
    return model(
        path,
        [("pixels", TensorProto.FLOAT, [batch, channels, size, size])],
        [("image_embeds", TensorProto.FLOAT, [batch, 5])],
        nodes,
        axes=np.array([2, 3]),
        weight=weight,
    )


def text_tower(path, table=TABLE):
    """The mean of all token rows."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("ReduceMean", ["rows", "axes"], ["text_embeds"], keepdims=0),
    ]
    return model(
        path,
        [("input_ids", TensorProto.INT64, ["batch", "length"])],
        [("text_embeds", TensorProto.FLOAT, ["batch", table.shape[1]])],
        nodes,
        axes=np.array([1]),
        table=table,
    )


def image(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 12, 3), np.uint8))


@pytest.mark.parametrize("batch", ["batch", 1, 2, 5])
def test_vectors_are_those_of_the_graph(tmp_path, batch):
    encoder = open_encoder(f"onnx:{image_tower(tmp_path / 'a.onnx', batch=batch)}")
    arrays = [encoder.preprocess(image(seed)) for seed in range(3)]
    assert arrays[0].shape == (3, 8, 8)
    pooled = encoder.embed(arrays, patches=False).pooled
    assert np.allclose(pooled, np.stack(arrays).mean((2, 3)) @ WEIGHT, atol=1e-5)
    assert (encoder.dim, encoder.offers, encoder.scale) == (5, {"image"}, 100.0)


def test_one_thread_is_used(tmp_path):
    encoder = open_encoder(f"onnx:{image_tower(tmp_path / 'a.onnx')}")
    options = encoder._image.session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)


def test_a_directory_may_hold_text_and_settings(tmp_path):
    image_tower(tmp_path / "image.onnx", size="edge")
    text_tower(tmp_path / "text.onnx")
    tiny_models.tokens(tmp_path, start=True)
    settings = {"size": 6, "resize": "squash", "scale": 12.5, "length": 9, "pad": 3}
    (tmp_path / "encoder.json").write_text(json.dumps(settings))
    encoder = open_encoder(f"onnx:{tmp_path}")
    assert encoder.preprocess(image(0)).shape == (3, 6, 6)
    assert (encoder.scale, encoder.offers) == (12.5, {"image", "text"})
    ids = encoder._tokenizer.encode("a cat").ids
    assert len(ids) == 9
    assert ids[-1] == 3
    expected = torch.nn.functional.normalize(torch.tensor(TABLE[ids].mean(0)), dim=0)
    assert torch.allclose(encoder.embed_text(["a cat"])[0], expected, atol=1e-6)
    with pytest.raises(SettingsError, match="reads 9; shorten"):
        encoder.embed_text(["a " * 9])


def test_fingerprint_follows_weights_and_settings(tmp_path):
    file = image_tower(tmp_path / "a.onnx")
    first = fingerprint(open_encoder(f"onnx:{file}"))
    assert first == fingerprint(open_encoder(f"onnx:{file}"))
    (tmp_path / "a.json").write_text('{"mean": [0, 0, 0]}')
    second = fingerprint(open_encoder(f"onnx:{file}"))
    image_tower(file, weight=WEIGHT + 1)
    assert len({first, second, fingerprint(open_encoder(f"onnx:{file}"))}) == 3


def test_fingerprint_follows_how_sentences_become_tokens(tmp_path):
    """Else the cache would give the texts of before after a tokenizer was put right."""
    folder = tmp_path / "both"
    image_tower(folder / "image.onnx")
    text_tower(folder / "text.onnx")
    tiny_models.tokens(folder, start=True)
    fingerprints = [fingerprint(open_encoder(f"onnx:{folder}"))]
    for words in ({"length": 9}, {"length": 9, "pad": 1}):
        (folder / "encoder.json").write_text(json.dumps(words))
        fingerprints.append(fingerprint(open_encoder(f"onnx:{folder}")))
    tiny_models.tokens(folder, start=False)
    fingerprints.append(fingerprint(open_encoder(f"onnx:{folder}")))
    assert len(set(fingerprints)) == 4
    assert fingerprints[-1] == fingerprint(open_encoder(f"onnx:{folder}"))


def test_fingerprint_covers_every_file_of_weights_whatever_its_name(tmp_path):
    fingerprints = []
    for number in range(2):
        file = image_tower(tmp_path / str(number) / "a.onnx", weight=WEIGHT + number)
        made = onnx.load(file)
        onnx.save(made, file, save_as_external_data=True, location="elsewhere.bin", size_threshold=64)
        fingerprints.append(fingerprint(open_encoder(f"onnx:{file}")))
    graphs = [(tmp_path / str(number) / "a.onnx").read_bytes() for number in range(2)]
    assert graphs[0] == graphs[1]  # only the file beside differs
    assert fingerprints[0] != fingerprints[1]


def test_weights_outside_the_folder_of_a_tower_are_refused(tmp_path):
    file = image_tower(tmp_path / "0" / "a.onnx")
    onnx.save(onnx.load(file), file, save_as_external_data=True, location="w.bin", size_threshold=64)
    made = onnx.load(file, load_external_data=False)
    (tmp_path / "0/w.bin").rename(tmp_path / "w.bin")
    for tensor in made.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../w.bin" if entry.key == "location" else entry.value
    file.write_bytes(made.SerializeToString())
    with pytest.raises(EncoderError, match=r"\.\./w\.bin"):
        open_encoder(f"onnx:{file}")


def test_what_does_not_fit_is_named(tmp_path):
    with pytest.raises(EncoderError, match="there is no file"):
        open_encoder(f"onnx:{tmp_path}")
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(EncoderError, match="cannot be opened"):
        open_encoder(f"onnx:{tmp_path / 'bad.onnx'}")
    with pytest.raises(EncoderError, match="takes any image size"):
        open_encoder(f"onnx:{image_tower(tmp_path / 'any.onnx', size='edge')}")
    with pytest.raises(EncoderError, match=r"one input of \(batch, 3, height, width\)"):
        open_encoder(f"onnx:{text_tower(tmp_path / 'words.onnx')}")
    file = image_tower(tmp_path / "a.onnx")
    for settings, message in [
        ('{"size": 9}', r"takes images of \[3, 8, 8\]"),
        ('{"sise": 8}', "did you mean 'size'"),
        ('{"resize": "x"}', "write shortest or squash"),
        ('{"std": [0, 1, 1]}', "std above 0"),
        ("{", "is not JSON"),
    ]:
        (tmp_path / "a.json").write_text(settings)
        with pytest.raises((EncoderError, SettingsError), match=message):
            open_encoder(f"onnx:{file}")
    image_tower(tmp_path / "four.onnx", channels=4, weight=TABLE[:4])
    with pytest.raises(EncoderError, match=r"takes images of \[4, 8, 8\]"):
        open_encoder(f"onnx:{tmp_path / 'four.onnx'}")


def test_two_possible_outputs_are_refused(tmp_path):
    nodes = [helper.make_node("Flatten", ["x"], [name]) for name in ("one", "two")]
    shape = [("one", TensorProto.FLOAT, [1, 192]), ("two", TensorProto.FLOAT, [1, 192])]
    file = model(tmp_path / "a.onnx", [("x", TensorProto.FLOAT, [1, 3, 8, 8])], shape, nodes)
    with pytest.raises(EncoderError, match=r"one output of \(batch, dim\).*one \[1, 192\], two"):
        open_encoder(f"onnx:{file}")


def test_towers_of_different_dims_are_refused(tmp_path):
    image_tower(tmp_path / "image.onnx")
    text_tower(tmp_path / "text.onnx", TABLE[:, :4])
    with pytest.raises(EncoderError, match=r"tokenizer.json cannot be read"):
        open_encoder(f"onnx:{tmp_path}")
    tiny_models.tokens(tmp_path, start=True)
    encoder = open_encoder(f"onnx:{tmp_path}")
    with pytest.raises(EncoderError, match="the image tower returns 5 numbers"):
        encoder.embed_text(["a cat"])
