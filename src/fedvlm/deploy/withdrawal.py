"""Withdraw a site: it answers no more, and its contribution leaves every model that is a plain sum of uploads.

The site writes a signed file with its past uploads. The server keeps only the sums of all uploads and a digest of each,
subtracts the site's uploads, and revokes its key."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import torch

from fedvlm.channel.pipeline import DecodedUploads, are_equal
from fedvlm.core import Method, Tensors, setting, upload_sum
from fedvlm.deploy.identity.certificates import SiteCertificate, current_certificate, read_own_certificate
from fedvlm.deploy.identity.enrolment import revoke_site
from fedvlm.deploy.identity.keys import Signer, Verifier
from fedvlm.deploy.kits import ServerKit, read_site, record_folders
from fedvlm.deploy.messages import Withdrawal, check_arrays, parse, training_key, training_spec
from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.operations.security_log import log_security
from fedvlm.deploy.site.ledger import MAX_CACHED_REPLIES, Ledger, ReplyCache
from fedvlm.deploy.site.policy import WITHDRAWN_FILE
from fedvlm.engines.flower.client import to_arrays, to_tensors
from fedvlm.engines.flower.messages import Message, checksum, from_bytes, to_bytes
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.evaluate.protocols import Training
from fedvlm.record import RECORD_FILES, Record
from fedvlm.runner import tune
from fedvlm.runner.prepare import trainings_of
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import file_name
from fedvlm.storage import files

WITHDRAWAL_FILE = "withdrawal.safetensors"  # there, too: for the server
WITHDRAWAL_PREFIX = b"fedvlm withdrawal\n"  # no reply of a round is a withdrawal, nor the other way round


def withdraw(folder: Path, by: str) -> Path:
    """End all replies of this site from now on; return the file for its server."""
    if not by.strip():
        raise SettingsError("nobody is named; name who withdraws, e.g. --by 'A. Person'")
    kit, certificate, sign = read_site(folder), read_own_certificate(folder), Signer(folder / "key", WITHDRAWAL_PREFIX)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    files.write_json(folder / WITHDRAWN_FILE, {"by": by, "time": now, "key": sign.public.decode()})
    uploads = [reply for place in sorted((folder / "state").glob("*")) for reply in _summed_uploads(place)]
    about: dict[str, Any] = {"kind": "withdrawal", "client": kit.name, "federation": certificate.federation}
    about["uploads"] = [{name: reply.header[name] for name in ("training", "round")} for reply in uploads]
    all_arrays = {f"{i}/{key}": value for i, reply in enumerate(uploads) for key, value in reply.arrays.items()}
    message = sign(Message(about, all_arrays))
    data = to_bytes(message)
    Ledger(folder).add("out", -1, to_tensors(all_arrays), data, kind="withdrawal", by=by)
    files.write_file(folder / WITHDRAWAL_FILE, data, 0o600)
    EventLog(folder)("withdrawn", by=by, uploads=len(uploads))
    log_security(folder, "withdrawal", "allowed", actor=by)
    return folder / WITHDRAWAL_FILE


def _summed_uploads(place: Path) -> list[Message]:
    """Return the uploads of a training whose uploads are plain sums."""
    try:
        spec = files.read_json(place / "training.json")
        settings = build(spec["identity"])
    except (OSError, FedVLMError):  # damaged, or of a method that is gone: nothing to be sent
        return []
    if upload_sum(settings.method) != "total" or "tuning" in spec:
        return []
    return [reply for reply in ReplyCache(place).uploads() if reply.header["kind"] == "round"]


SUMS_SUFFIX = "sums"  # of a training's file beside its tensors
Uploads = Mapping[int, Tensors]  # of one site, by round


class NotRemovableError(FederationError):
    """A contribution that cannot be removed: only a new run is without it."""


def removal_obstacle(settings: Settings) -> str:
    """Return why no site's contribution to such a run can be removed, or nothing."""
    method, channel = settings.method, settings.channel
    if upload_sum(method) != "total":
        return f"what {method.name} shares is trained or averaged, and not a plain sum of uploads"
    if channel.verified:
        return "the server has seen only a verified sum"
    if channel.noise_multiplier or setting(method, "noise_multiplier"):
        return "the uploads had noise"
    if channel.aggregation != "mean":
        return f"the uploads were combined by a robust rule ({channel.aggregation})"
    if channel.quantise:
        return "the uploads were rounded to 8 bits"
    if method.rounds > MAX_CACHED_REPLIES:
        return f"a site keeps its last {MAX_CACHED_REPLIES} replies, and {method.name} takes {method.rounds}"
    return ""


def upload_digest(upload: Tensors) -> str:
    return checksum(Message({}, to_arrays(upload)))


@dataclass
class UploadSums:
    """Keep the sums of uploads of one training in a file."""

    path: Path
    before: dict[int, Tensors] = field(default_factory=dict)  # shared before a round
    total: dict[int, Tensors] = field(default_factory=dict)
    sites: dict[int, dict[str, Any]] = field(default_factory=dict)  # digest, rows and whether plain
    withdrawn_sites: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "UploadSums":
        out = cls(path)
        if path.exists():
            values, about = files.read_tensors(path)
            out.sites = {int(number): site_entries for number, site_entries in about["sites"].items()}
            out.withdrawn_sites = about["withdrawn"]
            for number in out.sites:
                out.before[number] = _strip_prefix(values, f"{number}/before/")
                out.total[number] = _strip_prefix(values, f"{number}/total/")
        return out

    def write(self) -> None:
        kinds = (("before", self.before), ("total", self.total))
        rounds = [(f"{number}/{kind}", held) for kind, of in kinds for number, held in of.items()]
        values = {f"{place}/{key}": value for place, held in rounds for key, value in held.items()}
        files.write_tensors(self.path, values, {"sites": self.sites, "withdrawn": self.withdrawn_sites})

    def add(self, number: int, shared: Tensors, decoded: DecodedUploads) -> None:
        """Add a round as it was aggregated."""
        self.before[number] = shared
        self.total[number] = _sum_uploads(decoded.uploads)
        self.sites[number] = {
            id: {"digest": upload_digest(upload), "rows": float(rows), "plain": id in decoded.unchanged_without}
            for id, upload, rows in zip(decoded.ids, decoded.uploads, decoded.weights, strict=True)
        }
        self.write()

    def remove_site(self, method: Method, site: str, uploads: Uploads) -> Tensors:
        """Return what would be shared without the site, and subtract it here; the caller writes the file."""
        if sorted(self.sites) != list(range(method.rounds)):
            raise NotRemovableError("not all of its rounds were recorded")
        shared = self.before[0]
        for number in range(method.rounds):
            other_sites = self.sites[number].keys() - {site}
            if not other_sites:
                raise NotRemovableError("nobody else took part")
            for id in other_sites:
                if not are_equal(method.send(shared, id), method.send(self.before[number], id)):
                    raise NotRemovableError(f"the others' uploads of round {number + 1} depend on its earlier ones")
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
            raise NotRemovableError(f"in round {number + 1} the bound changed uploads, with it or without it")
        if upload_digest(upload) != entry["digest"]:
            raise FederationError(f"the upload that it claims for round {number + 1} is not what was accepted from it")
        total = self.total[number]
        self.total[number] = {key: total[key] - upload[key].to(total[key].dtype) for key in total}
        del self.sites[number][site]


def _sum_uploads(uploads: Sequence[Tensors]) -> Tensors:
    """Sum in higher precision than uploads have, so that adding and subtracting one leaves no trace."""
    out: Tensors = {}
    for upload in uploads:
        for key, tensor in upload.items():
            tensor = tensor.double() if tensor.is_floating_point() else tensor.long()
            out[key] = out[key] + tensor if key in out else tensor
    return out


def _strip_prefix(values: Tensors, name: str) -> Tensors:
    return {key.removeprefix(name): tensor for key, tensor in values.items() if key.startswith(name)}


MAX_WITHDRAWAL_BYTES = 1 << 30  # bytes of a file from a site
NEW_RUN_NEEDED = "only a new run is without it"


@dataclass(frozen=True)
class WithdrawalResult:
    """Hold what became of a site's contribution to one training."""

    run: str
    training: str
    reason: str = ""  # it is not removed, if it is not

    @property
    def removed(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        end = "removed from the shared tensors" if self.removed else f"not removed: {self.reason}; {NEW_RUN_NEEDED}"
        return f"{self.run}, {self.training}: {end}"


def apply_withdrawal(kit: ServerKit, file: Path, records: Sequence[Path] = ()) -> tuple[str, list[WithdrawalResult]]:
    """Remove a site by the file that it signed; return its name and what became of its contributions.

    Nothing changes if the file is not the site's, or claims uploads that were never accepted from it, or while a run is
    going on. The site's key is revoked, so the same file is applied again only to further `records`.
    """
    applied_to = _applied_to(kit, file) if records else ""
    site, uploads = read_withdrawal(kit, file, applied_to)
    folders = {} if applied_to else {folder.resolve(): folder for folder in record_folders(kit.folder).values()}
    with ExitStack() as all:
        runs = [Record(folder) for folder in (folders | {folder.resolve(): folder for folder in records}).values()]
        for record in runs:
            all.enter_context(record.lock())
        plans = []
        for record in runs:
            trainings = trainings_of_record(record, build(record.manifest["identity"]))
            made = [_removal_plan(record, *training, site, uploads) for training in trainings]
            plans += [plan for plan in made if plan is not None]
        for plan in plans:
            plan.apply()
        if not applied_to:
            revoke_site(kit, site)
    ledger, log_event, data = Ledger(kit.folder), EventLog(kit.folder), files.read_regular(file, MAX_WITHDRAWAL_BYTES)
    results = [plan.result for plan in plans]
    lines = [{"run": done.run, "training": done.training, "what": done.reason or "removed"} for done in results]
    for words in lines or [{"what": "it had contributed to no run"}]:
        # of the same hash as in the site's ledger
        ledger.add("in", -1, None, data, kind="withdrawal", site=site, **words)
    log_event("withdrew", site=site, out=sum(result.removed for result in results), of=len(results))
    return site, results


def _applied_to(kit: ServerKit, file: Path) -> str:
    """Return the site of a file that this server has accepted before, or nothing."""
    try:
        digest = sha256(files.read_regular(file, MAX_WITHDRAWAL_BYTES)).hexdigest()
    except OSError:
        return ""
    lines = [line for line in Ledger(kit.folder).read().lines if line.get("kind") == "withdrawal"]
    return next((str(line["site"]) for line in lines if line["content"] == digest), "")


def read_withdrawal(kit: ServerKit, file: Path, accepted_of: str = "") -> tuple[str, dict[str, dict[int, Tensors]]]:
    """Return who signed the file, unless it was accepted before and its key has ended, and the uploads by round."""
    try:
        message = from_bytes(files.read_regular(file, MAX_WITHDRAWAL_BYTES), inf)
        fields = parse(Withdrawal, message.header, "the withdrawal")
        check_arrays(message)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); name the site's file") from error
    except Exception as error:
        raise DataError(f"{file} is not a withdrawal, or damaged ({error}); send it again") from error
    if not accepted_of:
        certificate: SiteCertificate = current_certificate(kit.folder, fields.client)
        Verifier(certificate.key.encode(), WITHDRAWAL_PREFIX)(message, f"site {certificate.site}")
        if fields.federation != certificate.federation:
            raise FederationError(f"{file} is for another federation")
    values, uploads = to_tensors(message.arrays), dict[str, dict[int, Tensors]]()
    for place, past in enumerate(fields.uploads):
        uploads.setdefault(past.training, {})[past.round] = _strip_prefix(values, f"{place}/")
    return accepted_of or certificate.site, uploads


@dataclass
class RemovalPlan:
    """Hold one training without the site: computed for all trainings first, then written."""

    result: WithdrawalResult
    record: Record
    sums: UploadSums | None = None
    shared: Tensors | None = None

    def apply(self) -> None:
        """Write the files in an order that can be repeated after a crash."""
        if self.sums is None or self.shared is None:
            return
        path = self.record.folder / "trainings" / f"{self.result.training}.safetensors"
        values, about = files.read_tensors(path)
        new = {f"shared/{k}": v.to(values[f"shared/{k}"].dtype) for k, v in self.shared.items()}
        files.write_tensors(path, {**values, **new}, about)
        summary = files.read_json(path.with_suffix(".json"))
        files.write_json(path.with_suffix(".json"), {**summary, "withdrawn": self.sums.withdrawn_sites})
        self.sums.write()
        files.write_index(self.record.folder, RECORD_FILES)


def trainings_of_record(record: Record, settings: Settings) -> Iterator[tuple[Settings, Training, int]]:
    """Yield every training of a deployed run, with its settings after tuning and its seed."""
    domains = {name: name for name in record.manifest["sites"]}
    for seed in settings.seeds:
        tuned = tune.with_tuned(settings, record.manifest, seed)
        for training in trainings_of(tuned, domains, seed):
            yield tuned, training, seed


def _removal_plan(
    record: Record, settings: Settings, training: Training, seed: int, site: str, uploads: dict[str, dict[int, Tensors]]
) -> RemovalPlan | None:
    """Return None if the site contributed nothing to this training, or was removed before."""
    name = file_name(training, seed)
    lines = [line for line in record.lines() if line["training"] == name]
    sent = any(line["clients"].get(site, {}).get("bytes_up") for line in lines)
    path = record.folder / "trainings" / f"{name}.safetensors"
    sums = UploadSums.read(path.with_suffix(f".{SUMS_SUFFIX}"))
    if not sent or site in sums.withdrawn_sites:
        return None
    site_uploads: Uploads = uploads.get(training_key(training_spec(settings, training, seed)), {})
    try:
        if reason := removal_obstacle(settings):
            raise NotRemovableError(reason)
        if not path.exists():
            raise NotRemovableError("the run is not finished")
        if files.read_tensors(path)[1]["round"] != settings.method.rounds:
            raise NotRemovableError("an earlier round than the last was chosen")
        shared = sums.remove_site(settings.method, site, site_uploads)
    except NotRemovableError as error:
        return RemovalPlan(WithdrawalResult(record.folder.name, name, str(error)), record)
    return RemovalPlan(WithdrawalResult(record.folder.name, name), record, sums, shared)
