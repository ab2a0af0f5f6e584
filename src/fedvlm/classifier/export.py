"""Export a client's classifier: tensors, a model card, and on request an ONNX head."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlm.channel.settings import Channel
from fedvlm.classifier.personalised import Personalised, client_classifier
from fedvlm.core import Frozen
from fedvlm.errors import DataError, SettingsError
from fedvlm.maths.calibration import largest_coverage
from fedvlm.record import Record
from fedvlm.storage.files import write_file, write_index

MAX_RELATIVE_ERROR = 1e-4  # relative to the largest logit


def export(run: str | Path, client: str, folder: str | Path, onnx: bool = False) -> Personalised:
    """Write one client's classifier; `Personalised.from_pretrained` loads it."""
    result, place = Record(Path(run)), Path(folder)
    classifier = require_local_tensors(client_classifier(result, client), client)
    head = to_onnx(classifier) if onnx else None  # refused before anything is written
    if place.is_dir() and any(place.iterdir()) and not (place / "classifier.safetensors").exists():
        raise DataError(f"{place} holds other files; choose a new or an empty directory")
    classifier.save_pretrained(place)
    if head is not None:
        write_file(place / ONNX_FILE, head)
    else:
        (place / ONNX_FILE).unlink(missing_ok=True)  # of an earlier export, which this one replaces
    training, scores = _training_scores(result, client)
    story = ClassifierOrigin(result.manifest, training, scores["test_rows"], scores["test_hits"])
    write_file(place / "README.md", model_card(classifier, story, place.name, onnx).encode())
    write_index(place)
    return classifier


def require_local_tensors(classifier: Personalised, client: str) -> Personalised:
    """Refuse a classifier without its local tensors: after a deployment they are at the client's site."""
    _, first = classifier.method.init(classifier.frozen)
    if missing := sorted(first.keys() - classifier.local.keys()):
        raise DataError(
            f"the local tensor {missing[0]!r} of {client} never left its site; the classifier is "
            "there, in the kit's folder classifiers"
        )
    return replace(classifier, local={key: classifier.local[key] for key in first})


def _training_scores(result: Record, client: str) -> tuple[str, Mapping[str, Any]]:
    """Return the training of the classifier and the client's final scores."""
    for training, about in result.trainings().items():
        if client in about["train"]:
            return training, about["scores"][client]
    raise DataError(f"no training of {result.folder} has scores of {client!r}; run it again")


def linear_head(classifier: Personalised) -> tuple[Tensor, Tensor]:
    """Return weight (classes, dim) and bias (classes,) of the head; one that is not linear is refused."""
    method, frozen = classifier.method, classifier.frozen
    if unsupported := method.traits.needs & {"patches", "image tower"}:
        raise SettingsError(
            f"{method.name} predicts from {min(unsupported)}, and ONNX holds a head over pooled embeddings "
            "only; leave --onnx out"
        )
    basis = torch.eye(frozen.dim)
    positive_logits, negative_logits = classifier.logits(basis).double(), classifier.logits(-basis).double()
    bias = (positive_logits + negative_logits).mean(dim=0) / 2
    weight = ((positive_logits - negative_logits) / 2).T
    x = probe_embeddings(frozen)
    expected = classifier.logits(x).double()
    gap = (x.double() @ weight.T + bias - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    if not gap < MAX_RELATIVE_ERROR:
        raise SettingsError(
            f"{method.name} is not linear in the embedding (off by {float(gap):.1e} of the largest "
            "logit), and only linear heads are written as ONNX; leave --onnx out"
        )
    return weight.float(), bias.float()


def probe_embeddings(frozen: Frozen) -> Tensor:
    """Return unit-norm embeddings to compare two heads on."""
    draw = torch.randn(256, frozen.dim, generator=torch.Generator().manual_seed(0))
    unit_samples = torch.nn.functional.normalize(draw, dim=1)
    if frozen.text is None:
        return unit_samples
    return torch.cat([unit_samples, torch.nn.functional.normalize(frozen.text.float(), dim=1)])


def to_onnx(classifier: Personalised) -> bytes:
    """Return the head, with any map folded in, as ONNX; it is checked against torch."""
    try:
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper
    except ImportError as error:
        raise SettingsError(f"an ONNX head needs {error.name}; pip install 'fedvlm[onnx]'") from error
    weight, bias = linear_head(classifier)
    classes, dim = weight.shape
    min_norm = np.float32(1e-12)
    log_temperature = 0.0 if classifier.calibration is None else classifier.calibration.log_temperature
    graph = helper.make_graph(
        [
            helper.make_node("ReduceL2", ["embeddings"], ["length"], axes=[1], keepdims=1),
            helper.make_node("Max", ["length", "least"], ["divisor"]),
            helper.make_node("Div", ["embeddings", "divisor"], ["unit"]),
            helper.make_node("Gemm", ["unit", "weight", "bias"], ["logits"], transB=1),
            helper.make_node("Mul", ["logits", "cold"], ["calibrated"]),
            helper.make_node("Softmax", ["calibrated"], ["probabilities"], axis=1),
        ],
        "classifier",
        [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["rows", dim])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", classes])
            for name in ("logits", "probabilities")
        ],
        [
            numpy_helper.from_array(value, name)
            for name, value in (
                ("weight", weight.numpy()),
                ("bias", bias.numpy()),
                ("least", min_norm.reshape(1)),
                ("cold", np.exp(-np.float32(log_temperature)).reshape(1)),
            )
        ],
    )
    # Versions that runtimes of the last years read.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    about = {
        "classes": json.dumps(classifier.frozen.classes, ensure_ascii=False),
        "encoder": classifier.encoder,
        "client": classifier.client,
        "method": classifier.method.name,
    }
    helper.set_model_props(model, about)
    onnx.checker.check_model(model)
    data = bytes(model.SerializeToString())
    x = 3 * probe_embeddings(classifier.frozen)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    onnx_logits = torch.from_numpy(session.run(["logits"], {"embeddings": x.numpy()})[0])
    expected = classifier.logits(x)
    gap = float((onnx_logits - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not gap < MAX_RELATIVE_ERROR:
        raise DataError(f"the ONNX head differs from torch by {gap:.1e}; it is not written")
    return data


ONNX_FILE = "classifier.onnx"


@dataclass(frozen=True)
class ClassifierOrigin:
    """The run that a classifier comes from, and its test accuracy."""

    about: Mapping[str, Any]  # data, rows, channel, versions, commit, dirty: as a manifest has them
    training: str
    rows: int  # that it was tested on
    n_correct: int


def model_card(classifier: Personalised, story: ClassifierOrigin, name: str, onnx: bool = False) -> str:
    source, frozen = story.about, classifier.frozen
    settings = "\n".join(f"| `{key}` | {json.dumps(value)} |" for key, value in asdict(classifier.method).items())
    channel = source["identity"]["channel"]
    facts = {
        "method": f"`{classifier.method.name}`",
        "client": f"`{classifier.client}`",
        "encoder": f"`{classifier.encoder}` (name and fingerprint)",
        "data": f"`{source['data']}`, fingerprint `{source['rows'][:16]}`",
        "training": f"`{story.training}`, seed {frozen.seed}",
        "channel": f"`{json.dumps(channel)}`" if channel != asdict(Channel()) else "off",
        "fedvlm": f"{source['versions']['fedvlm']}, commit {source['commit'] or 'unknown'}"
        + (", changed since" if source["dirty"] else ""),
    }
    about = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    private = (
        "It holds tensors that were fitted to this client's samples and never left the client: "
        "protect the\nfolder as you protect the samples."
        if classifier.local
        else "It holds no tensor of this client's own: all clients of the run have the same."
    )
    head = (
        f"\n`{ONNX_FILE}` takes embeddings (samples, {frozen.dim}) of that encoder, of any norm, and "
        "gives `logits` and `probabilities`.\n"
        if onnx
        else ""
    )
    return f"""# {classifier.method.name} for {classifier.client}

A classifier over {len(frozen.classes)} classes on top of a frozen encoder, personalised for one
client of a federation. It is of use with that encoder only: another fingerprint is refused.

| | |
|---|---|
{about}

On {story.rows} test samples of this client it was right {story.n_correct} times
({story.n_correct / max(1, story.rows):.1%}). Its accuracy on other data is unknown.

{_calibration_text(classifier)}

{private}

## Use
```
fedvlm predict {name} {"IMAGES" if "@" in classifier.encoder else "TABLE  # of embeddings"}
```
```python
from fedvlm import Personalised
classifier = Personalised.from_pretrained("{name}")
classifier.predict(embeddings)  # (rows, {frozen.dim}) from the encoder above
```
{head}
## Classes
{", ".join(frozen.classes)}

## Settings
| setting | value |
|---|---|
{settings}
"""


def _calibration_text(classifier: Personalised) -> str:
    """What its probabilities and sets are worth."""
    calibration = classifier.calibration
    if calibration is None or not calibration.rows:
        return "Its probabilities are not calibrated: there were no validation samples."
    text = f"Its probabilities are calibrated on {calibration.rows} validation samples."
    count = len(calibration.scores)
    if count < 2:
        return f"{text} No samples were set\naside, so it promises no coverage."
    return (
        f"{text} {count} further samples were set\naside: `--coverage` may be up "
        f"to {largest_coverage(count):g}, for images like this client's."
    )


def save_with_card(classifier: Personalised, story: ClassifierOrigin, folder: Path) -> None:
    """Save a classifier and its card."""
    classifier.save_pretrained(folder)
    write_file(folder / "README.md", model_card(classifier, story, folder.name).encode())
