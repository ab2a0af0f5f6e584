"""Take part in verified sums at a site: check what the server relays, add it up, and keep each session on disk.

What leaves is written first; asked again, the same bytes leave. A session's key stays in its own file, which backups
leave out and which is erased when the session ends or expires.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import Any

import torch

from fedvlm import tensors
from fedvlm.channel import verified
from fedvlm.channel.pipeline import UploadPipeline, join_channel_state, split_channel_state
from fedvlm.channel.validation import check_upload
from fedvlm.core import Frozen, Tensors, upload_sum
from fedvlm.deploy import statements
from fedvlm.deploy.flower.network import LOOPBACK_NAMES, split_address
from fedvlm.deploy.identity.certificates import key_fingerprint
from fedvlm.deploy.identity.keys import Signer
from fedvlm.deploy.kits import SESSION_KEY_FILE, SiteKit, write_secret
from fedvlm.deploy.messages import ECHOED_FIELDS, ReportedError, RequestRefused, SumRequest, encoder_fingerprint
from fedvlm.deploy.plan import Plan, hash_tensors, plan_of_spec, read_plan
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.peers import check_members, count_signers
from fedvlm.deploy.site.policy import Policy
from fedvlm.deploy.site.training import SiteTraining, describe_site
from fedvlm.deploy.statements import hash_vector
from fedvlm.engines.client import Task, World, channel_noise
from fedvlm.engines.flower.client import describe_local, to_arrays, to_tensors
from fedvlm.engines.flower.messages import Message
from fedvlm.engines.sequential import Sequential, error_context
from fedvlm.errors import FederationError
from fedvlm.runner.prepare import label_keys, split_text, template_of, text_of
from fedvlm.storage.files import read_json, read_tensors, write_json, write_tensors

HISTORY_FILE = "sums.json"  # in `state`: members and samples of the sums that this site took part in
MAX_TEXT_DIFFERENCE = 1e-4  # relative: what the encoders of two machines may differ by
MAX_DEADLINE_DAYS = 30
OnEnded = Callable[[str, World, Tensors, Tensors], None]  # a training's key, its world, the final state, local tensors


@dataclass(frozen=True)
class Session:
    """Hold what a site has agreed to, as its folder has it."""

    folder: Path
    plan: Plan
    given: Tensors  # the tensors of the plan
    agreement: statements.Agreement
    salt: bytes

    @staticmethod
    def read(folder: Path) -> "Session":
        if not (folder / "agreement.json").exists():
            raise ReportedError("closed")
        words = read_json(folder / "agreement.json")
        plan = read_plan((folder / "plan.json").read_bytes())
        given, _ = read_tensors(folder / "plan.safetensors")
        return Session(folder, plan, given, statements.Agreement(**words["agreement"]), bytes.fromhex(words["salt"]))

    @property
    def secret(self) -> bytes:
        """Return the private session key, unless it was erased, is too old or did not come with a restored folder."""
        path = self.folder / SESSION_KEY_FILE
        if datetime.now(UTC) > datetime.fromisoformat(self.plan.deadline):
            erase_key(path)
        if not path.exists():
            raise ReportedError("session")
        return path.read_bytes()

    def step_path(self, number: int) -> Path:
        return self.folder / f"step-{number}.safetensors"

    def read_step(self, number: int) -> tuple[Tensors, dict[str, Any]]:
        """Return what this site computed in a round, and what it said of it."""
        if not self.step_path(number).exists():
            raise ReportedError("version", f"this site has not taken part in round {number} of the session")
        return read_tensors(self.step_path(number))


def erase_key(path: Path) -> None:
    if path.exists():
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        path.unlink()


def erase_expired_keys(folder: Path) -> None:
    for path in folder.glob(f"state/*/session/{SESSION_KEY_FILE}"):
        try:
            plan = read_plan((path.parent / "plan.json").read_bytes())
            is_over = datetime.now(UTC) > datetime.fromisoformat(plan.deadline)
        except (OSError, FederationError, ValueError):
            is_over = True
        if is_over:
            erase_key(path)


class SumMember:
    """Answer the steps of verified sums for one site."""

    def __init__(self, kit: SiteKit, signer: Signer, federation: str, on_ended: OnEnded) -> None:
        self.kit, self.signer, self.federation, self.on_ended = kit, signer, federation, on_ended
        self.ledger = Ledger(kit.folder)
        erase_expired_keys(kit.folder)

    def answer(
        self, request: Message, fields: SumRequest, site_training: SiteTraining, world: World, policy: Policy
    ) -> tuple[Message, dict[str, Any]]:
        """Return the reply to a step, and what it costs; a repeated step costs nothing."""
        folder, sent = self.kit.folder / "state" / fields.training / "session", to_tensors(request.arrays)
        extra: dict[str, Any] = {}
        masked: Tensors = {}
        costs: dict[str, Any] = {}
        if fields.kind == "plan":
            statement: Any = self.agree(folder, fields, sent, site_training, world, policy)
        elif fields.kind == "join":
            extra = self.join(fields, sent, site_training, world, policy)
            statement, costs = {}, {"costs": "measurement"}
        elif fields.kind == "describe":
            session = Session.read(folder)
            if not (session.folder / "end.json").exists():
                raise ReportedError("sum", "the session has not ended here, so it has no sums to compare with")
            self._check_data(session, world)
            totals, _ = read_tensors(session.folder / "counts.safetensors")
            path, _ = session.read_step(session.plan.settings.method.rounds - 1)
            facts = describe_site(self.kit, site_training, world, totals, path["state/mean"], policy)
            statement, extra, costs = {}, {"described": facts}, {"costs": "measurement"}
        else:
            session = Session.read(folder)
            self._check_data(session, world)
            member = _Step(
                self, session, replace(world, frozen=frozen_of_plan(session.plan, session.given, world.frozen)), policy
            )
            if fields.kind == "counts":
                statement, masked, is_new = member.count(fields.statements)
                costs = {"costs": "measurement", "session": statement.session} if is_new else {}
            elif fields.kind == "sum":
                statement, masked, is_new = member.upload(fields.round, fields.statements, sent)
                costs = {"costs": "upload", "spends": site_training.upload_cost} if is_new else {}
            else:
                statement, extra, is_new = member.end(fields.statements, sent)
                costs = {"costs": "measurement"} if is_new else {}
        header = {name: getattr(fields, name) for name in ECHOED_FIELDS}
        words = statement if isinstance(statement, dict) else statement.model_dump(mode="json")
        header |= {"client": self.kit.name, "statement": words, **extra}
        return Message(header, to_arrays(masked)), costs

    def agree(
        self, folder: Path, fields: SumRequest, sent: Tensors, site_training: SiteTraining, world: World, policy: Policy
    ) -> statements.Agreement:
        """Check a plan and agree to it with a new session key."""
        plan = read_plan(fields.plan.encode())
        self._check_plan(plan, sent, site_training, world)
        check_members(self.kit.folder, plan, self.kit.name, self.signer.public.decode(), policy.sum_of)
        samples = sample_hashes(world, self.kit.name)
        self._check_history(plan, world, samples, policy)
        if (folder / "agreement.json").exists() and (known := Session.read(folder)).plan.hash == plan.hash:
            self._check_data(known, world)
            return known.agreement
        erase_key(folder / SESSION_KEY_FILE)
        for path in folder.glob("*"):
            path.unlink()
        (secret, public), salt = statements.new_session_key(), token_bytes(32)
        facts = {"plan": plan.hash, "members": statements.hash_members(plan), "data": commit_data(salt, samples)}
        agreement = statements.sign(statements.Agreement(member=self.kit.name, key=public, **facts), self.signer)
        write_tensors(folder / "plan.safetensors", sent, {})
        (folder / "plan.json").write_bytes(plan.to_bytes())
        write_secret(folder / SESSION_KEY_FILE, secret)
        write_json(folder / "agreement.json", {"agreement": agreement.model_dump(mode="json"), "salt": salt.hex()})
        return agreement

    def _check_plan(self, plan: Plan, sent: Tensors, site_training: SiteTraining, world: World) -> None:
        """Refuse a plan that is not the opened training, or whose texts are not those of the site's own encoder."""
        if self.kit.made_by_server and split_address(self.kit.address)[0] not in LOOPBACK_NAMES:
            raise RequestRefused("server key")
        spec, frozen = site_training.spec, world.frozen
        facts = {
            "federation": self.federation,
            "encoder": encoder_fingerprint(site_training.encoder),
            "dim": frozen.dim,
            "template": template_of(frozen).get("template", ""),
            "multi_label": frozen.multi_label,
        }
        expected = plan_of_spec(spec, **facts)
        for name in ("training", "identity", "classes", "seed", *facts):
            if getattr(plan, name) != getattr(expected, name):
                raise ReportedError("sum", f"{name} of the plan is not that of the training this site has opened")
        if not abs(plan.scale - frozen.scale) <= 1e-6 * abs(frozen.scale):
            raise ReportedError("sum", f"the plan's logit scale is {plan.scale:g}, this encoder's {frozen.scale:g}")
        if not plan.settings.channel.verified:
            raise ReportedError("sum", "the plan is not that of a verified sum")
        try:
            left = datetime.fromisoformat(plan.deadline) - datetime.now(UTC)
        except (ValueError, TypeError) as error:
            raise ReportedError("sum", "the plan has no deadline with its time zone") from error
        if not timedelta(0) < left <= timedelta(days=MAX_DEADLINE_DAYS):
            allowed = f"within {MAX_DEADLINE_DAYS} days"
            raise ReportedError("sum", f"the plan's deadline must be {allowed}, got {plan.deadline}")
        plan.check_tensors(sent)
        own = plan_tensors(world)
        if own.keys() != sent.keys():
            raise ReportedError("sum", "the plan's class texts or reference samples are not those that this site has")
        for name, value in own.items():
            limit, theirs = 0.0 if name == "reference" else MAX_TEXT_DIFFERENCE, sent[name]
            is_alike = value.shape == theirs.shape and value.dtype == theirs.dtype
            if not is_alike or tensors.max_relative_difference({"": value}, {"": theirs}) > limit:
                raise ReportedError("sum", f"the plan's {name} is not what this site's own encoder makes of it")

    def _check_data(self, session: Session, world: World) -> None:
        """Refuse to go on with other samples than the site agreed with."""
        samples = sample_hashes(world, self.kit.name)
        if commit_data(session.salt, samples) != session.agreement.data:
            raise ReportedError("session", "the site's samples are not those that it agreed with; run a new session")

    def _check_history(self, plan: Plan, world: World, samples: Mapping[str, list[str]], policy: Policy) -> None:
        """Refuse sums whose difference to an earlier one would show one member or a few samples."""
        path = self.kit.folder / "state" / HISTORY_FILE
        if not path.exists() or world.channel.noise_multiplier:
            return
        known = read_json(path)
        now = {name: set(rows) for name, rows in samples.items()}
        snapshots = [{name: set(rows) for name, rows in of.items()} for of in known["samples"]]
        snapshots = [of for of in snapshots if any(rows & now.get(name, set()) for name, rows in of.items())]
        if not snapshots:
            return
        member_sets = {frozenset(members) for members in known["members"]}
        if len({*member_sets, frozenset(member_fingerprints(plan))}) - 1 > policy.member_changes:
            raise RequestRefused("member change")
        for before in snapshots:  # of every sum that has left, because the server may compare any two
            for name in {*before, *now}:
                changed = len(before.get(name, set()) ^ now.get(name, set()))
                if 0 < changed < policy.min_class_samples:
                    raise RequestRefused("data change", count=changed, least=policy.min_class_samples)

    def remember(self, plan: Plan, samples: Mapping[str, list[str]]) -> None:
        """Keep members and samples of a sum, before its first upload leaves."""
        path = self.kit.folder / "state" / HISTORY_FILE
        known = read_json(path) if path.exists() else {"members": [], "samples": []}
        for key, value in (("members", sorted(member_fingerprints(plan))), ("samples", dict(samples))):
            known[key] = [*(other for other in known[key] if other != value), value]
        write_json(path, known)

    def join(
        self, fields: SumRequest, sent: Tensors, site_training: SiteTraining, world: World, policy: Policy
    ) -> dict[str, Any]:
        """Adapt a state that enough compared peers have signed."""
        plan = read_plan(fields.plan.encode())
        given = {key.removeprefix("plan/"): value for key, value in sent.items() if key.startswith("plan/")}
        state = {key.removeprefix("state/"): value for key, value in sent.items() if key.startswith("state/")}
        self._check_plan(plan, given, site_training, world)
        statements.read_ends(fields.statements, plan, state)
        if count_signers(self.kit.folder, self.federation, plan) < policy.sum_of:
            raise RequestRefused("sum of", least=policy.sum_of)
        world = replace(world, frozen=frozen_of_plan(plan, given, world.frozen))
        local = tensors.copy(world.method.init(world.frozen)[1])
        return self.finish(fields.training, world, state, local, policy)

    def finish(self, key: str, world: World, state: Tensors, local: Tensors, policy: Policy) -> dict[str, Any]:
        """Adapt to the final state and keep the classifier; return what is said of it, coarsely."""
        name, method = self.kit.name, world.method
        sent = method.send(state, name)
        done = Sequential(world).adapt(method.rounds, [Task(name, sent, local, True)]).replies[name]
        self.on_ended(key, world, sent, done.local_tensors)
        coarse = replace(policy, scores="none" if policy.score_detail == "none" else "coarse")
        described = {} if coarse.scores == "none" else describe_local(world, sent, done, True)
        return {"scores": coarse.allowed_scores(done.scores), "described": described}


@dataclass(frozen=True)
class _Step:
    """Compute one step of a session."""

    member: SumMember
    session: Session
    world: World  # with the texts of the plan
    policy: Policy

    @property
    def name(self) -> str:
        return self.member.kit.name

    def count(self, entries: Any) -> tuple[statements.UploadStatement, Tensors, bool]:
        """Upload class counts, once every member has agreed to the same plan."""
        agreements = self._agreements(entries)
        session = statements.hash_statements(agreements)  # of plan, members and all session keys
        identity = statements.expected_upload(session, statements.COUNTS_ROUND, hash_tensors({}), session)
        if stored := self._stored(statements.COUNTS_ROUND, identity):
            return stored
        write_json(self.session.folder / "agreements.json", entries)
        world = self.world
        y = world.y[torch.from_numpy(world.members[self.name].train)]
        counts = verified.count_classes(y, len(world.frozen.classes), world.method)
        self.member.remember(self.session.plan, sample_hashes(world, self.name))
        return self._release(counts, {}, identity, 1.0, agreements, {})

    def upload(self, number: int, entries: Any, sent: Tensors) -> tuple[statements.UploadStatement, Tensors, bool]:
        """Check the uploads and the state of the round before, train, and upload under masks."""
        if number >= self.world.method.rounds:
            rounds = self.world.method.rounds
            raise ReportedError("sum", f"the plan has {rounds} rounds, and round {number} was asked for")
        state, previous, limits = self._check_round(number, entries, sent)
        agreements = self._agreements(read_json(self.session.folder / "agreements.json"))
        identity = statements.expected_upload(
            statements.hash_statements(agreements), number, hash_tensors(state), previous
        )
        if stored := self._stored(number, identity):
            return stored
        world, id = self.world, self.name
        initial_local = tensors.copy(world.method.init(world.frozen)[1])
        kept = {k[6:]: v for k, v in self.session.read_step(number - 1)[0].items() if k.startswith("local/")}
        local, channel_state = split_channel_state(kept if number else initial_local)
        task = Task(id, {**world.method.send(state, id), **limits}, local, True)
        done = Sequential(world).round(number, [task]).replies[id]
        upload = done.upload or {}
        check_upload(upload, initial_local, error_context(world, number, id))
        draw = channel_noise(world, id, number)
        upload, channel_state = UploadPipeline(world.channel).encode(upload, task.sent, channel_state, draw)
        weight = float(done.rows) if upload_sum(world.method) == "samples" else 1.0
        kept = join_channel_state(done.local_tensors, channel_state)
        result = self._release(upload, done.scores, identity, weight, agreements, {"local": kept, "state": state})
        for old in range(number - 1):
            self.session.step_path(old).unlink(missing_ok=True)
        return result

    def end(self, entries: Any, sent: Tensors) -> tuple[statements.EndStatement, dict[str, Any], bool]:
        """Check the last round, adapt, sign the final state and erase the session's key."""
        path, rounds = self.session.folder / "end.json", self.world.method.rounds
        posted = {key[6:]: value for key, value in sent.items() if key.startswith("state/")}
        if path.exists() and (stored := read_json(path))["statement"]["state"] == hash_tensors(posted):
            return statements.EndStatement(**stored["statement"]), stored["reply"], False
        state, previous, _ = self._check_round(rounds, entries, sent)
        kept = {k[6:]: v for k, v in self.session.read_step(rounds - 1)[0].items() if k.startswith("local/")}
        local = split_channel_state(kept if rounds else self.world.method.init(self.world.frozen)[1])[0]
        reply = self.member.finish(self.session.folder.parent.name, self.world, state, local, self.policy)
        session = statements.hash_statements(self._agreements(read_json(self.session.folder / "agreements.json")))
        words = {"state": hash_tensors(state), "previous": previous, "ledger": self.member.ledger.history().head}
        statement = statements.sign(
            statements.EndStatement(member=self.name, session=session, **words), self.member.signer
        )
        write_json(path, {"statement": statement.model_dump(mode="json"), "reply": reply})
        erase_key(self.session.folder / SESSION_KEY_FILE)
        return statement, reply, True

    def _agreements(self, entries: Any) -> dict[str, statements.Agreement]:
        agreements = statements.read_agreements(entries, self.session.plan)
        if agreements[self.name] != self.session.agreement:
            raise ReportedError("sum", "the agreement of this site was replaced; nothing leaves")
        return agreements

    def _check_round(self, number: int, entries: Any, sent: Tensors) -> tuple[Tensors, str, Tensors]:
        """Return the state before a round, the hash of the uploads that led to it, and the limits of uploads."""
        plan, settings = self.session.plan, self.session.plan.settings
        stored, header = self.session.read_step(number - 1)
        own = statements.UploadStatement(**header["statement"])
        vectors = {
            key[7:]: statements.to_vector(value.numpy()) for key, value in sent.items() if key.startswith("upload/")
        }
        state = {key[6:]: value for key, value in sent.items() if key.startswith("state/")}
        expected = {name: getattr(own, name) for name in ("session", "round", "state", "previous", "layout")}
        signed = statements.read_uploads(entries, vectors, plan, expected)
        if signed[self.name].upload != own.upload:
            raise ReportedError("sum", "the upload of this site was replaced; nothing leaves")
        if number == 0:
            total, _ = statements.open_sum(vectors.values(), own.layout, True)
            write_tensors(self.session.folder / "counts.safetensors", total, {})
            before = statements.initial_shared(self.world.method, self.world.frozen, len(plan.members))
            statements.check_same_state(before, state)
        else:
            total, _ = statements.open_sum(vectors.values(), own.layout, statements.is_total(settings))
            before = {key[6:]: value for key, value in stored.items() if key.startswith("state/")}
            statements.check_same_state(
                statements.next_state(settings, before, total, plan.member_names, plan.multi_label), state
            )
        counts, _ = read_tensors(self.session.folder / "counts.safetensors")
        self._check_counts(counts)
        limits = verified.class_limits(self.world.method, self.world.frozen.dim, counts)
        return state, statements.hash_statements(signed), limits

    def _check_counts(self, counts: Tensors) -> None:
        """Refuse counts that no members can have, as a wrong mask would give."""
        n, limit = len(self.session.plan.members), self.world.channel.max_samples
        is_valid = bool((counts["counts"] >= 0).all() and (counts["members"] >= 0).all())
        samples = counts["samples"]
        is_valid &= int(counts["members"].max()) <= n and bool(((samples >= 0) & (samples <= n * limit)).all())
        if not is_valid or bool((counts["counts"].amax(-1) > samples).any()):
            raise ReportedError("sum", "the summed counts are not plausible; a member sent a wrong mask or upload")

    def _stored(
        self, number: int, identity: Mapping[str, Any]
    ) -> tuple[statements.UploadStatement, Tensors, bool] | None:
        """Return the upload of this round, if it has left before; refuse to compute it at another point."""
        if not self.session.step_path(number).exists():
            return None
        stored, header = self.session.read_step(number)
        statement = statements.UploadStatement(**header["statement"])
        if any(getattr(statement, name) != value for name, value in identity.items()):
            raise ReportedError("sum", f"round {number} was asked for a second time at another state; nothing leaves")
        return statement, {"masked": stored["masked"]}, False

    def _release(
        self,
        upload: Tensors,
        scores: Mapping[str, Any],
        identity: Mapping[str, Any],
        weight: float,
        agreements: Mapping[str, statements.Agreement],
        keep: Mapping[str, Tensors],
    ) -> tuple[statements.UploadStatement, Tensors, bool]:
        """Mask an upload, sign it and write it to disk; only then it may leave."""
        context = f"site {self.name}, round {identity['round']}"
        weighted = verified.weight_upload(upload, weight, context)
        weighted[statements.SCORES_KEY] = summed_scores(scores, self.policy)
        integers = verified.to_fixed_point(weighted, len(agreements), context)
        keys = statements.pair_keys(
            self.session.secret, agreements, self.name, [identity[name] for name in sorted(identity)]
        )
        vector = verified.mask_vector(verified.pack_integers(integers), self.name, keys)
        words = {**identity, "upload": hash_vector(vector), "layout": statements.layout_of(upload)}
        statement = statements.sign(statements.UploadStatement(member=self.name, **words), self.member.signer)
        masked = {"masked": torch.from_numpy(vector.view("int64"))}
        kept = {f"{group}/{key}": value for group, of in keep.items() for key, value in of.items()}
        number = identity["round"]
        write_tensors(self.session.step_path(number), masked | kept, {"statement": statement.model_dump(mode="json")})
        return statement, masked, True


def summed_scores(scores: Mapping[str, Any], policy: Policy) -> torch.Tensor:
    """Return the numbers that add up to the scores of all members; zeros if the policy reports none."""
    if not scores or policy.score_detail == "none":
        return torch.zeros(len(statements.SCORE_NAMES), dtype=torch.float64)
    loss = float(scores.get("loss", 0.0)) * scores["validation_rows"]
    counts = [float(scores[name]) for name in statements.SCORE_NAMES[:-1]]
    return torch.tensor([*counts, min(loss, 1e6)], dtype=torch.float64)


def plan_tensors(world: World) -> Tensors:
    """Return what a plan holds of class texts and reference samples."""
    own = {"text": text_of(world.frozen), "descriptions": world.frozen.descriptions}
    own["reference"] = world.reference_x if len(world.reference) else None
    return {name: value for name, value in own.items() if value is not None}


def frozen_of_plan(plan: Plan, given: Tensors, frozen: Frozen) -> Frozen:
    text, negative = split_text(given.get("text"), plan.multi_label)
    frozen = replace(frozen, scale=plan.scale, seed=plan.seed, descriptions=given.get("descriptions"))
    return replace(frozen, text=text, negative_text=negative)


def sample_hashes(world: World, name: str) -> dict[str, list[str]]:
    """Return a hash of every sample that the site uses, by class, or by finding and whether it is present."""
    member, out = world.members[name], dict[str, list[str]]()
    for rows in (member.train, member.validation, member.test):
        x, y = world.read(rows), world.y[torch.from_numpy(rows)]
        for sample, label in zip(x, y.tolist(), strict=True):
            digest = sha256(sample.contiguous().numpy().tobytes()).hexdigest()[:16]
            for key in label_keys(label, world.frozen.classes):
                out.setdefault(key, []).append(digest)
    return {name: sorted(out[name]) for name in sorted(out)}


def commit_data(salt: bytes, samples: Mapping[str, Sequence[str]]) -> str:
    return sha256(b"fedvlm data 1\n" + salt + json.dumps(samples, sort_keys=True).encode()).hexdigest()


def member_fingerprints(plan: Plan) -> set[str]:
    return {key_fingerprint(plan.federation, member.name, member.key) for member in plan.members}
