"""check_method finds methods that break the contract, and reports all failures at once."""

from dataclasses import dataclass

import pytest
import torch

from fedvlm import parts
from fedvlm.methods.fedavg import FedAvg
from fedvlm.testing import check_method


@dataclass(frozen=True)
class SampleUploader(FedAvg):
    """Uploads a training sample beside its head, scaled."""

    def update(self, frozen, sent, local, client):
        upload, local = parts.sgd(self, frozen, sent, local, client)
        return {**upload, "extra": -3.0 * client.x[4]}, local

    name = "sample-uploader"


@dataclass(frozen=True)
class SampleInHead(FedAvg):
    """Hides a training sample in the change of its head."""

    def update(self, frozen, sent, local, client):
        head = sent["head"].clone()
        head[1] += 0.01 * client.x[2]
        return {"head": head}, local

    name = "sample-in-head"


@dataclass(frozen=True)
class IgnoresPadding(FedAvg):
    """Averages its loss over padding too."""

    def loss(self, frozen, shared, local, batch, start):
        logits = self.predict(frozen, shared, local, batch.x)
        return torch.nn.functional.cross_entropy(logits, batch.y)

    name = "ignores-padding"


@dataclass(frozen=True)
class FirstUploadWins(FedAvg):
    """Takes the first upload for the aggregate."""

    def aggregate(self, shared, uploads, weights, ids):
        return uploads[0]

    name = "first-upload-wins"


@dataclass(frozen=True)
class BrokenTwice(IgnoresPadding):
    """Ignores padding and all uploads but the first."""

    def aggregate(self, shared, uploads, weights, ids):
        return uploads[0]

    name = "broken-twice"


PADDING, ORDER = "depends on padding", "order of the uploads changes the aggregate"


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        (SampleUploader(), ["'extra' holds a training sample"]),
        (SampleInHead(), ["the change of 'head' holds a training sample"]),
        (IgnoresPadding(), [PADDING]),
        (FirstUploadWins(), [ORDER]),
        (BrokenTwice(), [PADDING, ORDER]),
    ],
    ids=lambda case: getattr(case, "name", ""),
)
def test_a_broken_method_is_refused_with_every_reason(method, messages):
    with pytest.raises(AssertionError) as refused:
        check_method(method)
    for message in messages:
        assert message in str(refused.value)
