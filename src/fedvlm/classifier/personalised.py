"""Load and apply one client's classifier: its tensors, and the encoder it belongs to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.core import Frozen, Method, Tensors, make
from fedvlm.data.arrays import check_labels, label_ids
from fedvlm.data.manifests import NO_FINDING
from fedvlm.data.sources import Window, check_window
from fedvlm.encoders import fingerprint, open_encoder
from fedvlm.errors import DataError, EncoderError, FedVLMError, SettingsError, suggest_path
from fedvlm.evaluate.findings import DEFAULT_THRESHOLD
from fedvlm.maths.calibration import Calibration, score_limits
from fedvlm.maths.novelty import FALSE_REJECTIONS, Novelty
from fedvlm.record import Record
from fedvlm.runner.load import open_towers, tower_classes
from fedvlm.runner.prepare import frozen_from, method_for, template_of, text_of
from fedvlm.runner.training import calibration_from_json, calibration_to_json, read_calibration, read_novelty
from fedvlm.runner.tune import seed_search
from fedvlm.storage.files import read_tensors, write_tensors

MIN_VALIDATION_SAMPLES = 10  # validation rows that say little
UNSURE = "?"  # behind a finding in a prediction set that may be absent as well
DEFAULT_TEMPLATE = "{}."  # around class names behind a prompt, whatever the template, up to 0.1


@dataclass(frozen=True, repr=False)
class Personalised:
    """One client's classifier: frozen, shared and local tensors, and the encoder it belongs to.

    With several findings per image, logits are log odds and probabilities are those of each finding being present.

    Example:
        >>> import fedvlm, numpy as np
        >>> x = np.random.default_rng(0).normal(size=(2, 60, 8))
        >>> y = np.tile([0, 1], 30)
        >>> result = fedvlm.run("ridge", clients={"a": (x[0], y), "b": (x[1], y)}, classes=["cat", "dog"])
        >>> result.personalised("a").predict_proba(x[0]).shape
        (60, 2)
    """

    method: Method
    frozen: Frozen
    shared: Tensors
    local: Tensors
    client: str
    encoder: str  # name and fingerprint
    calibration: Calibration | None = None
    window: Window | None = None  # what was black and what white in its images of 16 bits
    novelty: Novelty | None = None  # how unlike its client's samples an image is

    def __repr__(self) -> str:
        owner = f" of {self.client}" if self.client else ""
        n_classes, dim = len(self.frozen.classes), self.frozen.dim
        return f"<{self.method.name}{owner}: {n_classes} classes, {self.encoder}, {dim} dimensions>"

    @property
    def classes_(self) -> NDArray[np.str_]:
        """The class names in the order of the probabilities' columns, as scikit-learn calls them."""
        return np.array(self.frozen.classes)

    def logits(self, x: Any) -> Tensor:
        """Return logits (samples, classes) of embeddings by the encoder this was trained on.

        Embeddings are pooled, or what the method needs instead: patches or pixels; an array, a tensor or a data frame.
        """
        x = self.check_embeddings(x)
        sent = self.method.send(self.shared, self.client)
        out: Tensor = self.method.predict(self.frozen, sent, self.local, x)
        return out

    def check_embeddings(self, x: Any) -> Tensor:
        """Return embeddings as `predict` of the method takes them; refuse a wrong shape and NaN."""
        try:
            x = torch.as_tensor(x if isinstance(x, Tensor) else np.asarray(x))  # also of a data frame
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"the embeddings are not numeric ({error}); pass an array of numbers") from error
        expected_shape: tuple[int | str, ...] = ("samples", self.frozen.dim)
        if "image tower" in self.method.traits.needs:
            expected_shape = ("samples", 3, "height", "width")
        elif "patches" in self.method.traits.needs:
            expected_shape = ("samples", "patches", self.frozen.dim)
        sizes = [pair for pair in zip(x.shape, expected_shape, strict=False) if isinstance(pair[1], int)]
        fits = x.ndim == len(expected_shape) and all(size == wanted for size, wanted in sizes)
        if not fits:
            wanted = f"the shape ({', '.join(map(str, expected_shape))}) and come from {self.encoder}"
            raise DataError(f"embeddings must have {wanted}; got {tuple(x.shape)}")
        if not x.isfinite().all():
            raise DataError("the embeddings hold NaN or infinite numbers; check their source")
        return torch.nn.functional.normalize(x.float(), dim=1) if len(expected_shape) == 2 else x.float()

    def predict(self, x: Any) -> list[str]:
        """Return the most probable class of each sample; with several findings their names, as `edema|mass`."""
        if self.frozen.multi_label:
            rows = self.log_probabilities(self.logits(x))
            return ["|".join(self.present_findings(row)) or NO_FINDING for row in rows]
        return [self.frozen.classes[i] for i in self.logits(x).argmax(dim=1).tolist()]

    def present_findings(self, log_probabilities: Tensor) -> tuple[str, ...]:
        """Return the findings that are more probable than not."""
        pairs = zip(self.frozen.classes, log_probabilities.exp().tolist(), strict=True)
        return tuple(name for name, p in pairs if p >= DEFAULT_THRESHOLD)

    def predict_proba(self, x: Any) -> NDArray[np.float32]:
        """Return probabilities (samples, classes), calibrated if validation samples were available."""
        return self.log_probabilities(self.logits(x)).exp().float().numpy()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log-probabilities of each class at the calibrated temperature."""
        if self.calibration is not None:
            return self.calibration.log_probabilities(logits)
        double = logits.double()
        return torch.nn.functional.logsigmoid(double) if self.frozen.multi_label else double.log_softmax(dim=1)

    def predict_set(self, x: Any, coverage: float = 0.95) -> list[tuple[str, ...]]:
        """Return prediction sets with the promised coverage, the most probable class first.

        With several findings, a set has the findings that may be present; a question mark says that it may be absent.
        """
        return self.prediction_sets(self.log_probabilities(self.logits(x)), coverage)

    def prediction_sets(self, log_probabilities: Tensor, coverage: float) -> list[tuple[str, ...]]:
        """Return prediction sets of log-probabilities, as `predict_set` does of embeddings."""
        if self.calibration is None:
            problem = f"no samples were set aside for {self!r}, so no coverage can be promised"
            raise DataError(f"{problem}; train it with clients.calibration_ratio = 0.33, or leave the coverage out")
        names = self.frozen.classes
        if self.calibration.findings:
            return self._finding_sets(self.calibration, log_probabilities, coverage)
        inside = -log_probabilities <= score_limits(self.calibration, names, coverage)
        order = log_probabilities.argsort(dim=1, descending=True).tolist()
        return [tuple(names[i] for i in ranks if held[i]) for ranks, held in zip(order, inside.tolist(), strict=True)]

    def _finding_sets(
        self, calibration: Calibration, log_probabilities: Tensor, coverage: float
    ) -> list[tuple[str, ...]]:
        columns = []
        for name, fit, present in zip(
            self.frozen.classes, calibration.findings, log_probabilities.unbind(1), strict=True
        ):
            limits = score_limits(fit, ("absent", "present"), coverage)
            may_be_present = -present <= limits[1]
            may_be_absent = -(-present.expm1()).clamp(min=1e-300).log() <= limits[0]
            pairs = zip(may_be_present.tolist(), may_be_absent.tolist(), strict=True)
            columns.append([(name + UNSURE if absent else name) if here else "" for here, absent in pairs])
        return [tuple(filter(None, row)) for row in zip(*columns, strict=True)] if len(log_probabilities) else []

    def rejection_limit(self, rate: float = FALSE_REJECTIONS) -> float:
        """Return the novelty above which an image is rejected, so that `rate` of familiar ones are, too."""
        if self.novelty is None:
            problem = f"{self!r} has no held-out samples of its client, so it cannot tell strange images"
            raise DataError(f"{problem}; train it with validation samples, or do not reject")
        return self.novelty.limit(rate)

    def reject(self, x: Any, rate: float = FALSE_REJECTIONS) -> NDArray[np.bool_]:
        """Return which embeddings are unlike the client's samples."""
        limit = self.rejection_limit(rate)
        assert self.novelty is not None
        return (self.novelty.scores(self.check_embeddings(x)) > limit).numpy()

    def warnings(self) -> list[str]:
        """Return warnings about the calibration of the probabilities."""
        rows = 0 if self.calibration is None else self.calibration.rows
        if not rows:
            return ["the probabilities are not calibrated: there were no validation samples"]
        if rows <= MIN_VALIDATION_SAMPLES:
            return [f"the probabilities are calibrated on only {rows} validation samples"]
        return []

    def score(self, x: Any, y: Any) -> float:
        """Return the accuracy; labels are numbers or names of classes, or (samples, findings) of 0, 1 and NaN."""
        if self.frozen.multi_label:
            truth = torch.as_tensor(np.asarray(y, np.float64))
            if tuple(truth.shape) != (len(x), len(self.frozen.classes)):
                raise DataError(f"labels have shape {tuple(truth.shape)}; give {(len(x), len(self.frozen.classes))}")
            known = truth.isfinite() & (truth >= 0)
            return float(((self.logits(x) > 0) == (truth == 1))[known].double().mean())
        labels = check_labels("the labels", np.asarray(y))
        if labels.shape != (len(x),) or not len(x):
            raise DataError(f"{len(x)} samples and labels of shape {labels.shape}; give one label per sample")
        predicted = self.logits(x).argmax(dim=1).numpy()
        return float((predicted == label_ids("the labels", labels, self.frozen.classes)).mean())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the classifier to `classifier.safetensors` in a folder; the encoder is not part of it."""
        tensors = {f"shared/{key}": value for key, value in self.shared.items()}
        tensors |= {f"local/{key}": value for key, value in self.local.items()}
        if (text := text_of(self.frozen)) is not None:
            tensors["frozen/text"] = text
        if self.frozen.descriptions is not None:
            tensors["frozen/descriptions"] = self.frozen.descriptions
        if self.novelty is not None:
            tensors |= {f"novelty/{key}": value for key, value in self.novelty._asdict().items()}
        about = {
            "method": {"name": self.method.name, **asdict(self.method)},
            "classes": self.frozen.classes,
            "dim": self.frozen.dim,
            "scale": self.frozen.scale,
            "seed": self.frozen.seed,
            "client": self.client,
            "encoder": self.encoder,
            **({"multi_label": True} if self.frozen.multi_label else {}),
        } | template_of(self.frozen)
        if self.window is not None:
            about["window"] = self.window
        if self.calibration is not None:
            about["calibration"] = calibration_to_json(self.calibration)
        write_tensors(Path(folder) / "classifier.safetensors", tensors, about)

    @classmethod
    def from_pretrained(cls, folder: str | Path, encoder: str = "") -> "Personalised":
        """Load a saved classifier; `encoder` says where its encoder is now, if the method needs it."""
        path = Path(folder) / "classifier.safetensors"
        if not path.exists():
            suggestion = "" if path.parent.is_dir() else suggest_path(path.parent)
            raise DataError(f"{folder} holds no classifier; {suggestion}`fedvlm export` writes one")
        tensors, about = read_tensors(path)

        def group(name: str) -> Tensors:
            return {k.split("/", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{name}/")}

        frozen_tensors = group("frozen")
        frozen = frozen_from(about, frozen_tensors.get("text"), about["seed"], frozen_tensors.get("descriptions"))
        method = make(**about["method"])
        return cls(
            method_for(method, frozen),
            attach_towers(frozen, method, about, encoder),
            group("shared"),
            group("local"),
            about["client"],
            about["encoder"],
            calibration_from_json(about["calibration"]) if "calibration" in about else None,
            check_window(about.get("window")),
            Novelty(**novelty) if (novelty := group("novelty")) else None,
        )


def reopen_encoder(encoder: str, location: str = "", access: Mapping[str, Any] | None = None) -> Any:
    """Open the encoder of a training again and check its fingerprint.

    `location` is its present name, if that has changed.
    """
    name, _, expected_fingerprint = encoder.rpartition("@")
    if not (name or location):
        remedy = "ask with a table of embeddings of the same origin, or name with --encoder what made them"
        raise EncoderError(f"{encoder} holds embeddings and sees no images; {remedy}")
    try:
        box = open_encoder(location or name, **(access or {}))
    except FedVLMError as error:
        raise type(error)(f"{error} (the encoder is {encoder}; if it has another name here, give --encoder)") from error
    if not fingerprint(box).startswith(expected_fingerprint):
        raise SettingsError(
            f"{location or name} is not the encoder this was trained on: its fingerprint is "
            f"{fingerprint(box)[:16]}, not {expected_fingerprint} ({name}); bring the old weights back, or train "
            "again"
        )
    return box


def attach_towers(frozen: Frozen, method: Method, manifest: Mapping[str, Any], location: str = "") -> Frozen:
    """Attach the towers a method needs, from the encoder it was trained on."""
    if not method.traits.needs & {"text tower", "image tower"}:
        return frozen
    template = manifest.get("template", DEFAULT_TEMPLATE)
    box = reopen_encoder(manifest["encoder"], location)
    names = tower_classes(frozen.classes, frozen.multi_label)
    text, image = open_towers(box, names, template, method.traits.needs)
    return replace(frozen, text_tower=text, image_tower=image)


def client_classifier(record: Record, client: str, seed: int | None = None) -> Personalised:
    """Return a client's own classifier, from the first training in which it trained."""
    if names := record.manifest.get("local"):
        problem = f"{', '.join(names)} of {client!r} never left its site"
        raise SettingsError(f"{problem}; its classifier is there, in the folder classifiers of its kit")
    for training in record.manifest["trainings"]:
        shared, local = record.outcome(training, seed)
        if client in local:
            classifier = _classifier(record, shared, local[client], client, seed)
            name = record.path_of(training, seed, "json").stem
            novelty = read_novelty(record, name, client)
            return replace(classifier, calibration=read_calibration(record, name, client), novelty=novelty)
    clients = ", ".join(record.manifest["clients"])
    raise SettingsError(f"no client {client!r} trained in {record.folder}; its clients are {clients}")


def unseen_classifier(record: Record, training: str | None = None, seed: int | None = None) -> Personalised:
    """Return the classifier of an unseen client: the shared and the initial local tensors."""
    training = training or record.manifest["trainings"][0]
    shared, _ = record.outcome(training, seed)
    bare = _classifier(record, shared, {}, "", seed)
    _, local = bare.method.init(bare.frozen)
    return _classifier(record, shared, local, "", seed)


def _classifier(record: Record, shared: Tensors, local: Tensors, client: str, seed: int | None) -> Personalised:
    about = record.manifest
    text = None if about["text"] is None else torch.tensor(about["text"])
    seed = about["identity"]["seeds"][0] if seed is None else seed
    frozen = frozen_from(about, text, seed, record.descriptions)
    chosen = seed_search(about, seed).get("chosen", {})
    method = method_for(make(**{**about["identity"]["method"], **chosen}), frozen)
    frozen = attach_towers(frozen, method, about)
    window = check_window(about["identity"]["source"].get("window"))
    return Personalised(method, frozen, shared, local, client, about["encoder"], window=window)
