"""Listing without embeddings, for tests of how they are dealt."""

import numpy as np

from fedvlm.data.partition import SampleList, image_digest


def make_rows(
    rows: int,
    classes: int = 4,
    domains: int = 2,
    clients: int = 0,
    splits: str = "",
    twins: int = 0,
) -> SampleList:
    """Listing with all classes in all domains; the first `twins` images appear twice."""
    index = np.arange(rows)
    content = [image_digest(str(row).encode()) for row in range(rows - twins)]
    content += content[:twins]
    marks = splits.split(",") if splits else [""]
    return SampleList(
        classes=tuple(f"class {label}" for label in range(classes)),
        labels=(index % classes).astype(np.int64),
        domains=np.array([f"domain{(row // classes) % domains}" for row in index]),
        clients=np.array([f"writer{row % clients}" if clients else "" for row in index]),
        splits=np.array([marks[(row // classes) % len(marks)] for row in index]),
        content=content,
    )
