"""Relay the masked uploads of a verified sum between its members; the server sees sums alone."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from time import sleep
from typing import Any

from fedvlm.channel.verified import MIN_SUM_MEMBERS, Vector
from fedvlm.core import Tensors
from fedvlm.deploy import statements
from fedvlm.deploy.identity.certificates import current_certificate
from fedvlm.deploy.messages import SCORE_COUNTS, SumReply, check_reply, encoder_fingerprint, parse
from fedvlm.deploy.plan import DEFAULT_DEADLINE_DAYS, Member, Plan, hash_tensors, plan_of_spec
from fedvlm.deploy.server.engine import RemoteEngine
from fedvlm.deploy.transcript import Transcript, to_entries
from fedvlm.engines.client import ClientReply, RemoteState, RoundReplies, Task
from fedvlm.engines.flower.client import to_arrays, to_tensors
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import FederationError

RETRY_WAIT_SECONDS = 1.0  # seconds until members that are not connected are asked again


class SumEngine(RemoteEngine):
    """Run the rounds of a verified sum: every member takes part in every round."""

    plan: Plan
    transcript: Transcript
    shared: Tensors
    session: str

    def begin(self, transcript: Transcript) -> None:
        """Agree on a plan with every member and sum the class counts, or go on with the session that was begun."""
        self.transcript, self.quorum = transcript, 0.0
        if transcript.exists:
            self.plan, tensors = transcript.read_plan()
        else:
            self.plan, tensors = self._propose()
            transcript.write_plan(self.plan, tensors)
            header = {"plan": self.plan.to_bytes().decode()}
            replies = self._ask_all("plan", 0, header, tensors)
            entries = [reply.header["statement"] for reply in replies.values()]
            transcript.write_agreements(statements.read_agreements(entries, self.plan))
        agreements = statements.read_agreements(transcript.read_agreements(), self.plan)
        self.session = statements.hash_statements(agreements)
        if not transcript.sum_path(statements.COUNTS_ROUND).exists():
            expected = statements.expected_upload(
                self.session, statements.COUNTS_ROUND, hash_tensors({}), statements.hash_statements(agreements)
            )
            self._collect("counts", statements.COUNTS_ROUND, {"statements": to_entries(agreements)}, {}, expected)

    def _propose(self) -> tuple[Plan, Tensors]:
        first = self.sites[self.base]
        names = sorted(name for name in self.kit.sites if not self.exclusion_reason(name))
        if missing := sorted(set(names) - set(self.nodes)):
            reasons = "\n".join(f"  {name}: {self.missing.get(name, 'it is not connected')}" for name in missing)
            raise FederationError(
                f"a verified sum needs every site of the federation, and {len(missing)} of {len(names)} are missing; "
                f"repeat the command when they are there, or revoke a site that has left\n{reasons}"
            )
        if len(names) < MIN_SUM_MEMBERS:
            raise FederationError(
                f"a verified sum needs at least {MIN_SUM_MEMBERS} sites, got {len(names)}; with fewer, use noise, or "
                "set plain = true in every site's policy and in server.toml"
            )
        certificates = {name: current_certificate(self.kit.folder, name) for name in names}
        tensors = {**first.texts_of_plan, **self.reference}
        deadline = datetime.now(UTC) + timedelta(days=DEFAULT_DEADLINE_DAYS)
        plan = plan_of_spec(
            self.spec,
            federation=certificates[names[0]].federation,
            encoder=encoder_fingerprint(first.header["encoder"]),
            dim=first.header["dim"],
            scale=first.header["scale"],
            template=first.header.get("template", ""),
            multi_label=bool(first.header.get("multi_label")),
            tensors={name: hash_tensors({"": value}) for name, value in tensors.items()},
            members=tuple(Member(name=name, key=certificates[name].key) for name in names),
            session=token_hex(16),
            deadline=deadline.isoformat(timespec="seconds"),
            purpose=str(self.spec["run"]["purpose"]),
            contact=str(self.spec["run"]["contact"])[:200],
        )
        return plan, tensors

    def post_state(self, shared: Tensors) -> None:
        """Take the state that the next request posts to all members."""
        self.shared = shared

    def check(self, message: Message, id: str, request: Message) -> None:
        check_reply(message, request.header)
        if "masked" in message.arrays:
            statements.to_vector(message.arrays["masked"])

    def round(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        """Relay the uploads of the round before with the new state; return the sum of the new ones."""
        header, arrays, previous = self._last_uploads(number)
        expected = statements.expected_upload(self.session, number, hash_tensors(self.shared), previous)
        signed, vectors = self._collect("sum", number, header, arrays, expected)
        layout = signed[self.plan.member_names[0]].layout
        total, scores = statements.open_sum(vectors.values(), layout, statements.is_total(self.plan.settings))
        none = dict.fromkeys(SCORE_COUNTS, 0)
        reply = ClientReply({}, RemoteState(number + 1), none, 1, {}, is_encoded=True)
        done = dict.fromkeys(self.plan.member_names, reply)
        return RoundReplies(done, decoded_sum=total, min_clients=len(done), line=mean_of_scores(scores))

    def adapt(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        """Relay the last uploads with the final state, and collect what every member signs of it."""
        header, arrays, _ = self._last_uploads(number)
        replies = self._ask_all("end", number, header, arrays)
        entries = [reply.header["statement"] for reply in replies.values()]
        self.transcript.write_end(statements.read_ends(entries, self.plan, self.shared), self.shared)
        done = {}
        for name, reply in replies.items():
            fields = parse(SumReply, reply.header, "the reply")
            scores = dict(fields.scores or dict.fromkeys(SCORE_COUNTS, 0))
            done[name] = ClientReply(None, RemoteState(number + 1), scores, 1, fields.described, is_encoded=True)
        return RoundReplies(done)

    def join(self, transcript: Transcript, site: str) -> dict[str, Any]:
        """Give a site that was no member the final state with what all members signed; return its scores."""
        (plan, given), (entries, state), self.quorum = transcript.read_plan(), transcript.read_end(), 1.0
        arrays = {f"plan/{key}": value for key, value in given.items()}
        arrays |= {f"state/{key}": value for key, value in state.items()}
        number = plan.settings.method.rounds
        words = {"kind": "join", "training": self.training, "round": number, "client": site}
        header = {**words, "plan": plan.to_bytes().decode(), "statements": entries}
        reply = self.exchange({site: Message(header, to_arrays(arrays))}, number)[site]
        return dict(parse(SumReply, reply.header, "the reply").scores or {})

    def describe(self, transcript: Transcript) -> dict[str, Any]:
        """Return what each member says of its data, and the sums of class counts with the numbers of members."""
        self.transcript, self.quorum, (self.plan, _) = transcript, 0.0, transcript.read_plan()
        replies = self._ask_all("describe", self.plan.settings.method.rounds, {}, {})
        entries, vectors, _ = transcript.read_sum(statements.COUNTS_ROUND)
        totals, _ = statements.open_sum(vectors.values(), entries[0]["layout"], True)
        sites = {name: parse(SumReply, reply.header, "the reply").described for name, reply in replies.items()}
        return {
            "sites": sites,
            **{key: totals[key].tolist()[: len(self.plan.classes)] for key in ("counts", "members")},
        }

    def _last_uploads(self, number: int) -> tuple[dict[str, Any], Tensors, str]:
        """Return the statements and uploads of the round before a round, with the state that comes of them."""
        entries, vectors, _ = self.transcript.read_sum(number - 1)
        arrays = {f"state/{key}": value for key, value in self.shared.items()}
        arrays |= {f"upload/{name}": to_tensors({"": vector.view("int64")})[""] for name, vector in vectors.items()}
        signed = {entry["member"]: statements.UploadStatement(**entry) for entry in entries}
        return {"statements": entries}, arrays, statements.hash_statements(signed)

    def _collect(
        self, kind: str, number: int, header: Mapping[str, Any], arrays: Tensors, expected: Mapping[str, Any]
    ) -> tuple[dict[str, statements.UploadStatement], dict[str, Vector]]:
        """Collect a masked upload of every member, verify and keep them."""
        replies = self._ask_all(kind, max(number, 0), header, arrays)
        vectors = {name: statements.to_vector(reply.arrays["masked"]) for name, reply in replies.items()}
        entries = [reply.header["statement"] for reply in replies.values()]
        signed = statements.read_uploads(entries, vectors, self.plan, expected)
        keep: Mapping[str, statements.Statement] = signed
        self.transcript.write_sum(number, keep, vectors, self.shared if kind == "sum" else {})
        return signed, vectors

    def _ask_all(self, kind: str, number: int, header: Mapping[str, Any], arrays: Tensors) -> dict[str, Message]:
        """Ask every member until all have answered; a refusal, or the plan's deadline, ends it."""
        end = datetime.fromisoformat(self.plan.deadline)
        replies: dict[str, Message] = {}
        words = {"kind": kind, "training": self.training, "round": number, **header}
        while True:
            waiting = [name for name in self.plan.member_names if name not in replies]
            self.missing = {}
            requests = {name: Message({**words, "client": name}, to_arrays(arrays)) for name in waiting}
            self.drop_revoked()
            if any(name not in self.nodes for name in waiting):
                self.open_new_nodes(self.kit.deadline)
            replies |= self.exchange(requests, number)
            absent = [name for name in waiting if name not in replies]
            refusals = {name: self.missing.get(name, "") for name in absent if not self._may_return(name)}
            if refusals or (absent and datetime.now(UTC) > end):
                reasons = "\n".join(f"  {name}: {self.missing.get(name, '')}" for name in refusals or absent)
                raise FederationError(
                    f"round {number}: a verified sum needs all {len(self.plan.members)} members, and {len(absent)} "
                    f"did not answer; the run can be resumed until {self.plan.deadline[:16]}\n{reasons}"
                )
            if not absent:
                return {name: replies[name] for name in self.plan.member_names}
            self.log_event("waiting", sites=absent, left=round((end - datetime.now(UTC)).total_seconds()))
            sleep(RETRY_WAIT_SECONDS)

    def _may_return(self, name: str) -> bool:
        """Tell whether a member that did not answer is worth waiting for: it is offline, and did not refuse."""
        reason = self.missing.get(name, "")
        return not self.exclusion_reason(name) and ("did not answer within" in reason or "not connected" in reason)


def mean_of_scores(scores: Mapping[str, float]) -> dict[str, float | None]:
    """Return the curve's numbers from summed scores, over all samples of all members."""
    rows = {split: scores[f"{split}_rows"] for split in ("validation", "test")}
    means = {split: scores[f"{split}_hits"] / rows[split] if rows[split] else None for split in rows}
    loss = scores["loss"] / rows["validation"] if rows["validation"] else None
    return {"loss": loss, "validation": means["validation"], "accuracy": means["test"]}
