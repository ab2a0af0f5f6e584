"""Keep everything that the members of a verified sum signed, and verify it offline."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedvlm.channel.verified import Vector
from fedvlm.core import Tensors
from fedvlm.deploy import statements
from fedvlm.deploy.identity.certificates import key_fingerprint
from fedvlm.deploy.plan import Plan, hash_tensors, read_plan
from fedvlm.deploy.site.peers import Peer, normalise_fingerprint
from fedvlm.errors import DataError, FederationError, FedVLMError
from fedvlm.storage.files import read_json, read_tensors, write_file, write_json, write_tensors

TRANSCRIPT_SUFFIX = "transcript"  # of a folder beside the tensors of a training


@dataclass(frozen=True)
class Transcript:
    """Read and write the folder of one session."""

    folder: Path

    @property
    def exists(self) -> bool:
        return (self.folder / "agreements.json").exists()

    def write_plan(self, plan: Plan, tensors: Tensors) -> None:
        write_tensors(self.folder / "plan.safetensors", tensors, {})
        write_file(self.folder / "plan.json", plan.to_bytes())

    def read_plan(self) -> tuple[Plan, Tensors]:
        plan = read_plan((self.folder / "plan.json").read_bytes())
        tensors, _ = read_tensors(self.folder / "plan.safetensors")
        plan.check_tensors(tensors)
        return plan, tensors

    def write_agreements(self, signed: Mapping[str, statements.Statement]) -> None:
        write_json(self.folder / "agreements.json", to_entries(signed))

    def read_agreements(self) -> list[Any]:
        return list(read_json(self.folder / "agreements.json"))

    def sum_path(self, number: int) -> Path:
        return self.folder / f"sum-{number}.safetensors"

    def write_sum(
        self, number: int, signed: Mapping[str, statements.Statement], vectors: Mapping[str, Vector], state: Tensors
    ) -> None:
        """Write the uploads of a round with the state that they were computed at."""
        flat = {f"upload/{name}": torch.from_numpy(vector.view("int64")) for name, vector in vectors.items()}
        flat |= {f"state/{key}": value for key, value in state.items()}
        write_tensors(self.sum_path(number), flat, {"statements": to_entries(signed)})

    def read_sum(self, number: int) -> tuple[list[Any], dict[str, Vector], Tensors]:
        flat, header = read_tensors(self.sum_path(number))
        vectors = {
            key[7:]: statements.to_vector(value.numpy()) for key, value in flat.items() if key.startswith("upload/")
        }
        return header["statements"], vectors, {k[6:]: v for k, v in flat.items() if k.startswith("state/")}

    def write_end(self, signed: Mapping[str, statements.Statement], state: Tensors) -> None:
        write_tensors(self.folder / "end.safetensors", state, {"statements": to_entries(signed)})

    def read_end(self) -> tuple[list[Any], Tensors]:
        state, header = read_tensors(self.folder / "end.safetensors")
        return header["statements"], state


def to_entries(signed: Mapping[str, statements.Statement]) -> list[dict[str, Any]]:
    return [signed[name].model_dump(mode="json") for name in sorted(signed)]


def find_transcripts(run: Path) -> list[Transcript]:
    """Return the transcripts of a run, or the one whose folder is named."""
    if (run / "plan.json").exists():
        return [Transcript(run)]
    found = [Transcript(path) for path in sorted((run / "trainings").glob(f"*.{TRANSCRIPT_SUFFIX}"))]
    if not found:
        raise DataError(f"{run} has no transcript; only runs with channel.verified = true leave one")
    return found


def verify_transcript(transcript: Transcript, peers: Mapping[str, Peer]) -> list[str]:
    """Verify every signature, sum and state of a session; return what was verified, line by line.

    `peers` are those whose fingerprints the reader has compared; without them signatures show that the members are
    the same throughout, but not who they are.
    """
    try:
        return _verify(transcript, peers)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{transcript.folder} is incomplete or damaged ({error})") from error
    except FedVLMError as error:
        raise DataError(f"{transcript.folder} does not verify: {error}") from error


def _verify(transcript: Transcript, peers: Mapping[str, Peer]) -> list[str]:
    plan, _ = transcript.read_plan()
    settings, names = plan.settings, plan.member_names
    fingerprints = {member.name: key_fingerprint(plan.federation, member.name, member.key) for member in plan.members}
    for name, fingerprint in fingerprints.items():
        if name in peers and normalise_fingerprint(peers[name].fingerprint) != normalise_fingerprint(fingerprint):
            raise FederationError(f"the key of {name} is not the one that {peers[name].compared_by} compared")
    compared = [name for name in names if name in peers]
    agreements = statements.read_agreements(transcript.read_agreements(), plan)
    session = previous = statements.hash_statements(agreements)  # of plan, members and all session keys
    rounds = settings.method.rounds
    entries, vectors, _ = transcript.read_sum(statements.COUNTS_ROUND)
    expected = statements.expected_upload(session, statements.COUNTS_ROUND, hash_tensors({}), previous)
    previous = statements.hash_statements(statements.read_uploads(entries, vectors, plan, expected))
    end_entries, final = transcript.read_end()
    after = None
    for number in range(rounds):
        entries, vectors, state = transcript.read_sum(number)
        if after is not None:
            statements.check_same_state(after, state)
        signed = statements.read_uploads(
            entries, vectors, plan, statements.expected_upload(session, number, hash_tensors(state), previous)
        )
        layout = signed[names[0]].layout
        total, _ = statements.open_sum(vectors.values(), layout, statements.is_total(settings))
        after = statements.next_state(settings, state, total, names, plan.multi_label)
        previous = statements.hash_statements(signed)
    if after is not None:
        statements.check_same_state(after, final)
    ends = statements.read_ends(end_entries, plan, final)
    if any((end.session, end.previous) != (session, previous) for end in ends.values()):
        raise FederationError("the members ended another session than the one of these uploads")
    return [
        f"plan {plan.hash[:16]}: {settings.method.name}, {rounds} rounds, {len(names)} members",
        f"session {session[:16]}: every member agreed to this plan and these members",
        f"{len(names) * (rounds + 1)} masked uploads are signed, and their sums lead to every state",
        f"the final state {hash_tensors(final)[:16]} is signed by {', '.join(names)}",
        *(f"{name}: fingerprint {fingerprints[name]}{'' if name in peers else ' (not compared)'}" for name in names),
        *([] if compared else ["no fingerprint was compared: name a site's folder with --site"]),
    ]
