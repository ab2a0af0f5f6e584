"""Embeddings in memory: one pair of arrays (embeddings, labels) per client."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.data import table
from fedvlm.errors import DataError, join_names

IN_MEMORY = "memory"  # the name of the data set and of the encoder


def are_arrays(clients: Any) -> bool:
    """Tell arrays by client from settings of how samples become clients."""
    if not isinstance(clients, Mapping) or not clients:
        return False
    return all(isinstance(pair, tuple | list) and len(pair) > 0 and np.ndim(pair[0]) > 0 for pair in clients.values())


def from_arrays(
    clients: Mapping[str, Sequence[Any]], classes: Sequence[str] | None = None, text: Any = None, scale: float = 100.0
) -> table.EmbeddedTable:
    """Make a table of embeddings (samples, dim) and labels (samples,) of each client; labels are numbers or names.

    A third array of a client are embeddings of its samples without a label.
    `text` (classes, dim) are embeddings of the class names, if there is a text tower, and `scale` its logit scale.
    Labels (samples, findings) of 0, 1 and NaN (unknown) are several findings per image; then `text` is
    (findings, 2, dim), for images without and with the finding.
    """
    for id, pair in clients.items():
        if len(pair) not in (2, 3):
            raise DataError(f"client {str(id)!r} has {len(pair)} arrays; give (x, y), or (x, y, unlabelled_x)")
    pairs = {str(id): _check_pair(f"client {str(id)!r}", *pair[:2]) for id, pair in clients.items()}
    third = {str(id): arrays[2] for id, arrays in clients.items() if len(arrays) == 3 and len(arrays[2])}
    unlabelled = {id: _check_matrix(f"client {id!r}, unlabelled", values) for id, values in third.items()}
    labels_by_client = {id: y for id, (_, y) in pairs.items()}
    dims = {id: x.shape[1] for id, (x, _) in pairs.items()}
    dims |= {f"{id}, unlabelled": x.shape[1] for id, x in unlabelled.items()}
    if len(set(dims.values())) > 1:
        raise DataError(f"the clients' embeddings are of unequal length, {dims}; use one encoder")
    dim = next(iter(dims.values()))
    text_vectors = None if text is None else _unit("text", _tensor("text", text))
    n_axes = {labels.ndim for labels in labels_by_client.values()}
    if len(n_axes) > 1:
        raise DataError("some clients have one label per sample and some several findings; give all the same")
    findings, is_multi = None, n_axes == {2}
    if text_vectors is not None and (text_vectors.ndim != 2 + is_multi or text_vectors.shape[-1] != dim):
        expected = f"(findings, 2, {dim})" if is_multi else f"(classes, {dim})"
        raise DataError(f"text has shape {tuple(text_vectors.shape)} and embeddings length {dim}; give {expected}")
    if is_multi:
        matrix = _join_findings(labels_by_client, classes)
        class_names = tuple(map(str, classes or [f"finding {number}" for number in range(matrix.shape[1])]))
        table.check_class_names("classes", class_names)
        labels, findings = table.encode_findings("clients", matrix, class_names)
    else:
        if classes is None:  # otherwise numbers and names both refer to them
            _check_same_kind(labels_by_client)
        class_names = _class_names(labels_by_client, classes, text_vectors)
        labels = np.concatenate([label_ids(f"client {id!r}", y, class_names) for id, y in labels_by_client.items()])
    if text_vectors is not None and len(text_vectors) != len(class_names):
        raise DataError(f"text has {len(text_vectors)} rows and there are {len(class_names)} classes")
    if unlabelled and is_multi:
        problem = f"client {next(iter(unlabelled))!r} has a third array, of samples without a label"
        reason = f"{problem}, beside several findings per image"
        raise DataError(f"{reason}; give these samples in x, and NaN (unknown) in y")
    x = torch.cat([*(x for x, _ in pairs.values()), *unlabelled.values()])
    labels = np.concatenate([labels, np.full(len(x) - len(labels), table.UNLABELLED)])
    by_client: list[tuple[str, Any]] = [*labels_by_client.items(), *unlabelled.items()]
    owners = table.string_column([id for id, rows in by_client for _ in rows], len(x))
    content = [sha256(row.tobytes()).hexdigest() for row in x.numpy()]
    content_of = [*content, *owners, *labels.astype(str), *class_names, str(scale)]
    content_of += [] if text_vectors is None else [sha256(text_vectors.numpy().tobytes()).hexdigest()]
    content_of += [] if findings is None else [sha256(findings.tobytes()).hexdigest()]
    return table.EmbeddedTable(
        name=IN_MEMORY,
        classes=class_names,
        x=x,
        labels=labels,
        domains=owners,
        clients=owners,
        splits=table.string_column(None, len(x)),
        content=content,
        scale=table.check_scale(IN_MEMORY, scale),
        text=text_vectors[:, 1] if is_multi and text_vectors is not None else text_vectors,
        patches=None,
        encoder=IN_MEMORY,
        fingerprint=sha256("\x1e".join(content_of).encode()).hexdigest(),
        findings=findings,
        negative_text=text_vectors[:, 0] if is_multi and text_vectors is not None else None,
    )


def _check_matrix(context: str, x: Any) -> Tensor:
    values = _tensor(context, x)
    if values.ndim != 2:
        raise DataError(f"{context} has embeddings of shape {tuple(values.shape)}; it takes (samples, dim)")
    return _unit(context, values)


def _join_findings(labels: Mapping[str, NDArray[Any]], classes: Sequence[str] | None) -> NDArray[np.float64]:
    widths = {id: y.shape[1] for id, y in labels.items()}
    if len(set(widths.values())) > 1:
        raise DataError(f"the clients have unequal numbers of findings, {widths}; give all the same columns")
    width = next(iter(widths.values()))
    if classes is not None and len(classes) != width:
        raise DataError(f"y has {width} columns and classes names {len(classes)} findings; name each column")
    return np.concatenate(list(labels.values()))


def _check_pair(context: str, x: Any, y: Any) -> tuple[Tensor, NDArray[Any]]:
    values = _check_matrix(context, x)
    labels = check_labels(context, y) if np.ndim(y) < 2 else _tensor(context, y).double().numpy()
    if len(labels) != len(values) or labels.ndim > 2:
        n_samples = len(values)
        raise DataError(f"{context} has {n_samples} embeddings and labels of shape {labels.shape}; give one label each")
    if not len(values):
        raise DataError(f"{context} has no samples; give it some, or leave it out")
    return values, labels


def _tensor(context: str, values: Any) -> Tensor:
    try:
        array = values if isinstance(values, Tensor) else np.asarray(values)  # also of a data frame
        tensor = torch.as_tensor(array).detach().cpu()
        return tensor if tensor.is_floating_point() else tensor.to(torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{context}: these are no numbers ({error}); give an array") from error


def _unit(context: str, values: Tensor) -> Tensor:
    x = values.to(torch.float32)
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    is_sound = lengths.isfinite() & (lengths > 0)
    if not is_sound.all():
        row = int((~is_sound).flatten().nonzero()[0])
        raise DataError(f"{context}: row {row} {table.describe_bad_row(values[row])}; leave it out")
    out: Tensor = (x / lengths).float().contiguous()
    return out


def _class_names(
    labels: Mapping[str, NDArray[Any]], classes: Sequence[str] | None, text: Tensor | None
) -> tuple[str, ...]:
    if classes is not None:
        names = tuple(map(str, classes))
    else:
        all_labels = np.concatenate(list(labels.values()))
        if all_labels.dtype.kind in "iu" and all_labels.min() >= 0:
            names = tuple(map(str, range(int(all_labels.max()) + 1 if text is None else len(text))))
        else:
            names = tuple(table.sort_class_names(map(str, all_labels.tolist())))
    table.check_class_names("classes", names)
    return names


def check_labels(context: str, y: Any) -> NDArray[Any]:
    """Return labels as an array; floats that are whole numbers become integers, missing and mixed ones are refused."""
    labels = np.asarray(y)
    given = list(y) if isinstance(y, Sequence) else labels.ravel().tolist() if labels.dtype.kind in "fO" else []
    missing = [label for label in given if label is None or label != label]
    fractions = labels[labels != np.round(labels)].tolist() if labels.dtype.kind == "f" else []
    if wrong := [*missing, *fractions]:
        raise DataError(f"{context}: the label {wrong[0]} names no class; correct it or drop the sample")
    names = [label for label in given if isinstance(label, str)]
    if names and (others := [label for label in given if not isinstance(label, str)]):
        raise DataError(f"{context}: the labels mix numbers and names ({others[0]!r} and {names[0]!r}); use one kind")
    is_integer = labels.dtype.kind == "f" or (labels.dtype.kind == "O" and all(type(label) is int for label in given))
    return labels.astype(np.int64) if is_integer else labels


def _check_same_kind(labels: Mapping[str, NDArray[Any]]) -> None:
    numeric = {id: y.dtype.kind in "iu" for id, y in labels.items()}
    if len(set(numeric.values())) > 1:
        number_id, name_id = (next(id for id in numeric if numeric[id] is flag) for flag in (True, False))
        owners = f"client {number_id!r} has numbers as labels and client {name_id!r} has names"
        raise DataError(f"{owners}; use one of the two, or name the classes")


def label_ids(context: str, y: NDArray[Any], classes: tuple[str, ...]) -> NDArray[np.int64]:
    """Return labels as class numbers; they may be numbers already or names."""
    if y.dtype.kind in "iu":
        wrong = y[(y < 0) | (y >= len(classes))]
        if len(wrong):
            limits = f"{len(classes)} classes (0 to {len(classes) - 1})"
            raise DataError(f"{context}: label {wrong[0]} is outside the {limits}; name every class in classes")
        return y.astype(np.int64)
    number = {name: index for index, name in enumerate(classes)}
    for name in map(str, y.tolist()):
        if name not in number:
            raise DataError(f"{context}: the label {name!r} is no class; the classes are {join_names(classes)}")
    return np.array([number[str(name)] for name in y.tolist()], dtype=np.int64)
