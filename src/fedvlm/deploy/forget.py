"""The server's part when a site withdraws: out of later rounds, and out of what is a plain sum."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvlm.core import Tensors
from fedvlm.deploy.admission import revoke_site
from fedvlm.deploy.events import EventLog
from fedvlm.deploy.keys import Verifier
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.membership import SiteCertificate, current_certificate
from fedvlm.deploy.remote import check_arrays
from fedvlm.deploy.server import training_spec
from fedvlm.deploy.site import training_key
from fedvlm.deploy.sums import SUMS_SUFFIX, NotRemovableError, Uploads, UploadSums, removal_obstacle
from fedvlm.deploy.withdrawn import WITHDRAWAL_PREFIX
from fedvlm.deploy.words import check as check_words
from fedvlm.deploy.words import integer, key, listed, one_of, text
from fedvlm.engines.flower.client import to_tensors
from fedvlm.engines.flower.wire import Message, from_bytes
from fedvlm.errors import DataError, FederationError
from fedvlm.evaluate.protocols import Training
from fedvlm.record import RECORD_FILES, Record
from fedvlm.runner import tune
from fedvlm.runner.prepare import trainings_of
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import file_name
from fedvlm.storage.files import read_json, read_regular, read_tensors, write_index, write_json, write_tensors

MAX_WITHDRAWAL_BYTES = 1 << 30  # bytes of a file from a site
NEW_RUN_NEEDED = "only a new run forgets it"
WITHDRAWAL_FIELDS = {
    "kind": one_of("withdrawal"),
    "client": text(),
    "federation": key,
    "uploads": listed(lambda entry: type(entry) is list and len(entry) == 2 and key(entry[0]) and integer()(entry[1])),
    "checksum": text(),
    "signature": text(),
}


@dataclass(frozen=True)
class WithdrawalResult:
    """What became of a site's contribution to one training."""

    run: str
    training: str
    removed: bool
    reason: str = ""  # it is not, if it is not

    def __str__(self) -> str:
        end = "taken out of what is shared" if self.removed else f"not taken out: {self.reason}; {NEW_RUN_NEEDED}"
        return f"{self.run}, {self.training}: {end}"


def apply_withdrawal(kit: ServerKit, file: Path, records: Sequence[Path] = ()) -> tuple[str, list[WithdrawalResult]]:
    """Takes a site out by the file that it signed; its name, and what became of what it gave.

    Nothing is changed if the file is not the site's, or says what was never accepted of it; nor
    while a run is going on. The site's key ends, so the same file is never taken twice.
    """
    site, uploads = read_withdrawal(kit, file)
    folders = [path.parent for path in sorted((kit.folder / "runs").glob("*/manifest.json"))]
    with ExitStack() as all:
        runs = [Record(folder) for folder in (*folders, *records)]
        for record in runs:
            all.enter_context(record.lock())
        plans = [plan_item for record in runs for plan_item in _removal_plans(record, site, uploads)]
        for plan in plans:
            plan.apply()
        revoke_site(kit, site)
    ledger, log_event, data = Ledger(kit.folder), EventLog(kit.folder), read_regular(file, MAX_WITHDRAWAL_BYTES)
    lines = [
        {
            "run": plan_item.run,
            "training": plan_item.training,
            "what": "taken out" if plan_item.removed else plan_item.reason,
        }
        for plan_item in (plan.result for plan in plans)
    ]
    for words in lines or [{"what": "it had contributed to no run"}]:
        about: dict[str, Any] = {"kind": "withdrawal", "site": site, **words}
        ledger.add("in", -1, None, data, **about)  # of the same hash as in the site's ledger
    log_event("withdrew", site=site, out=sum(plan.result.removed for plan in plans), of=len(plans))
    return site, [plan.result for plan in plans]


def read_withdrawal(kit: ServerKit, file: Path) -> tuple[str, dict[str, dict[int, Tensors]]]:
    """Whose it is, and its uploads by training and round, if its site has signed it."""
    try:
        message = from_bytes(read_regular(file, MAX_WITHDRAWAL_BYTES))
        check_words(message.about, WITHDRAWAL_FIELDS, {}, "the withdrawal")
        check_arrays(message)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); name the site's file") from error
    except Exception as error:
        raise DataError(f"{file} is no withdrawal, or damaged ({error}); send it again") from error
    about: Any = message.about
    certificate: SiteCertificate = current_certificate(kit.folder, about["client"])
    Verifier(certificate.key.encode(), WITHDRAWAL_PREFIX)(message, f"site {certificate.site}")
    if about["federation"] != certificate.federation:
        raise FederationError(f"{file} is for another federation")
    return certificate.site, _uploads(message, about["uploads"])


def _uploads(message: Message, listed: Sequence[Any]) -> dict[str, dict[int, Tensors]]:
    values, out = to_tensors(message.arrays), dict[str, dict[int, Tensors]]()
    for place, (training, number) in enumerate(listed):
        mark = f"{place}/"
        upload = {k.removeprefix(mark): v for k, v in values.items() if k.startswith(mark)}
        out.setdefault(training, {})[number] = upload
    return out


@dataclass
class RemovalPlan:
    """One training without the site: computed first for all, then written."""

    result: WithdrawalResult
    record: Record
    name: str
    site: str
    sums: UploadSums | None = None
    shared: Tensors | None = None

    def apply(self) -> None:
        """In an order in which a crash leaves what can be done again."""
        if self.sums is None or self.shared is None:
            return
        path = self.record.folder / "trainings" / f"{self.name}.safetensors"
        values, about = read_tensors(path)
        new = {f"shared/{k}": v.to(values[f"shared/{k}"].dtype) for k, v in self.shared.items()}
        write_tensors(path, {**values, **new}, about)
        summary = read_json(path.with_suffix(".json"))
        write_json(path.with_suffix(".json"), {**summary, "withdrawn": self.sums.withdrawn_sites})
        self.sums.write()
        write_index(self.record.folder, RECORD_FILES)


def _removal_plans(record: Record, site: str, uploads: dict[str, dict[int, Tensors]]) -> list[RemovalPlan]:
    settings = build(record.manifest["identity"])
    out = []
    for seed in settings.seeds:
        now = tune.with_tuned(settings, record.manifest, seed)
        domains = {name: name for name in record.manifest["sites"]}
        for training in trainings_of(now, domains, seed):
            if (plan := _removal_plan(record, now, training, seed, site, uploads)) is not None:
                out.append(plan)
    return out


def _removal_plan(
    record: Record,
    settings: Settings,
    training: Training,
    seed: int,
    site: str,
    uploads: dict[str, dict[int, Tensors]],
) -> RemovalPlan | None:
    """None if the site gave nothing to this training, or it was taken out already."""
    name = file_name(training, seed)
    lines = [line for line in record.lines() if line["training"] == name]
    sent = any(line["clients"].get(site, {}).get("bytes_up") for line in lines)
    path = record.folder / "trainings" / f"{name}.safetensors"
    sums = UploadSums.read(path.with_suffix(f".{SUMS_SUFFIX}"))
    if not sent or site in sums.withdrawn_sites:
        return None
    run_and_training = (record.folder.name, name)
    site_uploads: Uploads = uploads.get(training_key(training_spec(settings, training, seed)), {})
    try:
        if reason := removal_obstacle(settings):
            raise NotRemovableError(reason)
        if not path.exists():
            raise NotRemovableError("the run is not finished")
        if read_tensors(path)[1]["round"] != settings.method.rounds:
            raise NotRemovableError("an earlier round than the last was chosen")
        shared = sums.remove_site(settings.method, site, site_uploads)
    except NotRemovableError as error:
        return RemovalPlan(WithdrawalResult(*run_and_training, False, str(error)), record, name, site)
    return RemovalPlan(WithdrawalResult(*run_and_training, True), record, name, site, sums, shared)
