"""Ask a site's people for their consent to one run, exactly as it is planned, and keep their answers in the ledger.

A request is a file of the site until it is refused. An answer is a line of the ledger, so one that was changed later
is found, and a ledger that was changed consents to nothing.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.deploy.kits import read_site
from fedvlm.deploy.messages import ReportedError, RequestRefused
from fedvlm.deploy.operations import events
from fedvlm.deploy.operations.security_log import Outcome, log_security
from fedvlm.deploy.site.ledger import History, Ledger, PrivacyBudget
from fedvlm.deploy.site.people import Person
from fedvlm.deploy.site.policy import Policy, read_policy
from fedvlm.deploy.site.training import SiteTraining
from fedvlm.engines.client import make_client
from fedvlm.errors import DataError, SettingsError
from fedvlm.report.lists import method_sentence
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.tune import possible_methods
from fedvlm.storage.files import read_json, write_json
from fedvlm.tensors import count_bytes

REQUESTS_FOLDER = "requests"  # in a site's folder
MAX_REQUESTS = 20  # files there; the oldest are deleted
MAX_REPEATED_ROUNDS = 8  # of a training that a consent covers beyond the planned ones, for replies that were lost
MAX_CONSENT_DAYS = 365
MIN_HASH_CHARS = 8  # of a plan's hash that a person must name
ALL_PLANS = "*"  # what a withdrawal is about


def plan_hash(spec: Mapping[str, Any]) -> str:
    """Identify what a person consents to: the whole run with its settings, purpose, size and classes."""
    plan = {"run": spec["run"], "classes": spec["classes"]}
    return sha256(json.dumps(plan, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def check_plan(spec: Mapping[str, Any], settings: Settings) -> None:
    """Refuse a training that is not part of the run it names: another seed, other settings, no candidate of tuning."""
    run = build(spec["run"]["identity"])
    is_part = replace(settings, method=run.method, tune=run.tune).identity() == run.identity()
    if not (is_part and settings.method in possible_methods(run) and spec["seed"] in run.seeds):
        raise ReportedError("request", "the training is not part of the run that the request names")


@dataclass(frozen=True)
class Answers:
    """Hold what people have answered to one plan."""

    grants: Mapping[str, datetime]  # until when, by approver
    refusal: str  # by whom and why

    def is_granted(self, approvers: int) -> bool:
        return not self.refusal and len(self.valid) >= approvers

    @property
    def valid(self) -> list[str]:
        return [name for name, until in self.grants.items() if until > datetime.now(UTC)]


def read_answers(history: History, plan: str) -> Answers:
    grants: dict[str, datetime] = {}
    refusal = ""
    for line in history.lines:
        if line["direction"] != "consent" or line["plan"] not in (plan, ALL_PLANS):
            continue
        if line["kind"] == "granted":
            grants[line["by"]] = datetime.fromisoformat(line["until"])
        elif line["kind"] == "refused":
            refusal = f"{line['by']} has refused: {line['reason']}"
        else:
            grants.clear()
    return Answers(grants, refusal)


def check_consent(folder: Path, policy: Policy, plan: str) -> None:
    """Refuse a message unless enough people have consented to exactly this plan."""
    history = Ledger(folder).history()
    if history.broken:
        raise RequestRefused("ledger")
    answers = read_answers(history, plan)
    if answers.refusal:
        raise RequestRefused("consent refused", answers.refusal)
    if not answers.is_granted(policy.approvers):
        raise RequestRefused("consent ended" if answers.grants and not answers.valid else "consent")


def check_consented_size(spec: Mapping[str, Any], rounds: int, budget: PrivacyBudget, key: str) -> None:
    """Refuse more trainings or rounds than the plan has."""
    plan = plan_hash(spec)
    if key not in budget.trainings and budget.trainings_by_plan[plan] >= spec["run"]["trainings"]:
        raise RequestRefused("consent limit", most=spec["run"]["trainings"])
    if budget.rounds[key] >= rounds + MAX_REPEATED_ROUNDS:
        raise RequestRefused("consent limit", most=rounds)


def store_request(folder: Path, spec: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Keep a request for the site's people; return whether it is new."""
    path = folder / REQUESTS_FOLDER / f"{plan_hash(spec)}.json"
    is_new = not path.exists()
    write_json(path, {"run": spec["run"], "classes": spec["classes"], "facts": dict(facts)})
    stored = sorted(path.parent.glob("*.json"), key=lambda other: other.stat().st_mtime_ns)
    for old in stored[:-MAX_REQUESTS]:
        old.unlink()
    return is_new


@dataclass(frozen=True)
class Request:
    """Hold a request that waits for people."""

    plan: str
    facts: Mapping[str, Any]
    accepted_by: tuple[str, ...]
    approvers: int


def waiting_requests(folder: Path) -> list[Request]:
    """Return the requests that lack somebody's consent, the newest first."""
    policy, history = read_policy(folder), Ledger(folder).history()
    paths = sorted((folder / REQUESTS_FOLDER).glob("*.json"), key=lambda path: -path.stat().st_mtime_ns)
    requests = []
    for path in paths:
        answers = read_answers(history, path.stem)
        with suppress(DataError, KeyError, TypeError):  # one that was damaged or changed: the server asks again
            stored = read_json(path)
            is_asked = policy.consent or stored["facts"].get("is_evaluation")
            is_open = is_asked and not answers.refusal and not answers.is_granted(policy.approvers)
            if plan_hash(stored) == path.stem and is_open:
                requests.append(Request(path.stem, stored["facts"], tuple(answers.valid), policy.approvers))
    return requests


def find_request(folder: Path, plan: str) -> Request:
    """Return the waiting request whose plan has a hash that begins so."""
    requests = waiting_requests(folder)
    found = [request for request in requests if len(plan) >= MIN_HASH_CHARS and request.plan.startswith(plan)]
    if len(found) != 1:
        waiting = ", ".join(request.plan[:MIN_HASH_CHARS] for request in requests) or "none"
        raise SettingsError(
            f"no request with the plan {plan!r} waits here; name at least {MIN_HASH_CHARS} characters of its hash "
            f"(waiting: {waiting})"
        )
    return found[0]


def accept_request(folder: Path, person: Person, plan: str, days: float) -> str:
    """Record that an approver consents to exactly this plan for some days; return what that means now."""
    if person.role != "approver":
        raise SettingsError(f"{person.name} is an operator here and can refuse; an approver has to consent")
    if not 0 < days <= MAX_CONSENT_DAYS:
        raise SettingsError(f"days must be above 0 and at most {MAX_CONSENT_DAYS}, got {days}")
    request = find_request(folder, plan)
    until = datetime.now(UTC) + timedelta(days=days)
    _write_answer(folder, "granted", person, request.plan, until=until.isoformat(timespec="seconds"))
    missing = request.approvers - len({*request.accepted_by, person.name})
    end = until.astimezone().strftime("%Y-%m-%d %H:%M")
    return f"{person.name} consents until {end}" + (f"; {missing} more approver has to" if missing > 0 else "")


def refuse_request(folder: Path, person: Person, plan: str, reason: str) -> str:
    """Record that a person refuses this plan, and delete the request."""
    request = find_request(folder, plan)
    _write_answer(folder, "refused", person, request.plan, reason=reason[:500])
    (folder / REQUESTS_FOLDER / f"{request.plan}.json").unlink(missing_ok=True)
    return f"{person.name} has refused, and the request is deleted; the server learns this, but not the reason"


def withdraw_consent(folder: Path, person: Person) -> str:
    """Record that all consents end now: no round starts from now on; one that has begun continues."""
    _write_answer(folder, "withdrawn", person, ALL_PLANS)
    return f"{person.name} has withdrawn every consent of this site"


def _write_answer(folder: Path, kind: str, person: Person, plan: str, **details: Any) -> None:
    Ledger(folder).add("consent", -1, kind=kind, plan=plan, by=person.name, role=person.role, **details)
    outcome: Outcome = "allowed" if kind == "granted" else "refused"
    log_security(folder, "consent", outcome, actor=person.name, target=f"plan {plan}", reason=kind)
    events.EventLog(folder)("consent", answer=kind, by=person.name, plan=plan[:MIN_HASH_CHARS])


def describe_consent(folder: Path, policy: Policy) -> str:
    """Return in one sentence who has consented to what, and what waits."""
    if not policy.consent and not waiting_requests(folder):
        return "not asked for by the policy"
    history, waiting = Ledger(folder).history(), len(waiting_requests(folder))
    plans = dict.fromkeys(line["plan"] for line in history.lines if line["direction"] == "consent")
    answers = {plan: read_answers(history, plan) for plan in plans if plan != ALL_PLANS}
    granted = [
        f"plan {plan[:MIN_HASH_CHARS]} by {' and '.join(given.valid)} until {max(given.grants.values()):%Y-%m-%d %H:%M}"
        for plan, given in answers.items()
        if given.is_granted(policy.approvers)
    ]
    return "; ".join(granted or ["none"]) + (f"; {waiting} request(s) wait" if waiting else "")


def describe_request(
    spec: Mapping[str, Any], settings: Settings, site_training: SiteTraining, budget: PrivacyBudget, policy: Policy
) -> dict[str, Any]:
    """Describe what a person is asked for; the upload is computed to see what it holds, and stays here."""
    channel, world = settings.channel, site_training.world
    method, groups = world.method, site_training.groups
    [id] = world.members
    shared, local = method.init(world.frozen)
    upload, _ = method.update(world.frozen, method.send(shared, id), local, make_client(world, id, 0))
    run = spec["run"]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **{key: run[key] for key in ("purpose", "contact", "trainings", "rounds")},
        **{"method": method.name, "does": method_sentence(method)},
        "leaves": {key: list(value.shape) for key, value in upload.items()},
        **{"bytes": count_bytes(upload), "verified": channel.verified, "scores": policy.score_detail},
        **{"samples": len(site_training.labels), "groups": None if groups is None else len(np.unique(groups))},
        "privacy": describe_cost(budget, policy, site_training.upload_cost * run["rounds"], run["rounds"]),
    }


def describe_cost(budget: PrivacyBudget, policy: Policy, cost: float, rounds: int) -> str:
    """Return the privacy cost of a run in words."""
    if not rounds:
        return "nothing but scores leaves"
    if not cost:
        return "no bound: sent without noise"
    own = budget.epsilon(policy.delta, "", extra_cost=cost)
    total = budget.epsilon(policy.delta, extra_cost=cost)
    limit = f" of {policy.epsilon:g} that the policy allows" if policy.epsilon else ""
    unbounded = "; earlier uploads without noise are not in it" if budget.n_unnoised else ""
    return f"ε = {own:.3g} at δ = {policy.delta:g}; with all earlier uploads {total:.3g}{limit}{unbounded}"


def format_request(folder: Path, request: Request) -> list[tuple[str, str]]:
    """Return a request in plain words, by topic."""
    facts = request.facts
    groups = "the data do not say of how many patients" if facts["groups"] is None else f"{facts['groups']} patients"
    sizes = {name: " × ".join(map(str, shape)) or "1" for name, shape in facts["leaves"].items()}
    upload = ", ".join(f"{name} ({size} numbers)" for name, size in sizes.items()) or "nothing"
    seen = "; the server sees only the sum with other sites" if facts["verified"] else ""
    scores = {"none": "no scores", "coarse": "rounded scores"}.get(facts["scores"], "exact scores")
    gains = [event for event in events.read_events(folder) if event["kind"] == "gained"]
    trainings = "one training" if facts["trainings"] == 1 else f"{facts['trainings']} trainings"
    samples, size = f"{facts['samples']} training samples ({groups})", f"{facts['rounds']} rounds in {trainings}"
    if facts.get("is_evaluation"):
        samples, size = "the test samples", "one evaluation, which may be repeated"
    lines = [
        ("Who asks", f"the server at {read_site(folder).address}; contact: {facts['contact']}"),
        ("What for", facts["purpose"]),
        ("Method", f"{facts['method']}. {facts['does']}"),
        ("What leaves", f"{upload}, {facts['bytes']:,} bytes in the first round{seen}; {scores}. No image leaves."),
        ("From", samples),
        ("Privacy cost", facts["privacy"]),
        ("How long", f"{size}; a consent ends after the days that you choose"),
        ("Last time", events.format_gain(gains[-1]) if gains else "this site has not finished a run yet"),
        ("Plan", request.plan),
    ]
    if request.approvers > 1:
        lines.append(("Accepted by", f"{', '.join(request.accepted_by) or 'nobody'} of {request.approvers} approvers"))
    return lines
