"""Measure given classifiers on a site's test samples, without training.

A head that a server made up counts samples: scores of many such heads reveal them. So under the rules of verified sums
a site measures a classifier only if a session of its peers led to it, or if people there have approved its hash.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.channel import Channel
from fedvlm.core import Tensors, make
from fedvlm.data.partition import ClientSplit, Partition, SampleList
from fedvlm.data.splits import SPLITS
from fedvlm.data.table import EmbeddedTable
from fedvlm.deploy.kits import SiteKit
from fedvlm.deploy.messages import (
    EvaluationRequest,
    ReportedError,
    RequestRefused,
    TestedClassifier,
    encoder_fingerprint,
    parse,
)
from fedvlm.deploy.plan import hash_tensors, read_plan
from fedvlm.deploy.site.peers import count_signers
from fedvlm.deploy.site.policy import ALL_METHODS, POLICY_FILE, Policy
from fedvlm.deploy.site.snapshot import SAMPLES_FILE
from fedvlm.deploy.site.sums import MAX_TEXT_DIFFERENCE
from fedvlm.deploy.site.training import PARTITION_SEED, ignore_progress, load_site_samples
from fedvlm.deploy.statements import hash_statements, read_agreements, read_ends
from fedvlm.engines.client import Scores, measure
from fedvlm.errors import FederationError, join_names
from fedvlm.runner.load import load
from fedvlm.runner.prepare import Prepared, check_samples, divide_client, frozen_of, prepare, text_of
from fedvlm.runner.settings import Settings, build
from fedvlm.storage.files import read_json, read_tensors
from fedvlm.tensors import max_relative_difference

EVALUATION_KEY = sha256(b"fedvlm evaluation").hexdigest()[:24]  # under which a site counts all its evaluations
ZERO_SHOT = "zero-shot"


@dataclass(frozen=True)
class Evaluation:
    """Hold what a request asks to measure."""

    kit: SiteKit
    settings: Settings
    classes: list[str]
    entries: list[TestedClassifier]
    tensors: list[Tensors]  # of each classifier
    proofs: list[dict[str, Any]]

    @staticmethod
    def read(kit: SiteKit, fields: EvaluationRequest, tensors: Tensors) -> "Evaluation":
        identity = fields.spec.run.identity
        entries = [parse(TestedClassifier, entry, "a classifier") for entry in identity.get("classifiers", ())]
        parts = [
            {key.partition("/")[2]: value for key, value in tensors.items() if key.partition("/")[0] == str(number)}
            for number in range(len(entries))
        ]
        is_whole = 0 < len(entries) == len(fields.proofs) and len(tensors) == sum(map(len, parts))
        if not is_whole or [hash_tensors(part) for part in parts] != [entry.tensors for entry in entries]:
            raise ReportedError("request", "the classifiers are not those of the request's hashes")
        settings = replace(build(identity["settings"]), tune=(), subgroups=(), channel=Channel())
        return Evaluation(kit, settings, fields.spec.classes, entries, parts, fields.proofs)

    def admit(self, policy: Policy) -> None:
        """Refuse methods that the policy does not name; zero-shot has nothing of anybody's."""
        for entry in self.entries:
            if not {ALL_METHODS, entry.method.get("name")} & {*policy.methods, ZERO_SHOT}:
                raise RequestRefused("method", f"the method {entry.method.get('name')} is not in {POLICY_FILE}")
        if not self.kit.plays:
            policy.check_partition(self.settings.clients)

    def is_signed(self, federation: str, own_key: str, policy: Policy) -> bool:
        """Return whether every classifier is the end of a verified sum that enough compared peers have signed."""
        for entry, tensors, proof in zip(self.entries, self.tensors, self.proofs, strict=True):
            if not proof:
                return False
            plan = read_plan(str(proof.get("plan")).encode())
            state = {key.removeprefix("shared/"): value for key, value in tensors.items() if key != "text"}
            agreements, ends = read_agreements(proof.get("agreements"), plan), read_ends(proof.get("ends"), plan, state)
            if {end.session for end in ends.values()} != {hash_statements(agreements)}:
                raise FederationError("the members ended another session than that of the plan")
            if (plan.settings.method, plan.classes) != (make(**entry.method), self.classes):
                raise FederationError("the plan that the members signed has another method or other classes")
            if count_signers(self.kit.folder, federation, plan, own_key) < policy.sum_of:
                return False
        return True

    def measure_all(self, policy: Policy) -> tuple[str, int, list[Scores]]:
        """Return the encoder, the number of patients or else images tested on, and the scores of each classifier."""
        tables: dict[frozenset[str], tuple[EmbeddedTable, NDArray[np.int64]]] = {}  # by what a method needs
        scores, name = [], self.kit.name
        for number, entry in enumerate(self.entries):
            settings = replace(self.settings, method=make(**entry.method))
            if (needs := settings.method.traits.needs) not in tables:
                rows = self._load(settings)
                tables[needs] = rows, self._test_samples(settings, rows, policy)
            rows, test = tables[needs]
            given = self.tensors[number]
            is_other = entry.encoder and encoder_fingerprint(entry.encoder) != encoder_fingerprint(rows.encoder)
            if is_other or not _is_own_text(given.get("text"), rows):
                raise ReportedError("texts")
            none = np.zeros(0, np.int64)
            partition = Partition({name: ClientSplit(name, "", none, none, test)}, 0, none)
            seed = settings.seeds[0]
            world = Prepared(settings, rows, seed, partition, frozen_of(rows, seed)).own_world(name)
            shared, local = (
                {key.removeprefix(prefix): value for key, value in given.items() if key.startswith(prefix)}
                for prefix in ("shared/", "local/")
            )
            local = local or world.method.init(world.frozen)[1]
            scores.append(measure(world, world.method.send(shared, entry.client), local, name, last=True))
        groups = None if rows.groups is None else rows.groups[test].tolist()
        units = len(test) if groups is None else len({*groups} - {""}) + groups.count("")
        return rows.encoder, units, scores

    def _load(self, settings: Settings) -> EmbeddedTable:
        kit = self.kit
        rows = load(settings, ignore_progress)[0] if kit.plays else load_site_samples(kit, settings, self.classes)
        check_samples(settings, rows)
        return rows

    def _test_samples(self, settings: Settings, rows: EmbeddedTable, policy: Policy) -> NDArray[np.int64]:
        kit, seed = self.kit, settings.seeds[0]
        if kit.plays:
            test = prepare(settings, rows, seed).partition.clients[kit.plays].test
        elif kit.test_only or set(rows.splits.tolist()) == {SPLITS[-1]}:
            test = np.flatnonzero(rows.labels >= 0)
        else:
            partition_seed = seed if policy.server_divides else PARTITION_SEED
            test = divide_client(settings.clients, rows, kit.name, partition_seed).clients[kit.name].test
            trained = self._trained_content(policy)
            test = np.array([row for row in test.tolist() if rows.content[row] not in trained], np.int64)
        if not len(test):
            raise ReportedError("test samples")
        return test

    def _trained_content(self, policy: Policy) -> set[str]:
        """Return the images of training and validation of all trainings here: new data are divided anew."""
        out: set[str] = set()
        for path in sorted((self.kit.folder / "state").glob(f"*/{SAMPLES_FILE}")):
            stored, about = read_tensors(path)
            spec = read_json(path.with_name("training.json"))
            labels, n_samples = stored["labels"].numpy(), len(about["content"])
            columns = {key: np.array(about[key], dtype=object).astype(str) for key in ("domains", "clients", "splits")}
            groups = None if about["groups"] is None else np.array(about["groups"], dtype=object).astype(str)
            names = tuple(map(str, range(1 + int(labels.max(initial=0)))))
            samples = SampleList(names, labels, **columns, content=about["content"], groups=groups)
            seed = int(spec["seed"]) if policy.server_divides else PARTITION_SEED
            name, clients = self.kit.name, build(spec["identity"]).clients
            test = divide_client(clients, samples, name, seed).clients[name].test
            out |= {about["content"][row] for row in np.setdiff1d(np.arange(n_samples), test).tolist()}
        return out


def _is_own_text(text: Tensor | None, rows: EmbeddedTable) -> bool:
    """Return whether the class texts of a classifier are what the site's own encoder makes of them."""
    own = text_of(rows)
    if text is None or own is None:
        return True
    return text.shape == own.shape and max_relative_difference({"": own}, {"": text.float()}) <= MAX_TEXT_DIFFERENCE


def describe_evaluation(evaluation: Evaluation, run: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """Describe what a person is asked for, with the keys of a request for a training."""
    names = [f"{entry.name} ({entry.method.get('name')}, hash {entry.tensors[:16]})" for entry in evaluation.entries]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **{key: run[key] for key in ("purpose", "contact", "trainings", "rounds")},
        **{"method": "evaluation", "does": f"It measures {join_names(names)} here; nothing is trained."},
        **{"leaves": {}, "bytes": 0, "verified": False, "scores": policy.score_detail, "is_evaluation": True},
        **{"samples": None, "groups": None, "privacy": "nothing but scores leaves"},
    }
