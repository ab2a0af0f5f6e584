"""Statistics of few rows stay at the client, unless the run says that they may leave."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.channel.verified import class_limits
from fedvlm.core import MIN_CLASS_SAMPLES, ClassStatistics, make, methods
from fedvlm.engines.client import make_client
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import SettingsError
from fedvlm.maths import gaussian_classes
from fedvlm.report.tables import compare_table
from fedvlm.runner.data_warnings import suppressed_warnings
from fedvlm.runner.settings import build
from fedvlm.testing import check_method, check_small, toy_world, train_toy

WITH_CLASS_STATISTICS = [name for name, kind in methods().items() if isinstance(kind(), ClassStatistics)]
EACH_METHOD = pytest.mark.parametrize("name", WITH_CLASS_STATISTICS)


def counts_of(world, id):
    return torch.bincount(make_client(world, id, 0).y, minlength=len(world.frozen.classes))


def upload_of(world, id, sent=None):
    shared, local = world.method.init(world.frozen)
    sent = sent or world.method.send(shared, id)
    return world.method.update(world.frozen, sent, local, make_client(world, id, 0))[0]


def test_tofa_is_held_to_the_rule():
    assert "tofa" in WITH_CLASS_STATISTICS


@EACH_METHOD
def test_no_message_tells_of_a_class_with_fewer_rows(name):
    world = toy_world(make(name))
    for id in world.members:
        covered = world.method.covered_classes(upload_of(world, id))
        assert torch.equal(covered, counts_of(world, id) >= MIN_CLASS_SAMPLES)


@EACH_METHOD
def test_all_classes_are_told_where_small_ones_are_allowed(name):
    world = toy_world(make(name, min_class_samples=1))
    covered = world.method.covered_classes(upload_of(world, "client-1"))
    assert torch.equal(covered, counts_of(world, "client-1") > 0)


@EACH_METHOD
def test_a_client_of_small_classes_uploads_zeros(name):
    upload = upload_of(toy_world(make(name)), "client-1")  # 9 rows
    assert not any(value.abs().sum() for value in upload.values())


def test_the_contract_refuses_a_method_that_tells_of_small_classes(monkeypatch):
    def careless(x, y, allowed, *limits):
        return gaussian_classes.class_sums(x, y, len(allowed))

    monkeypatch.setattr(gaussian_classes, "released_class_sums", careless)
    method = make("tofa")
    with pytest.raises(AssertionError, match="fewer than min_class_samples = 16; leave it out"):
        check_small(toy_world(method), method, 16)


def test_sums_over_clients_are_those_of_the_rows_that_were_uploaded():
    world = toy_world(make("tofa"))
    ids = sorted(world.members)
    uploads = [upload_of(world, id) for id in ids]
    x, y = [], []
    for id in ids:
        entry, counts = make_client(world, id, 0), counts_of(world, id)
        is_uploaded = counts[entry.y] >= MIN_CLASS_SAMPLES
        x.append(entry.x[is_uploaded])
        y.append(entry.y[is_uploaded])
    pooled = gaussian_classes.class_sums(torch.cat(x), torch.cat(y), 4)
    max_norm = world.method.max_samples
    counts = sum(entry["counts"] for entry in uploads)
    sums = gaussian_classes.from_fixed_point(sum(entry["sums"].long() for entry in uploads), max_norm)
    second = gaussian_classes.from_fixed_point(sum(entry["moments"].long() for entry in uploads), max_norm)
    assert torch.equal(counts.double(), pooled[0])
    assert torch.allclose(sums, pooled[1], atol=1e-5)
    assert torch.allclose(gaussian_classes.unpack(second, 16), pooled[2], atol=1e-5)


def test_a_class_of_too_few_contributors_is_not_uploaded():
    method = make("tofa", min_class_samples=8, min_class_clients=2, rounds=2)
    world = toy_world(method)
    ids = sorted(world.members)[:-1]
    holders = sum((counts_of(world, id) >= 8).int() for id in ids)
    assert 1 in holders  # or there is nothing to see
    state, initial_local = initial_state(world)
    uploads = []
    plan = Plan(tuple(ids), ())
    state = run_rounds(world, Sequential(world), plan, state, initial_local, lambda s, line: uploads.append(line))
    assert torch.equal(state.shared["open"] > 0, holders >= 2)
    assert torch.equal(state.shared["counts"] > 0, holders >= 2)
    assert uploads[0]["clients"][ids[0]]["bytes_up"] == 4 * 4  # one number per class


@pytest.mark.parametrize(
    "settings",
    [
        {"min_class_clients": 3, "rounds": 2},
        {"min_class_clients": 3, "rounds": 3},
        {"noise_multiplier": 1.0},
    ],
    ids=str,
)
def test_private_variants_keep_the_contract(settings):
    check_method(make("tofa", **settings))


def test_without_enough_contributors_anywhere_predictions_stay_finite():
    world = toy_world(make("tofa", min_class_clients=9, rounds=2))
    outcome = train_toy(world)
    assert all(np.isfinite(score["loss"]) for score in outcome.scores.values())
    assert not outcome.shared["counts"].any()


def test_a_smaller_limit_is_refused_unless_it_is_allowed():
    with pytest.raises(SettingsError, match=r"min_class_samples must be at least 16, got 4: .*allow_small = true"):
        build({"method": {"name": "tofa", "min_class_samples": 4}})
    assert build({"method": "tofa"}).method.min_class_samples == MIN_CLASS_SAMPLES
    assert build({"method": "tofa", "allow_small": True}).method.min_class_samples == 1
    assert build({"method": {"name": "tofa", "min_class_samples": 40}}).method.min_class_samples == 40


def test_allowing_changes_nothing_for_a_method_without_class_statistics():
    usual, allowed = build({"method": "fedot"}), build({"method": "fedot", "allow_small": True})
    assert usual.identity() == allowed.identity()


def test_record_and_table_say_what_was_kept_back_and_what_was_allowed(rows, tmp_path):
    few_shots = {"clients": {"partition": "domain", "shots": 5}}
    usual = fedvlm.run("tofa", embedded=rows, out=tmp_path / "a", **few_shots)
    allowed = fedvlm.run("tofa", embedded=rows, out=tmp_path / "b", allow_small=True, **few_shots)
    [message] = usual.manifest["notes"]
    assert "12 of 12 class statistics are suppressed" in message
    assert "no class statistics at all come from art, photo, sketch" in message
    assert message.startswith("tofa: ")
    assert "60 of 60 training samples (100%) are in no uploaded statistic" in message
    assert "allow_small = true (--allow-small) uploads them" in message
    assert "method.noise_multiplier = 1" in message
    assert "\n" not in message
    assert allowed.manifest["notes"] == []
    assert allowed.manifest["identity"]["allow_small"] is True
    assert "tofa (ALLOW-SMALL)" in compare_table([usual, allowed])
    assert "min_class_samples" not in compare_table([usual, allowed])
    again = build(allowed.manifest["identity"])
    assert again.identity() == build({"method": "tofa", "allow_small": True, **few_shots}).identity()


def table_of(labels):
    """The columns of a table that the warning reads."""
    return SimpleNamespace(labels=labels, classes=("a", "b", "c"), findings=None)


def test_nothing_is_noted_where_all_classes_are_large():
    labels = np.repeat(np.arange(3), 20)

    class Member:
        train = np.arange(60)

    assert suppressed_warnings(make("tofa"), {"a": Member}, table_of(labels)) == []
    labels[:5] = 1
    [message] = suppressed_warnings(make("tofa"), {"a": Member}, table_of(labels))
    assert message.startswith("tofa: 1 of 3 class statistics are suppressed")


def test_a_method_without_noise_is_told_of_one_way_out():
    labels = np.repeat(np.arange(3), (4, 5, 20))

    class Member:
        train = np.arange(29)

    [message] = suppressed_warnings(make("fedgh"), {"a": Member}, table_of(labels))
    assert "9 of 29 training samples (31%) are in no uploaded statistic" in message
    assert "noise" not in message


def test_two_contributors_to_a_verified_sum_recover_the_single_row_of_a_third():
    """Why a sum of three or more does not lower the limit at a single client."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(16, 8, generator=draw), dim=1)
    parts = torch.split(rows, [14, 1, 1])  # of one class, at three clients: 16 rows together
    first, second, third = (gaussian_classes.class_sums(x, torch.zeros(len(x)).long(), 1) for x in parts)
    total = [sum(column) for column in zip(first, second, third, strict=True)]  # what all may see
    count, remainder = (total[i] - first[i] - second[i] for i in (0, 1))
    assert count.tolist() == [1]
    torch.testing.assert_close(remainder[0].float(), parts[2][0], atol=1e-6, rtol=0)


def test_noise_is_what_the_multiplier_says_and_zero_noise_is_exact():
    plain, blurred = (
        toy_world(make("tofa", min_class_samples=1, noise_multiplier=z), sizes=(400, 40)) for z in (0.0, 2.0)
    )
    exact, noisy = upload_of(plain, "client-0"), upload_of(blurred, "client-0")
    max_norm = plain.method.max_samples
    counts, sums, second = gaussian_classes.class_sums(
        *(getattr(make_client(plain, "client-0", 0), k) for k in "xy"), 4
    )
    assert torch.equal(exact["counts"].double(), counts)
    assert torch.allclose(gaussian_classes.from_fixed_point(exact["sums"], max_norm), sums, atol=1e-5)
    differences = torch.cat(
        [
            (gaussian_classes.from_fixed_point(noisy["sums"], max_norm) - sums).flatten(),
            gaussian_classes.from_fixed_point(noisy["moments"], max_norm) - gaussian_classes.pack(second),
        ]
    )
    assert differences.std().item() == pytest.approx(2.0 * 6**0.5, rel=0.1)  # one sample may be replaced by another
    assert plain.method.noise(plain.frozen) == 0


def test_one_row_changes_what_is_uploaded_by_no_more_than_the_sensitivity():
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        row = torch.nn.functional.normalize(torch.randn(1, 6, generator=draw), dim=1).double()
        counts, sums, second = gaussian_classes.class_sums(row, torch.tensor([1]), 3)
        change = torch.cat([counts, sums.flatten(), gaussian_classes.pack(second)])
        assert change.norm() <= 3**0.5 + 1e-9


def test_small_classes_are_chosen_by_the_noised_counts():
    """Else the choice itself would tell how many rows a class has."""
    world = toy_world(make("tofa", noise_multiplier=5.0), sizes=(60, 40))
    upload = upload_of(world, "client-0")
    noised = world.method.noise_multiplier * 3**0.5 * make_client(world, "client-0", 0).noise[0, :4]
    expected = (counts_of(world, "client-0") + noised.double()).round() >= MIN_CLASS_SAMPLES
    assert torch.equal(upload["counts"] > 0, expected)
    assert not torch.equal(expected, counts_of(world, "client-0") >= MIN_CLASS_SAMPLES)


def test_noise_leaves_the_scatter_positive_and_predictions_finite():
    world = toy_world(make("tofa", min_class_samples=1, noise_multiplier=20.0))
    outcome = train_toy(world)
    scatter = gaussian_classes.unpack(outcome.shared["scatter"].double(), 16)
    assert torch.linalg.eigvalsh(scatter).min() > -1e-6 * scatter.norm()
    assert all(np.isfinite(score["loss"]) for score in outcome.scores.values())


def test_epsilon_falls_with_noise_and_rises_with_exchanges():
    world = toy_world(make("tofa", noise_multiplier=1.0))
    shared, local = world.method.init(world.frozen)

    def spent(**settings):
        description = replace(world.method, **settings).describe(world.frozen, shared, local)
        return description.get("epsilon")

    assert spent(noise_multiplier=0.0) is None  # which is without bound
    assert spent(noise_multiplier=4.0) < spent(noise_multiplier=1.0)
    assert spent(rounds=2) > spent(rounds=1)


@pytest.mark.parametrize("method", ["tofa", "ridge", "auto"])
def test_without_limits_a_verified_sum_gives_what_plain_uploads_give(rows, tmp_path, method):
    settings = {"protocol": "own-test", "allow_small": True}
    hidden = fedvlm.run(method, embedded=rows, out=tmp_path / "a", channel={"verified": True}, **settings)
    plain = fedvlm.run(method, embedded=rows, out=tmp_path / "b", **settings)
    assert hidden.tables == plain.tables


def two_clients_of_a_class(rows_like, rows=480):
    rows = rows_like(rows=rows)
    labels = rows.labels.copy()
    labels[(labels == 3) & (rows.domains == "art")] = 2  # now two clients have the class
    return replace(rows, labels=labels, fingerprint="two")


def test_two_clients_of_a_class_are_too_few_for_a_verified_sum(rows_like, tmp_path):
    rows = two_clients_of_a_class(rows_like)
    run = {"protocol": "own-test", "channel": {"verified": True}}
    done = fedvlm.run("tofa", embedded=rows, out=tmp_path / "a", **run)
    shared, _ = done.outcome("all")
    assert (shared["counts"] > 0).tolist() == [True, True, True, False]
    assert len(done.rounds) == 1


@pytest.mark.parametrize("method", ["tofa", "ridge", "auto"])
@pytest.mark.parametrize("samples", [0, 10**6])
def test_uploads_of_a_verified_sum_keep_to_the_summed_counts(method, samples):
    """Of a class that two members have nothing leaves, of few samples in all only a diagonal."""
    y = torch.tensor([0, 1, 2, 3]).repeat(20)
    x = torch.nn.functional.normalize(torch.randn(80, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    world = toy_world(make(method), sizes=(80,))
    frozen, made = (
        replace(world.frozen, classes=("a", "b", "c", "d"), dim=8, text=x[:4], descriptions=None),
        make(method),
    )
    shared, local = made.init(frozen)
    members = torch.tensor([3, 3, 3, 2, 0])
    limits = class_limits(made, 8, {"members": members, "samples": torch.tensor(samples)})
    client = replace(make_client(world, "client-0", 0), x=x, y=y, val_x=x, val_y=y, texts=torch.zeros(4, 0, 8))
    upload, _ = made.update(frozen, {**made.send(shared, ""), **limits}, local, client)
    assert (upload["counts"][:4] > 0).tolist() == [True, True, True, False]
    assert not upload["sums"][3].any()
    names = {"tofa": "moments", "ridge": "second", "auto": "gram"}
    diagonal = upload.get(f"{names[method]} diagonal")
    assert (names[method] in upload) == (diagonal is None) == (samples > 0)
    if diagonal is not None:
        assert diagonal.numel() == 8 + (method == "auto")


def test_a_diagonal_gives_the_second_moments_of_independent_coordinates():
    counts, sums = torch.tensor([4.0, 2.0]), torch.tensor([[4.0, 8.0], [2.0, -2.0]])
    diagonal = torch.tensor([10.0, 30.0])
    square = gaussian_classes.unpack(gaussian_classes.gram_from_diagonal(diagonal, counts, sums), 2)
    assert square.diagonal().tolist() == diagonal.tolist()
    assert square[0, 1] == square[1, 0] == 4 * 1 * 2 + 2 * 1 * -1
    packed = gaussian_classes.pack(square)
    assert gaussian_classes.diagonal_of(packed, 2).tolist() == diagonal.tolist()


def test_texts_of_the_clients_own_have_no_verified_sum():
    with pytest.raises(SettingsError, match="aggregates single uploads"):
        build({"method": {"name": "tofa", "rounds": 2}, "protocol": "own-test", "channel": {"verified": True}})
