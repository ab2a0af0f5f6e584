"""What a server keeps of uploads that are plain sums, so that a site's can be taken out again.

Of each round: what was shared before it, the sum of all uploads, and of each site's the digest. The
uploads themselves are not kept: a site that withdraws sends its own once more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedvlm.channel.uploads import Arrived, same
from fedvlm.core import Method, Tensors, setting, sums
from fedvlm.deploy.account import KEEP
from fedvlm.engines.flower.client import arrays
from fedvlm.engines.flower.wire import Parcel, checksum
from fedvlm.errors import FederationError
from fedvlm.runner.settings import Settings
from fedvlm.storage.sealed import read_tensors, write_tensors

ENDING = "sums"  # of a training's file beside its tensors
Uploads = Mapping[int, Tensors]  # of one site, by round


class Bound(FederationError):
    """A contribution that cannot be taken out: only a new run forgets it."""


def why_bound(settings: Settings) -> str:
    """Why no site's contribution to such a run can be taken out, or nothing."""
    method, channel = settings.method, settings.channel
    if sums(method) != "total":
        return f"what {method.name} shares is trained or averaged, and no plain sum of uploads"
    if channel.secure:
        return "the server has only seen a secure sum"
    if channel.noise_multiplier or setting(method, "noise_multiplier"):
        return "the uploads had noise"
    if channel.aggregation != "mean":
        return f"the uploads were combined by a robust rule ({channel.aggregation})"
    if channel.quantise:
        return "the uploads were rounded to 8 bits"
    if method.rounds > KEEP:
        return f"a site keeps its last {KEEP} answers, and {method.name} takes {method.rounds}"
    return ""


def digest(upload: Tensors) -> str:
    return checksum(Parcel({}, arrays(upload)))


@dataclass
class Sums:
    """The sums of one training, in a file."""

    path: Path
    before: dict[int, Tensors] = field(default_factory=dict)  # shared before a round
    total: dict[int, Tensors] = field(default_factory=dict)
    sites: dict[int, dict[str, Any]] = field(default_factory=dict)  # digest, rows and whether plain
    withdrawn: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Sums":
        out = cls(path)
        if path.exists():
            values, about = read_tensors(path)
            out.sites = {int(number): one for number, one in about["sites"].items()}
            out.withdrawn = about["withdrawn"]
            for number in out.sites:
                out.before[number] = _group(values, f"{number}/before/")
                out.total[number] = _group(values, f"{number}/total/")
        return out

    def write(self) -> None:
        values = {
            f"{number}/{kind}/{key}": value
            for kind, all in (("before", self.before), ("total", self.total))
            for number, one in all.items()
            for key, value in one.items()
        }
        write_tensors(self.path, values, {"sites": self.sites, "withdrawn": self.withdrawn})

    def add(self, number: int, shared: Tensors, came: Arrived) -> None:
        """A round as it was aggregated."""
        self.before[number] = shared
        self.total[number] = _added(came.uploads)
        self.sites[number] = {
            id: {"digest": digest(upload), "rows": float(rows), "plain": id in came.plain}
            for id, upload, rows in zip(came.ids, came.uploads, came.weights, strict=True)
        }
        self.write()

    def without(self, method: Method, site: str, uploads: Uploads) -> Tensors:
        """What would be shared in the end if the site had never taken part; it is taken out of the
        sums here, and the file is for the caller to write."""
        if sorted(self.sites) != list(range(method.rounds)):
            raise Bound("not all of its rounds were noted")
        shared = self.before[0]
        for number in range(method.rounds):
            others = self.sites[number].keys() - {site}
            if not others:
                raise Bound("nobody else took part")
            for id in others:
                if not same(method.send(shared, id), method.send(self.before[number], id)):
                    raise Bound(
                        f"the others answered round {number + 1} to what it had changed before"
                    )
            self.before[number] = shared
            if site in self.sites[number]:
                self._take(number, site, uploads.get(number))
            left = torch.tensor([sum(one["rows"] for one in self.sites[number].values())])
            shared = method.aggregate(shared, [self.total[number]], left, ["everyone"])
        self.withdrawn.append(site)
        return shared

    def _take(self, number: int, site: str, upload: Tensors | None) -> None:
        noted = self.sites[number][site]
        if upload is None:
            raise Bound(f"its upload of round {number + 1} is not in what it sent")
        if not noted["plain"]:
            raise Bound(
                f"in round {number + 1} the bound on changes was at work, with it or without it"
            )
        if digest(upload) != noted["digest"]:
            raise FederationError(
                f"what it says it has uploaded in round {number + 1} is not what was accepted of it"
            )
        total = self.total[number]
        self.total[number] = {key: total[key] - upload[key].to(total[key].dtype) for key in total}
        del self.sites[number][site]


def _added(uploads: Sequence[Tensors]) -> Tensors:
    """Finer than uploads are: what is added and taken away again leaves no trace."""
    out: Tensors = {}
    for upload in uploads:
        for key, one in upload.items():
            one = one.double() if one.is_floating_point() else one.long()
            out[key] = out[key] + one if key in out else one
    return out


def _group(values: Tensors, name: str) -> Tensors:
    return {key.removeprefix(name): one for key, one in values.items() if key.startswith(name)}
