"""Simulated attacks: drawn by seed, as strong as said, and nothing else moves."""

from dataclasses import replace

import pytest
import torch

import fedvlm
from fedvlm import tensors
from fedvlm.channel import Channel
from fedvlm.channel.pipeline import ReceivedUploads, UploadReceiver
from fedvlm.channel.steps import change_norm, upload_change
from fedvlm.core import make
from fedvlm.engines.attacks import apply_attack, flip_labels
from fedvlm.engines.client import DEFAULT_STRENGTH, Attack, RoundReplies, Task, choose_attackers
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import SettingsError
from fedvlm.runner.settings import build
from fedvlm.testing import toy_world

SIZES = (40, 30, 35, 28, 33, 41)
FOUR = ("fedot", "tofa", "fedotp", "faa-clip", "auto")  # the four systems, and auto


def world_of(method, attack=None, channel=None, **settings):
    short = {"rounds": 2} if method != "tofa" else {"min_class_samples": 1}
    world = toy_world(make(method, **short, **settings), sizes=SIZES)
    return replace(world, attack=attack, channel=channel or Channel())


def first_round(method, attack):
    """A round's uploads, honest and attacked, with what was sent."""
    world = world_of(method)
    state, initial_local = initial_state(world)
    ids = sorted(world.members)
    tasks = [Task(id, world.method.send(state.shared, id), initial_local, True) for id in ids]
    answers = Sequential(world).round(0, tasks)
    lied = apply_attack(replace(world, attack=attack), ids, 0, tasks, answers)
    bad = choose_attackers(attack, ids, world.seed)
    return tasks, answers.replies, lied.replies, bad


def learnt(world):
    state, initial_local = initial_state(world)
    plan = Plan(tuple(sorted(world.members)), ())
    lines = []
    world = flip_labels(world, plan.train)
    out = run_rounds(world, Sequential(world), plan, state, initial_local, lambda state, line: lines.append(line))
    return out, lines


def test_who_attacks_follows_from_the_seed_and_not_from_the_order():
    ids = [f"c{i}" for i in range(10)]
    first_draw = choose_attackers(Attack("scale", 0.3), ids, 1)
    assert first_draw == choose_attackers(Attack("noise", 0.3), list(reversed(ids)), 1)
    assert len(first_draw) == 3
    assert len({frozenset(choose_attackers(Attack("scale", 0.3), ids, seed)) for seed in range(20)}) > 10
    assert len(choose_attackers(Attack("scale", 0.01), ids, 1)) == 1


@pytest.mark.parametrize(("kind", "sign"), [("sign-flip", -1), ("scale", 1)])
def test_a_change_is_flipped_or_scaled_by_the_strength(kind, sign):
    tasks, honest, lied, bad = first_round("fedavg", Attack(kind, 0.2, 7.0))
    for task in tasks:
        if task.id in bad:
            moved = upload_change(lied[task.id].upload, task.sent)
            expected = {k: sign * 7 * v for k, v in upload_change(honest[task.id].upload, task.sent).items()}
            assert tensors.max_relative_difference(moved, expected) < 1e-3
        else:
            assert lied[task.id] is honest[task.id]


def test_noise_is_as_long_as_the_strength_says_and_new_in_every_place():
    tasks, honest, lied, bad = first_round("fedavg", Attack("noise", 0.3, 7.0))
    for task in (task for task in tasks if task.id in bad):
        before = change_norm(upload_change(honest[task.id].upload, task.sent))
        added = change_norm(upload_change(lied[task.id].upload, honest[task.id].upload))
        assert added == pytest.approx(7 * before, rel=0.3)
    first, second = sorted(bad)
    changes = [tensors.flatten(upload_change(lied[id].upload, tasks[0].sent)) for id in (first, second)]
    assert abs(float(torch.nn.functional.cosine_similarity(*changes, dim=0))) < 0.5


def test_who_colludes_uploads_one_and_the_same_near_the_others():
    tasks, honest, lied, bad = first_round("fedavg", Attack("collude", 0.3))
    first, second = sorted(bad)
    assert torch.equal(lied[first].upload["head"], lied[second].upload["head"])
    good = torch.stack([honest[t.id].upload["head"] for t in tasks if t.id not in bad])
    expected = good.mean(0) - 1.5 * good.std(0, unbiased=False)
    assert torch.allclose(lied[first].upload["head"], expected, atol=1e-6)


def test_flipped_labels_are_those_of_attackers_training_rows_alone():
    world = world_of("fedavg", Attack("label-flip", 0.2))
    ids = sorted(world.members)
    bad = choose_attackers(world.attack, ids, world.seed)
    flipped_world = flip_labels(world, ids)
    last = len(world.frozen.classes) - 1
    for id, member in world.members.items():
        train = torch.from_numpy(member.train)
        assert torch.equal(flipped_world.y[train], last - world.y[train] if id in bad else world.y[train])
        for rows in (member.validation, member.test):
            assert torch.equal(flipped_world.y[torch.from_numpy(rows)], world.y[torch.from_numpy(rows)])


@pytest.mark.parametrize("method", FOUR)
def test_every_system_can_be_attacked_and_stays_finite_under_a_robust_rule(method):
    tasks, honest, _, bad = first_round(method, Attack("scale", 0.2))
    world, ids = world_of(method), [task.id for task in tasks]
    shared = initial_state(world)[0].shared
    sent = {task.id: task.sent for task in tasks}
    rows = {id: honest[id].rows for id in ids}
    channel = Channel(aggregation="median", bound="median")
    for kind in sorted(set(DEFAULT_STRENGTH) - {"label-flip"}):
        terms = replace(world, attack=Attack(kind, 0.2))
        lied = apply_attack(terms, ids, 0, tasks, RoundReplies(honest)).replies
        for id in ids:
            same = tensors.max_relative_difference(lied[id].upload, honest[id].upload) == 0
            assert same == (id not in bad), (kind, id)
        uploads = {id: lied[id].upload for id in ids}
        decoded = UploadReceiver(channel, world.method, [], 0).receive(ReceivedUploads(0, uploads, sent, rows))
        aggregate = world.method.aggregate(shared, decoded.uploads, decoded.weights, decoded.ids)
        assert all(tensor.isfinite().all() for key, tensor in aggregate.items() if key != "path best_loss")
        assert set(decoded.outliers) == set(ids)


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum", "geometric-median"])
def test_a_robust_rule_stays_near_the_honest_head_where_the_mean_is_carried_off(rule):
    world = world_of("fedavg", lr=0.01)
    honest, _ = learnt(world)
    lied = replace(world, attack=Attack("sign-flip", 0.2, 50.0))
    plain, lines = learnt(lied)
    safe, _ = learnt(replace(lied, channel=Channel(aggregation=rule)))
    initial = initial_state(world)[0].shared
    moved = change_norm(upload_change(honest.shared, initial))
    assert change_norm(upload_change(safe.shared, honest.shared)) < 1.5 * moved
    assert change_norm(upload_change(plain.shared, honest.shared)) > 5 * moved
    bad = choose_attackers(lied.attack, sorted(world.members), world.seed)
    for line in lines:
        assert bad <= {id for id, client in line["clients"].items() if client["far"]}


def test_an_attack_is_in_the_identity_the_notes_and_the_table(rows, tmp_path):
    method = {"name": "fedavg", "rounds": 1}
    kinds = {"attack": "sign-flip", "attacker_fraction": 0.3, "attack_strength": 20.0}
    clients = {"partition": "dirichlet", "count": 6, "alpha": 100.0, "min_samples": 1}
    common = {"embedded": rows, "clients": clients, "protocol": "own-test"}
    result = fedvlm.run(method, out=tmp_path / "a", **common, **kinds)
    assert result.manifest["identity"]["attack"] == "sign-flip"
    assert any(notice.startswith("attack sign-flip by ") for notice in result.manifest["notes"])
    assert "ATTACK: sign-flip by 30%" in result.table()
    assert "was far from the rest in 1 of 1 rounds" in result.table()
    assert len(result.outlier_warnings) == 2
    plain = fedvlm.run(method, out=tmp_path / "b", **common)
    assert not {"attack", "attackers", "strength"} & plain.manifest["identity"].keys()
    assert "ATTACK" not in plain.table()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attack": "bribe"}, "attack must be .*, got 'bribe'"),
        ({"attack": "scale", "attacker_fraction": 1.0}, "attacker_fraction = 1.0 is outside"),
        ({"attack": "scale", "attack_strength": -1.0}, "attack_strength = -1.0; it takes"),
        ({"attack": "label-flip", "attack_strength": 2.0}, "it is at most 1"),
        ({"attack": "scale", "engine": "flower"}, "is simulated in one process"),
        ({"attack": "scale", "method": "zero-shot"}, "has no rounds and so no uploads"),
    ],
)
def test_attacks_that_cannot_be_are_refused(values, message):
    with pytest.raises(SettingsError, match=message):
        build({"method": "fedavg", **values})
