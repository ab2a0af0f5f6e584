"""Rows that are already in memory: one pair of embeddings and labels per client."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.data.table import EmbeddedTable, sort_class_names, string_column
from fedvlm.errors import DataError, join_names

IN_MEMORY = "memory"  # what the encoder of such rows is called


def are_arrays(clients: Any) -> bool:
    """Whether these are rows by client, and not settings of how rows become clients."""
    return (
        isinstance(clients, Mapping)
        and bool(clients)
        and all(isinstance(pair, tuple | list) and len(pair) > 0 and np.ndim(pair[0]) > 0 for pair in clients.values())
    )


def from_arrays(
    clients: Mapping[str, tuple[Any, Any]],
    classes: Sequence[str] | None = None,
    text: Any = None,
    scale: float = 100.0,
) -> EmbeddedTable:
    """Embeddings (rows, dim) and labels (rows,) of each client; labels are numbers or names.

    `text` is (classes, dim) of the class names, if there is a text tower, `scale` its logit scale.
    """
    for id, pair in clients.items():
        if len(pair) != 2:
            raise DataError(f"client {str(id)!r} has {len(pair)} arrays; give the pair (x, y)")
    rows = {str(id): _rows(str(id), *pair) for id, pair in clients.items()}
    dims = {id: x.shape[1] for id, (x, _) in rows.items()}
    if len(set(dims.values())) > 1:
        raise DataError(f"the clients' rows are of unequal length, {dims}; use one encoder")
    dim = next(iter(dims.values()))
    text_vectors = None if text is None else _unit("text", _tensor("text", text))
    if text_vectors is not None and (text_vectors.ndim != 2 or text_vectors.shape[1] != dim):
        raise DataError(f"text of shape {tuple(text_vectors.shape)} does not fit rows of {dim}")
    class_names = _classes({id: y for id, (_, y) in rows.items()}, classes, text_vectors)
    if text_vectors is not None and len(text_vectors) != len(class_names):
        raise DataError(f"text has {len(text_vectors)} rows and there are {len(class_names)} classes")
    labels = np.concatenate([label_ids(f"client {id!r}", y, class_names) for id, (_, y) in rows.items()])
    x = torch.cat([x for x, _ in rows.values()])
    owners = string_column([id for id, (_, y) in rows.items() for _ in y], len(x))
    content = [sha256(row.tobytes()).hexdigest() for row in x.numpy()]
    content_of = [*content, *owners, *labels.astype(str), *class_names, str(scale)]
    content_of += [] if text_vectors is None else [sha256(text_vectors.numpy().tobytes()).hexdigest()]
    return EmbeddedTable(
        name=IN_MEMORY,
        classes=class_names,
        x=x,
        labels=labels,
        domains=owners,
        clients=owners,
        splits=string_column(None, len(x)),
        content=content,
        scale=scale,
        text=text_vectors,
        patches=None,
        encoder=IN_MEMORY,
        fingerprint=sha256("\x1e".join(content_of).encode()).hexdigest(),
    )


def _rows(id: str, x: Any, y: Any) -> tuple[Tensor, NDArray[Any]]:
    values = _tensor(f"client {id!r}", x)
    if values.ndim != 2:
        raise DataError(f"client {id!r} has embeddings of shape {tuple(values.shape)}; it takes (rows, dim)")
    labels = check_labels(f"client {id!r}", np.asarray(y))
    if labels.shape != (len(values),):
        raise DataError(
            f"client {id!r} has {len(values)} rows and labels of shape {labels.shape}; give one label per row"
        )
    if not len(values):
        raise DataError(f"client {id!r} has no rows; give it some, or leave it out")
    return _unit(f"client {id!r}", values), labels


def _tensor(context: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{context}: these are no numbers ({error}); give an array") from error


def _unit(context: str, x: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    if not (lengths.isfinite() & (lengths > 0)).all():
        row = int((~(lengths.isfinite() & (lengths > 0))).flatten().nonzero()[0])
        raise DataError(f"{context}: row {row} is zero, NaN or infinite; leave it out")
    out: Tensor = (x / lengths).float().contiguous()
    return out


def _classes(labels: Mapping[str, NDArray[Any]], classes: Sequence[str] | None, text: Tensor | None) -> tuple[str, ...]:
    if classes is not None:
        named = tuple(map(str, classes))
        if len(set(named)) < len(named):
            raise DataError(f"classes = {join_names(named)} name one twice; name every class once")
        return named
    all_labels = np.concatenate([np.asarray(client_labels) for client_labels in labels.values()])
    if all_labels.dtype.kind in "iu" and all_labels.min() >= 0:
        return tuple(map(str, range(int(all_labels.max()) + 1 if text is None else len(text))))
    return tuple(sort_class_names(map(str, all_labels.tolist())))


def check_labels(context: str, y: NDArray[Any]) -> NDArray[Any]:
    """Labels as they are; floats that a table made of whole numbers as those; no missing ones."""
    kind = y.dtype.kind
    missing = [label for label in y.ravel().tolist() if label is None or label != label] if kind in "fO" else []
    odd = y[y != np.round(y)].tolist() if kind == "f" else []
    if wrong := [*missing, *odd]:
        raise DataError(f"{context}: the label {wrong[0]} names no class; correct it or drop the row")
    return y.astype(np.int64) if kind == "f" else y


def label_ids(context: str, y: NDArray[Any], classes: tuple[str, ...]) -> NDArray[np.int64]:
    """Labels as numbers of the classes, which they are already or name."""
    if y.dtype.kind in "iu":
        wrong = y[(y < 0) | (y >= len(classes))]
        if len(wrong):
            raise DataError(
                f"{context}: label {wrong[0]} is outside the {len(classes)} classes (0 to "
                f"{len(classes) - 1}); name every class in classes"
            )
        return y.astype(np.int64)
    number = {name: index for index, name in enumerate(classes)}
    for name in map(str, y.tolist()):
        if name not in number:
            raise DataError(f"{context}: the label {name!r} is no class; there is {join_names(classes)}")
    return np.array([number[str(name)] for name in y.tolist()], dtype=np.int64)
