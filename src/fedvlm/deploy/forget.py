"""The server's part when a site withdraws: out of later rounds, and out of what is a plain sum."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvlm.core import Tensors
from fedvlm.deploy.admission import revoke
from fedvlm.deploy.events import Events
from fedvlm.deploy.keys import Verifier
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.membership import Membership, member
from fedvlm.deploy.remote import check_arrays
from fedvlm.deploy.server import spec_of
from fedvlm.deploy.site import key_of
from fedvlm.deploy.sums import ENDING, Bound, Sums, Uploads, why_bound
from fedvlm.deploy.withdrawn import PREFIX
from fedvlm.deploy.words import check as check_words
from fedvlm.deploy.words import key, listed, one_of, text, whole
from fedvlm.engines.flower.client import unpack
from fedvlm.engines.flower.wire import Parcel, from_bytes
from fedvlm.errors import DataError, FederationError
from fedvlm.evaluate.protocols import Training
from fedvlm.record import OWN, Record
from fedvlm.runner import tune
from fedvlm.runner.prepare import trainings_of
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import file_name
from fedvlm.storage.files import read_regular
from fedvlm.storage.sealed import read_json, read_tensors, write_index, write_json, write_tensors

MOST = 1 << 30  # bytes of a file from a site
NEW = "only a new run forgets it"
WORDS = {
    "kind": one_of("withdrawal"),
    "client": text(),
    "federation": key,
    "uploads": listed(
        lambda one: type(one) is list and len(one) == 2 and key(one[0]) and whole()(one[1])
    ),
    "checksum": text(),
    "signature": text(),
}


@dataclass(frozen=True)
class Forgotten:
    """What became of a site's contribution to one training."""

    run: str
    training: str
    done: bool
    why: str = ""  # it is not, if it is not

    def __str__(self) -> str:
        end = "taken out of what is shared" if self.done else f"not taken out: {self.why}; {NEW}"
        return f"{self.run}, {self.training}: {end}"


def forget(kit: ServerKit, file: Path, records: Sequence[Path] = ()) -> tuple[str, list[Forgotten]]:
    """Takes a site out by the file that it signed; its name, and what became of what it gave.

    Nothing is changed if the file is not the site's, or says what was never accepted of it; nor
    while a run is going on. The site's key ends, so the same file is never taken twice.
    """
    site, uploads = read_withdrawal(kit, file)
    found = [path.parent for path in sorted((kit.folder / "runs").glob("*/manifest.json"))]
    with ExitStack() as all:
        runs = [Record(folder) for folder in (*found, *records)]
        for record in runs:
            all.enter_context(record.lock())
        plans = [one for record in runs for one in _plans(record, site, uploads)]
        for plan in plans:
            plan.carry_out()
        revoke(kit, site)
    ledger, note = Ledger(kit.folder), Events(kit.folder)
    for one in [plan.said for plan in plans]:
        what = "taken out" if one.done else one.why
        ledger.add(
            "in", -1, kind="withdrawal", site=site, run=one.run, training=one.training, what=what
        )
    if not plans:
        ledger.add("in", -1, kind="withdrawal", site=site, what="it had contributed to no run")
    note("withdrew", site=site, out=sum(plan.said.done for plan in plans), of=len(plans))
    return site, [plan.said for plan in plans]


def read_withdrawal(kit: ServerKit, file: Path) -> tuple[str, dict[str, dict[int, Tensors]]]:
    """Whose it is, and its uploads by training and round, if its site has signed it."""
    try:
        parcel = from_bytes(read_regular(file, MOST))
        check_words(parcel.about, WORDS, {}, "the withdrawal")
        check_arrays(parcel)
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({error.strerror}); name the site's file"
        ) from error
    except Exception as error:
        raise DataError(f"{file} is no withdrawal, or damaged ({error}); send it again") from error
    about: Any = parcel.about
    one: Membership = member(kit.folder, about["client"])
    Verifier(one.key.encode(), PREFIX)(parcel, f"site {one.site}")
    if about["federation"] != one.federation:
        raise FederationError(f"{file} is for another federation")
    return one.site, _uploads(parcel, about["uploads"])


def _uploads(parcel: Parcel, listed: Sequence[Any]) -> dict[str, dict[int, Tensors]]:
    values, out = unpack(parcel.arrays), dict[str, dict[int, Tensors]]()
    for place, (training, number) in enumerate(listed):
        mark = f"{place}/"
        upload = {k.removeprefix(mark): v for k, v in values.items() if k.startswith(mark)}
        out.setdefault(training, {})[number] = upload
    return out


@dataclass
class Plan:
    """One training without the site: computed first for all, then written."""

    said: Forgotten
    record: Record
    name: str
    site: str
    sums: Sums | None = None
    shared: Tensors | None = None

    def carry_out(self) -> None:
        """In an order in which a crash leaves what can be done again."""
        if self.sums is None or self.shared is None:
            return
        path = self.record.folder / "trainings" / f"{self.name}.safetensors"
        values, about = read_tensors(path)
        new = {f"shared/{k}": v.to(values[f"shared/{k}"].dtype) for k, v in self.shared.items()}
        write_tensors(path, {**values, **new}, about)
        told = read_json(path.with_suffix(".json"))
        write_json(path.with_suffix(".json"), {**told, "withdrawn": self.sums.withdrawn})
        self.sums.write()
        write_index(self.record.folder, OWN)


def _plans(record: Record, site: str, uploads: dict[str, dict[int, Tensors]]) -> list[Plan]:
    settings = build(record.manifest["identity"])
    out = []
    for seed in settings.seeds:
        now = tune.settled(settings, record.manifest, seed)
        domains = {name: name for name in record.manifest["sites"]}
        for training in trainings_of(now, domains, seed):
            if (one := _plan(record, now, training, seed, site, uploads)) is not None:
                out.append(one)
    return out


def _plan(
    record: Record,
    settings: Settings,
    training: Training,
    seed: int,
    site: str,
    uploads: dict[str, dict[int, Tensors]],
) -> Plan | None:
    """None if the site gave nothing to this training, or it was taken out already."""
    name = file_name(training, seed)
    lines = [one for one in record.lines() if one["training"] == name]
    sent = any(one["clients"].get(site, {}).get("bytes_up") for one in lines)
    path = record.folder / "trainings" / f"{name}.safetensors"
    kept = Sums.read(path.with_suffix(f".{ENDING}"))
    if not sent or site in kept.withdrawn:
        return None
    said = (record.folder.name, name)
    mine: Uploads = uploads.get(key_of(spec_of(settings, training, seed)), {})
    try:
        if why := why_bound(settings):
            raise Bound(why)
        if not path.exists():
            raise Bound("the run is not finished")
        if read_tensors(path)[1]["round"] != settings.method.rounds:
            raise Bound("an earlier round than the last was chosen")
        shared = kept.without(settings.method, site, mine)
    except Bound as error:
        return Plan(Forgotten(*said, False, str(error)), record, name, site)
    return Plan(Forgotten(*said, True), record, name, site, kept, shared)
