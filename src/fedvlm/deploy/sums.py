"""What a server keeps of uploads that are plain sums, so that a site's can be taken out again.

Of each round: what was shared before it, the sum of all uploads, and of each site's the digest. The
uploads themselves are not kept: a site that withdraws sends its own once more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedvlm.channel.pipeline import DecodedUploads, are_equal
from fedvlm.core import Method, Tensors, setting, upload_sum
from fedvlm.deploy.account import MAX_CACHED_REPLIES
from fedvlm.engines.flower.client import to_arrays
from fedvlm.engines.flower.wire import Message, checksum
from fedvlm.errors import FederationError
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import read_tensors, write_tensors

SUMS_SUFFIX = "sums"  # of a training's file beside its tensors
Uploads = Mapping[int, Tensors]  # of one site, by round


class NotRemovableError(FederationError):
    """A contribution that cannot be taken out: only a new run forgets it."""


def removal_obstacle(settings: Settings) -> str:
    """Why no site's contribution to such a run can be taken out, or nothing."""
    method, channel = settings.method, settings.channel
    if upload_sum(method) != "total":
        return f"what {method.name} shares is trained or averaged, and no plain sum of uploads"
    if channel.secure:
        return "the server has only seen a secure sum"
    if channel.noise_multiplier or setting(method, "noise_multiplier"):
        return "the uploads had noise"
    if channel.aggregation != "mean":
        return f"the uploads were combined by a robust rule ({channel.aggregation})"
    if channel.quantise:
        return "the uploads were rounded to 8 bits"
    if method.rounds > MAX_CACHED_REPLIES:
        return f"a site keeps its last {MAX_CACHED_REPLIES} answers, and {method.name} takes {method.rounds}"
    return ""


def upload_digest(upload: Tensors) -> str:
    return checksum(Message({}, to_arrays(upload)))


@dataclass
class UploadSums:
    """The sums of one training, in a file."""

    path: Path
    before: dict[int, Tensors] = field(default_factory=dict)  # shared before a round
    total: dict[int, Tensors] = field(default_factory=dict)
    sites: dict[int, dict[str, Any]] = field(default_factory=dict)  # digest, rows and whether plain
    withdrawn_sites: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "UploadSums":
        out = cls(path)
        if path.exists():
            values, about = read_tensors(path)
            out.sites = {int(number): site_entries for number, site_entries in about["sites"].items()}
            out.withdrawn_sites = about["withdrawn"]
            for number in out.sites:
                out.before[number] = _strip_prefix(values, f"{number}/before/")
                out.total[number] = _strip_prefix(values, f"{number}/total/")
        return out

    def write(self) -> None:
        values = {
            f"{number}/{kind}/{key}": value
            for kind, all in (("before", self.before), ("total", self.total))
            for number, round_tensors in all.items()
            for key, value in round_tensors.items()
        }
        write_tensors(self.path, values, {"sites": self.sites, "withdrawn": self.withdrawn_sites})

    def add(self, number: int, shared: Tensors, arrived: DecodedUploads) -> None:
        """A round as it was aggregated."""
        self.before[number] = shared
        self.total[number] = _sum_uploads(arrived.uploads)
        self.sites[number] = {
            id: {"digest": upload_digest(upload), "rows": float(rows), "plain": id in arrived.unchanged_without}
            for id, upload, rows in zip(arrived.ids, arrived.uploads, arrived.weights, strict=True)
        }
        self.write()

    def remove_site(self, method: Method, site: str, uploads: Uploads) -> Tensors:
        """What would be shared in the end if the site had never taken part; it is taken out of the
        sums here, and the file is for the caller to write."""
        if sorted(self.sites) != list(range(method.rounds)):
            raise NotRemovableError("not all of its rounds were noted")
        shared = self.before[0]
        for number in range(method.rounds):
            other_sites = self.sites[number].keys() - {site}
            if not other_sites:
                raise NotRemovableError("nobody else took part")
            for id in other_sites:
                if not are_equal(method.send(shared, id), method.send(self.before[number], id)):
                    raise NotRemovableError(f"the others answered round {number + 1} to what it had changed before")
            self.before[number] = shared
            if site in self.sites[number]:
                self._subtract(number, site, uploads.get(number))
            sample_count = torch.tensor([sum(entry["rows"] for entry in self.sites[number].values())])
            shared = method.aggregate(shared, [self.total[number]], sample_count, ["everyone"])
        self.withdrawn_sites.append(site)
        return shared

    def _subtract(self, number: int, site: str, upload: Tensors | None) -> None:
        entry = self.sites[number][site]
        if upload is None:
            raise NotRemovableError(f"its upload of round {number + 1} is not in what it sent")
        if not entry["plain"]:
            raise NotRemovableError(f"in round {number + 1} the bound on changes was at work, with it or without it")
        if upload_digest(upload) != entry["digest"]:
            raise FederationError(f"what it says it has uploaded in round {number + 1} is not what was accepted of it")
        total = self.total[number]
        self.total[number] = {key: total[key] - upload[key].to(total[key].dtype) for key in total}
        del self.sites[number][site]


def _sum_uploads(uploads: Sequence[Tensors]) -> Tensors:
    """Finer than uploads are: what is added and taken away again leaves no trace."""
    out: Tensors = {}
    for upload in uploads:
        for key, tensor in upload.items():
            tensor = tensor.double() if tensor.is_floating_point() else tensor.long()
            out[key] = out[key] + tensor if key in out else tensor
    return out


def _strip_prefix(values: Tensors, name: str) -> Tensors:
    return {key.removeprefix(name): tensor for key, tensor in values.items() if key.startswith(name)}
