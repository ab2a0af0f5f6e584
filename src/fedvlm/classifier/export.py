"""Export a client's classifier: tensors, a model card, and on request ONNX."""

import json
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlm.channel.settings import Channel
from fedvlm.classifier.personalised import Personalised, client_classifier
from fedvlm.core import Frozen
from fedvlm.errors import DataError, SettingsError
from fedvlm.maths.calibration import largest_coverage, min_samples
from fedvlm.maths.novelty import FALSE_REJECTIONS
from fedvlm.plugins import require
from fedvlm.record import Record
from fedvlm.storage.files import write_file, write_index

MAX_ONNX_ERROR = 1e-5  # of logits relative to the largest; ten times that of probabilities
ONNX_OPSET = 17
CARD = Path(__file__).parent / "card.txt"


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
        write_file(place / ONNX_SCRIPT_FILE, ONNX_SCRIPT.encode())
    else:  # of an earlier export, which this one replaces
        for name in (ONNX_FILE, ONNX_SCRIPT_FILE):
            (place / name).unlink(missing_ok=True)
    training, scores = _training_scores(result, client)
    story = ClassifierOrigin(result.manifest, training, scores["test_rows"], scores["test_hits"])
    write_file(place / "README.md", model_card(classifier, story, place.name, onnx).encode())
    write_index(place)
    return classifier


def require_local_tensors(classifier: Personalised, client: str) -> Personalised:
    """Refuse a classifier without its local tensors: after a deployment they are at the client's site."""
    _, first = classifier.method.init(classifier.frozen)
    if missing := sorted(first.keys() - classifier.local.keys()):
        where = "the classifier is there, in the kit's folder classifiers"
        raise DataError(f"the local tensor {missing[0]!r} of {client} never left its site; {where}")
    return replace(classifier, local={key: classifier.local[key] for key in first})


def _training_scores(result: Record, client: str) -> tuple[str, Mapping[str, Any]]:
    """Return the training of the classifier and the client's final scores."""
    for training, about in result.trainings().items():
        if client in about["train"]:
            return training, about["scores"][client]
    raise DataError(f"no training of {result.folder} has scores of {client!r}; run it again")


def linear_head(classifier: Personalised) -> tuple[Tensor, Tensor] | None:
    """Return weight (classes, dim) and bias (classes,) if the logits are linear in the embedding."""
    basis = torch.eye(classifier.frozen.dim)
    positive_logits, negative_logits = classifier.logits(basis).double(), classifier.logits(-basis).double()
    bias = (positive_logits + negative_logits).mean(dim=0) / 2
    weight = ((positive_logits - negative_logits) / 2).T
    x = probe_embeddings(classifier.frozen)
    expected = classifier.logits(x).double()
    gap = (x.double() @ weight.T + bias - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    return (weight.float(), bias.float()) if gap < MAX_ONNX_ERROR else None


def probe_embeddings(frozen: Frozen) -> Tensor:
    """Return unit-norm embeddings to compare two heads on."""
    draw = torch.randn(256, frozen.dim, generator=torch.Generator().manual_seed(0))
    unit_samples = torch.nn.functional.normalize(draw, dim=1)
    if frozen.text is None:
        return unit_samples
    return torch.cat([unit_samples, torch.nn.functional.normalize(frozen.text.float(), dim=1)])


def can_reject(classifier: Personalised) -> bool:
    """Return whether a classifier has held-out samples enough to mark strange images."""
    novelty = classifier.novelty
    return novelty is not None and len(novelty.held_out_scores) >= min_samples(1 - FALSE_REJECTIONS)


class _TracedClassifier(torch.nn.Module):
    """A classifier as torch traces it: embeddings in; logits, probabilities and novelty out."""

    def __init__(self, classifier: Personalised) -> None:
        super().__init__()
        self.classifier, self.head = classifier, linear_head(classifier)
        calibration = classifier.calibration
        fits = () if calibration is None else calibration.findings or (calibration,)
        self.temperature = torch.tensor([fit.log_temperature for fit in fits] or [0.0]).exp()  # (1,) or (findings,)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        unit, classifier = torch.nn.functional.normalize(x, dim=1), self.classifier
        if self.head is not None:  # maps and prompts are folded in
            logits = unit @ self.head[0].T + self.head[1]
        else:
            sent = classifier.method.send(classifier.shared, classifier.client)
            logits = classifier.method.predict(classifier.frozen, sent, classifier.local, unit)
        scaled = logits / self.temperature
        outputs = (logits, scaled.sigmoid() if classifier.frozen.multi_label else scaled.softmax(1))
        return outputs if classifier.novelty is None else (*outputs, classifier.novelty.scores(unit))


def to_onnx(classifier: Personalised) -> bytes:
    """Return the whole classifier over embeddings as ONNX; it is checked against torch."""
    onnx, onnxruntime = (require(name, f"an ONNX file needs {name}", "onnx") for name in ("onnx", "onnxruntime"))
    name, needs = classifier.method.name, classifier.method.traits.needs
    if unsupported := needs & {"patches", "image tower"}:
        raise SettingsError(f"{name} predicts from {min(unsupported)}, not from pooled embeddings; leave --onnx out")
    x = 3 * probe_embeddings(classifier.frozen)
    names = ["logits", "probabilities"] + (["novelty"] if classifier.novelty is not None else [])
    model = onnx.load_from_string(_trace(_TracedClassifier(classifier), x, names))
    about = {"encoder": classifier.encoder, "client": classifier.client, "method": name}
    about["classes"] = json.dumps(classifier.frozen.classes, ensure_ascii=False)
    if classifier.frozen.multi_label:
        about["multi_label"] = "true"
    if can_reject(classifier):
        about["rejection_limit"] = repr(classifier.rejection_limit())
    onnx.helper.set_model_props(model, about)
    onnx.checker.check_model(model)
    data = bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    logits, probabilities = session.run(names[:2], {"embeddings": x.numpy()})
    expected = classifier.logits(x)
    gap = float((torch.from_numpy(logits) - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    # Logits in the hundreds have an absolute error of float32 that probabilities show.
    gap = max(gap, float(np.abs(probabilities - classifier.predict_proba(x)).max()) / 10)
    if not gap < MAX_ONNX_ERROR:
        raise DataError(f"the ONNX classifier differs from torch by {gap:.1e}; it is not written")
    return data


def _trace(module: _TracedClassifier, x: Tensor, names: list[str]) -> bytes:
    """Return the graph that torch traces, for versions that runtimes of the last years read."""

    def logaddexp(graph: Any, first: Any, second: Any) -> Any:  # torch knows no ONNX of it
        largest = graph.op("Max", first, second)
        parts = [graph.op("Exp", graph.op("Sub", part, largest)) for part in (first, second)]
        return graph.op("Add", largest, graph.op("Log", graph.op("Add", *parts)))

    exporter: Any = torch.onnx  # its types leave out what it still offers
    exporter.register_custom_op_symbolic("aten::logaddexp", logaddexp, ONNX_OPSET)
    file = BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad(), redirect_stdout(StringIO()):  # torch prints failed graphs
            warnings.simplefilter("ignore")
            exporter.export(
                module,
                (x,),
                file,
                input_names=["embeddings"],
                output_names=names,
                dynamic_axes={name: {0: "samples"} for name in ("embeddings", *names)},
                opset_version=ONNX_OPSET,
                dynamo=False,
            )
    except RuntimeError as error:
        method = module.classifier.method.name
        raise SettingsError(
            f"{method} cannot be written as ONNX: its prediction is not linear in the embedding, and ONNX has no form "
            f"for the rest ({str(error).splitlines()[0][:120]}); leave --onnx out"
        ) from error
    return file.getvalue()


ONNX_SCRIPT = '''"""Run classifier.onnx on embeddings (samples, dim) of its encoder: python run_onnx.py FILE.npy"""
import json, sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession("classifier.onnx", providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
x = numpy.load(sys.argv[1], allow_pickle=False).astype(numpy.float32)
(probabilities,) = session.run(["probabilities"], {"embeddings": x})
classes = json.loads(about["classes"])
for row in probabilities:
    findings = "|".join(name for name, p in zip(classes, row) if p >= 0.5) or "no finding"
    print(findings if "multi_label" in about else classes[row.argmax()], *row)
'''
ONNX_FILE, ONNX_SCRIPT_FILE = "classifier.onnx", "run_onnx.py"


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
    kinds = ("findings", "labels of test samples") if frozen.multi_label else ("classes", "test samples")
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
    for number, change in enumerate(source.get("history", ()), start=2):
        classes = f", new classes {', '.join(change['new_classes'])}" if change["new_classes"] else ""
        changes = f"{change['added']} samples added, {change['removed']} removed{classes}"
        facts[f"version {number}"] = f"grown from `{change['from']}`: {changes}"
    about = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    private = (
        "It holds tensors that were fitted to this client's samples and never left the client: "
        "protect the\nfolder as you protect the samples."
        if classifier.local or classifier.novelty is not None
        else "It holds no tensor of this client's own: all clients of the run have the same."
    )
    head = (
        f"\n`{ONNX_FILE}` takes embeddings (samples, {frozen.dim}) of that encoder, of any norm, and gives `logits`,\n"
        f"calibrated `probabilities` and, if it can reject, `novelty`. `{ONNX_SCRIPT_FILE}` runs it without fedvlm.\n"
        if onnx
        else ""
    )
    values: dict[str, Any] = {
        "method": classifier.method.name,
        "client": classifier.client,
        "about": about,
        "settings": settings,
    }
    values |= {"n_classes": len(frozen.classes), "kind": kinds[0], "samples": kinds[1], "dim": frozen.dim, "name": name}
    values |= {"n_samples": story.rows, "n_correct": story.n_correct, "accuracy": story.n_correct / max(1, story.rows)}
    values |= {"calibration": _calibration_text(classifier), "private": private, "head": head}
    values |= {"images": "IMAGES" if "@" in classifier.encoder else "TABLE  # of embeddings"}
    return CARD.read_text("utf-8").format(**values, classes=", ".join(frozen.classes))


def _calibration_text(classifier: Personalised) -> str:
    """What its probabilities and sets are worth."""
    calibration = classifier.calibration
    if calibration is None or not calibration.rows:
        return "Its probabilities are not calibrated: there were no validation samples."
    text = f"Its probabilities are calibrated on {calibration.rows} validation samples."
    count = min(len(fit.scores) for fit in calibration.findings or (calibration,))
    if can_reject(classifier):
        text += " `--reject` marks images unlike any it has seen,\nand with them about 5 % of familiar ones."
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
