"""Let sites measure given classifiers on their test samples, without training."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedvlm.core import Tensors, make
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.messages import MAX_CLASSIFIERS, check_reply, encoder_fingerprint, normalise_class_name
from fedvlm.deploy.operations.events import EventLogger
from fedvlm.deploy.plan import hash_tensors
from fedvlm.deploy.server.engine import RemoteEngine
from fedvlm.deploy.site.consent import plan_hash
from fedvlm.deploy.site.evaluation import EVALUATION_KEY, ZERO_SHOT
from fedvlm.deploy.transcript import TRANSCRIPT_SUFFIX, Transcript
from fedvlm.engines.flower.client import to_arrays
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import FederationError, SettingsError, join_names, suggest_path
from fedvlm.evaluate.protocols import Training
from fedvlm.evaluate.statistics import wilson_interval
from fedvlm.record import Record
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import file_name
from fedvlm.runner.tune import seed_search
from fedvlm.storage.files import read_tensors


@dataclass(frozen=True)
class Tested:
    """A classifier that sites are to measure."""

    name: str
    place: str  # zero-shot, or the folder of a run or an export
    method: dict[str, Any]
    encoder: str = ""
    client: str = ""  # whose export it is
    classes: list[str] = field(default_factory=list)
    tensors: Tensors = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)  # of the verified sum that led to it
    settings: Settings | None = None  # of its run

    @property
    def entry(self) -> dict[str, Any]:
        words = {key: getattr(self, key) for key in ("name", "method", "encoder", "client")}
        return {**words, "tensors": hash_tensors(self.tensors)}


def read_tested(kit: ServerKit, name: str) -> Tested:
    """Read zero-shot, the shared classifier of a run, or an exported one."""
    if name == ZERO_SHOT:
        return Tested(name, name, _method_words(ZERO_SHOT))
    folder = kit.folder / "runs" / name
    folder = (folder if folder.exists() else Path(name)).resolve()
    if (folder / "classifier.safetensors").exists():
        return _read_export(folder)
    if not (folder / "manifest.json").exists():
        hint = "" if folder.parent.is_dir() else suggest_path(folder.parent)
        raise SettingsError(f"{name} is no run and no exported classifier; {hint}name a folder, or {ZERO_SHOT}")
    return _read_run(folder)


def _method_words(name: str, **values: Any) -> dict[str, Any]:
    method = make(name, **values)
    return dict(json.loads(json.dumps({"name": method.name, **asdict(method)})))


def _read_export(folder: Path) -> Tested:
    stored, about = read_tensors(folder / "classifier.safetensors")
    tensors = {key: value for key, value in stored.items() if key.startswith(("shared/", "local/"))}
    if "frozen/text" in stored:
        tensors["text"] = stored["frozen/text"]
    classes = [*map(normalise_class_name, about["classes"])]
    return Tested(folder.name, str(folder), about["method"], about["encoder"], about["client"], classes, tensors)


def _read_run(folder: Path) -> Tested:
    record = Record(folder)
    if record.result() is None:
        raise SettingsError(f"{folder} is not a finished run; resume it, or name another one")
    manifest = record.manifest
    settings = build({**manifest["identity"], **{key: manifest.get(key, "") for key in ("purpose", "contact")}})
    name, seed = manifest["trainings"][0], settings.seeds[0]
    shared, _ = record.outcome(name, seed)
    proof: dict[str, Any] = {}
    path = folder / "trainings" / f"{file_name(Training(name, (), ()), seed)}.{TRANSCRIPT_SUFFIX}"
    if (transcript := Transcript(path)).exists:
        plan, _ = transcript.read_plan()
        ends, shared = transcript.read_end()
        proof = {"plan": plan.to_bytes().decode(), "agreements": transcript.read_agreements(), "ends": ends}
    method = _method_words(**{**manifest["identity"]["method"], **seed_search(manifest, seed).get("chosen", {})})
    if not shared and settings.method.rounds:
        raise SettingsError(
            f"{settings.method.name} shares nothing, so {folder} has a classifier of each client only; export one: "
            "fedvlm export"
        )
    tensors = {f"shared/{key}": value for key, value in shared.items()}
    if manifest["text"] is not None:
        tensors["text"] = torch.tensor(manifest["text"])
    classes = [*map(normalise_class_name, manifest["classes"])]
    return Tested(folder.name, str(folder), method, manifest["encoder"], "", classes, tensors, proof, settings)


def evaluation_spec(tested: Sequence[Tested], classes: Sequence[str], statement: Mapping[str, str]) -> dict[str, Any]:
    """Return what a person at a site consents to; refuse classifiers that cannot be compared."""
    if not 0 < len(tested) <= MAX_CLASSIFIERS:
        raise SettingsError(f"name 1 to {MAX_CLASSIFIERS} classifiers, got {len(tested)}")
    with_classes = {one.name: one.classes for one in tested if one.classes}
    if classes:
        with_classes = {"--classes": [normalise_class_name(name) for name in classes], **with_classes}
    if not with_classes:
        raise SettingsError(f"{ZERO_SHOT} needs class names; give --classes cat,dog, or name a run as well")
    (first, chosen), *others = with_classes.items()
    for name, held in others:
        if held != chosen:
            raise SettingsError(
                f"{first} has the classes {join_names(chosen)}, and {name} has {join_names(held)}; classifiers are "
                "compared on the same classes"
            )
    runs = [one.settings for one in tested if one.settings is not None]
    settings = runs[0] if runs else build({"method": ZERO_SHOT, "source": {"classes": chosen}})
    stated = {key: statement.get(key) or (settings.statement[key] if runs else "") for key in ("purpose", "contact")}
    identity = {"settings": settings.identity(), "classifiers": [one.entry for one in tested]}
    run = {"identity": json.loads(json.dumps(identity)), "trainings": 1, "rounds": 0, **stated}
    return {"run": run, "classes": list(chosen)}


class EvaluationEngine(RemoteEngine):
    """Ask every site that is connected once; each is told of no other site."""

    def __init__(self, grid: Any, kit: ServerKit, spec: Any, tested: Sequence[Tested], log_event: EventLogger) -> None:
        arrays = {f"{n}/{key}": value for n, one in enumerate(tested) for key, value in one.tensors.items()}
        super().__init__(grid, kit, {"identity": {"channel": {}}}, arrays, log_event)
        self.training, self.spec, self.tested = EVALUATION_KEY, spec, tested
        self.replies: dict[str, Mapping[str, Any]] = {}

    def opening_message(self) -> Message:
        header = {"kind": "evaluate", "training": EVALUATION_KEY, "round": 0, "spec": self.spec}
        return Message({**header, "proofs": [one.proof for one in self.tested]}, to_arrays(self.reference))

    def check_opening(self, message: Message, request: Message) -> None:
        check_reply(message, request.header)

    def _register_site(self, reply: Message, node: int) -> None:
        name = self._register_node(reply.header["client"], node)
        self.replies[name] = reply.header
        self.log_event("measured", site=name, classifiers=[one.name for one in self.tested])

    def _compatible_groups(self) -> list[list[str]]:
        return [sorted(self.nodes)]

    def _check_quorum(self, parcels: Iterable[str], replies: Mapping[str, Any], number: int) -> None:
        if self.missing and not self.replies:
            reasons = "\n".join(f"  {name}: {reason}" for name, reason in sorted(self.missing.items()))
            raise FederationError(f"no site has measured the classifiers\n{reasons}")


def evaluate_at_sites(grid: Any, kit: ServerKit, request: Mapping[str, Any], log_event: EventLogger) -> dict[str, Any]:
    """Measure classifiers at all sites; return what each site reports, and why others do not."""
    tested = [read_tested(kit, place) for place in request["evaluates"]]
    spec = evaluation_spec(tested, request.get("classes", ()), request)
    engine = EvaluationEngine(grid, kit, spec, tested, log_event)
    engine.wait_for_sites()
    notes = []
    if len({encoder_fingerprint(reply["encoder"]) for reply in engine.replies.values()}) > 1:
        notes.append("the sites have different encoders, so their scores of zero-shot are of different classifiers")
    return {
        "plan": plan_hash(spec),
        "classes": spec["classes"],
        "classifiers": [{**one.entry, "signed": bool(one.proof)} for one in tested],
        "sites": {
            name: {key: engine.replies[name][key] for key in ("encoder", "units", "scores")}
            for name in sorted(engine.replies)
        },
        "missing": engine.missing,
        "notes": notes,
    }


def evaluation_table(done: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: the accuracy of each classifier in all and by site, with its 95 % interval."""
    sites = done["sites"]
    body = []
    for number, classifier in enumerate(done["classifiers"]):
        scores = {name: (site["scores"][number], site["units"]) for name, site in sites.items()}
        hits, rows = (sum(score[f"test_{key}"] for score, _ in scores.values()) for key in ("hits", "rows"))
        cells = [_cell(hits, rows, sum(units for _, units in scores.values()))]
        cells += [_cell(score["test_hits"], score["test_rows"], units) for score, units in scores.values()]
        body.append([classifier["name"], *cells])
    return ["classifier", "all", *sites], body


def _cell(hits: int, rows: int, units: int) -> str:
    if not rows or not units:
        return "not reported"
    low, high = wilson_interval(hits / rows, units)
    return f"{100 * hits / rows:.1f} ({100 * low:.1f} to {100 * high:.1f})"
