"""Uploads held against each other: the bound, robust aggregation, and who is named."""

from dataclasses import replace

import pytest
import torch

from fedvlm import tensors
from fedvlm.channel import Channel, outliers
from fedvlm.channel.outliers import (
    MAX_NORM_TO_MEDIAN,
    MAX_SAMPLES_TO_MEDIAN,
    UploadRound,
    bound_uploads,
    combine_uploads,
    outlier_scores,
)
from fedvlm.channel.pipeline import ReceivedUploads, UploadReceiver
from fedvlm.channel.settings import check_channel, with_deployment_bound
from fedvlm.core import make, methods, upload_sum
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import describe_outliers
from fedvlm.parts.robust import ROBUST_MEANS
from fedvlm.runner.settings import build
from fedvlm.testing import toy_world

ROBUST = sorted(set(ROBUST_MEANS) - {"mean"})


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads(count=10, **settings):
    """A round of fedavg: the same change for all, and a little of their own."""
    sent = {"head": draw(4, 6, seed=99)}
    uploads = [{"head": sent["head"] + draw(4, 6) + 0.1 * draw(4, 6, seed=i)} for i in range(count)]
    rows = torch.full((count,), 50.0)
    return UploadRound(make("fedavg"), "rows", uploads, [sent] * count, rows)


def statistics(count=6, rows=(60,), seed=0):
    """A round of TOFA: every client has rows of all four classes."""
    sizes = [rows[i % len(rows)] for i in range(count)]
    world = toy_world(make("tofa", min_class_samples=1), sizes=sizes)
    shared, local = world.method.init(world.frozen)
    ids = sorted(world.members)
    uploads = [world.method.update(world.frozen, shared, local, make_client(world, i, 0))[0] for i in ids]
    counts = torch.tensor([float(len(world.members[i].train)) for i in ids])
    return UploadRound(world.method, "total", uploads, [shared] * count, counts), shared, ids


def run_pipeline(channel, now, ids=None):
    names = ids or [f"client-{i}" for i in range(len(now.uploads))]
    rows = {id: int(n) for id, n in zip(names, now.sample_counts.tolist(), strict=True)}
    columns = (dict(zip(names, part, strict=True)) for part in (now.uploads, now.sent))
    return UploadReceiver(channel, now.method, [], 0).receive(ReceivedUploads(0, *columns, rows))


def longer(now, place, factor):
    """The round with one client's change so many times as long."""
    uploads = list(now.uploads)
    sent = now.sent[place]["head"]
    uploads[place] = {"head": sent + factor * (uploads[place]["head"] - sent)}
    return replace(now, uploads=uploads)


def test_a_long_change_is_shortened_to_twice_the_median_and_others_keep_their_bits():
    now = longer(heads(), 3, -100.0)
    out = bound_uploads(now, now.dots())
    moved = [(upload["head"] - now.sent[0]["head"]).norm() for upload in now.uploads]
    short = (out.uploads[3]["head"] - now.sent[3]["head"]).norm()
    assert short == pytest.approx(MAX_NORM_TO_MEDIAN * float(torch.stack(moved).median()), rel=1e-5)
    assert all(out.uploads[i] is now.uploads[i] for i in range(10) if i != 3)


def test_of_two_changes_neither_is_shortened():
    now = longer(heads(2), 0, 100.0)
    assert bound_uploads(now, now.dots()) is now


def test_a_row_count_of_ten_million_does_not_own_the_mean():
    now = heads()
    lie = replace(now, sample_counts=torch.tensor([50.0] * 9 + [1e7]))
    assert bound_uploads(lie, lie.dots()).sample_counts.tolist() == [50.0] * 9 + [MAX_SAMPLES_TO_MEDIAN * 50]
    plain, bound = run_pipeline(Channel(), lie), run_pipeline(Channel(bound="median"), lie)
    assert float(plain.weights[-1] / plain.weights.sum()) > 0.99
    assert float(bound.weights[-1] / bound.weights.sum()) < 0.31


def test_totals_that_claim_many_rows_are_cut_to_four_times_the_median():
    now, _, _ = statistics()
    lie = {**now.uploads[0], "counts": 1000 * now.uploads[0]["counts"]}
    out = bound_uploads(replace(now, uploads=[lie, *now.uploads[1:]]), now.dots())
    assert int(out.uploads[0]["counts"].sum()) <= MAX_SAMPLES_TO_MEDIAN * float(now.sample_counts.median()) + 4
    assert out.uploads[1] is now.uploads[1]


def test_totals_become_what_they_say_per_row_and_back():
    now, _, _ = statistics(rows=(60, 33))
    for place, upload in enumerate(now.uploads):
        again = now.from_means(now.to_means(place))
        for key, value in upload.items():
            assert (again[key].long() - value.long()).abs().max() <= 1, key


@pytest.mark.parametrize("rule", ROBUST)
def test_of_equal_uploads_every_rule_aggregates_as_the_mean_does(rule):
    class_statistics, shared, _ = statistics()
    for now, first in ((heads(), heads().sent[0]), (class_statistics, shared)):
        same = replace(now, uploads=[now.uploads[0]] * len(now.uploads))
        results = []
        for channel in (Channel(), Channel(aggregation=rule)):
            arrived = run_pipeline(channel, same)
            results.append(now.method.aggregate(first, arrived.uploads, arrived.weights, arrived.ids))
        assert tensors.max_relative_difference(*results) < 1e-4


@pytest.mark.parametrize("rule", ROBUST)
def test_class_statistics_are_robust_by_contributor(rule):
    now, shared, _ = statistics(count=8)
    statistics_of_first = now.to_means(0)
    liar = now.from_means(
        {**statistics_of_first, "means": (-50 * statistics_of_first["means"][0], statistics_of_first["means"][1])}
    )
    lied = replace(now, uploads=[liar, *now.uploads[1:]])
    honest = now.method.aggregate(shared, now.uploads[1:], now.sample_counts[1:], [])["means"]

    def gap(uploads):
        means = now.method.aggregate(shared, uploads, now.sample_counts, [])["means"]
        return float((means - honest).norm() / honest.norm())

    min_gap = 1.5 if rule == "krum" else 0.6  # one client's few rows are not everyone's
    assert gap([combine_uploads(lied, rule, lied.dots())]) < min_gap
    assert gap(lied.uploads) > 3


@pytest.mark.parametrize("rule", ROBUST)
def test_a_class_of_one_contributor_keeps_its_mean(rule):
    now, _, _ = statistics()
    alone = []
    for place in range(len(now.uploads)):
        contribution = now.to_means(place)
        rows = contribution["means"][1] * (torch.arange(len(contribution["means"][1])) == place % 6)
        alone.append(now.from_means({**contribution, "means": (contribution["means"][0], rows)}))
    lonely = replace(now, uploads=alone)
    combined_rows = now.method.to_means(combine_uploads(lonely, rule, lonely.dots()), {})
    for place in range(min(6, len(combined_rows["means"][0]))):
        contributor_mean = now.method.to_means(alone[place], {})["means"][0][place]
        assert torch.allclose(combined_rows["means"][0][place], contributor_mean, atol=1e-5)


def test_every_method_whose_uploads_add_up_can_be_aggregated_robustly():
    for name in methods():
        method = make(name)
        if upload_sum(method) is None:
            with pytest.raises(SettingsError, match="aggregates single ones in its own way"):
                check_channel(Channel(aggregation="median"), method)
        else:
            check_channel(Channel(aggregation="median", bound="median"), method)


@pytest.mark.parametrize("channel_settings", [{"aggregation": "krum"}, {"bound": "median"}])
def test_a_verified_sum_leaves_nothing_to_compare(channel_settings):
    with pytest.raises(SettingsError, match="nobody sees one, only their sum; set channel.clip"):
        build({"method": "fedavg", "channel": {"verified": True, **channel_settings}})


def test_deployments_are_bound_by_the_median_unless_a_number_or_a_verified_sum_is_set():
    method = make("fedavg")
    assert with_deployment_bound(Channel(), method).bound == "median"
    assert with_deployment_bound(Channel(bound=3.0), method).bound == 3.0
    hidden = Channel(verified=True, clip=1.0)
    assert with_deployment_bound(hidden, method) == hidden
    assert with_deployment_bound(Channel(), make("fens")).bound == 0.0
    assert Channel().bound == 0.0


def test_who_is_far_in_norm_or_direction_is_named_and_nobody_else():
    for factor in (-1.0, -10.0, 8.0, 0.05):
        now = longer(heads(), 3, factor)
        distances = outlier_scores([f"c{i}" for i in range(10)], now.dots())
        assert [id for id, distance in distances.items() if distance["far"]] == ["c3"], factor
        assert distances["c3"]["norm"] == pytest.approx(abs(factor), rel=0.2)
        assert (distances["c3"]["cosine"] < 0) == (factor < 0)
    distances = outlier_scores([f"c{i}" for i in range(10)], heads().dots())
    assert not any(distance["far"] for distance in distances.values())


def domains(long=5.0):
    """Nine clients of three domains; the changes of the last one are long, and another way."""
    now = heads(9)
    sent = now.sent[0]["head"]
    way = [draw(4, 6), 0.5 * draw(4, 6) + draw(4, 6, seed=7), long * draw(4, 6, seed=8)]
    moved = [way[i // 3] * (1 + 0.1 * draw(4, 6, seed=20 + i)) for i in range(9)]
    return replace(now, uploads=[{"head": sent + change} for change in moved])


def far_of(now):
    ids = [f"c{i}" for i in range(len(now.uploads))]
    return [id for id, distance in outlier_scores(ids, now.dots()).items() if distance["far"]]


def test_a_domain_whose_changes_are_long_is_not_far():
    distances = outlier_scores([f"c{i}" for i in range(9)], domains().dots())
    assert distances["c8"]["norm"] > 3 and distances["c8"]["alike"] < 1.5
    assert far_of(domains()) == []


def test_a_client_is_held_against_those_that_point_where_it_does():
    """As long as an honest domain, and found all the same."""
    assert far_of(longer(domains(), 1, 5.0)) == ["c1"]
    assert far_of(longer(domains(), 1, -5.0)) == ["c1"]
    assert far_of(longer(domains(), 7, 5.0)) == ["c7"]


def test_who_is_far_does_not_depend_on_the_order_or_the_unit_of_changes():
    now = longer(domains(), 1, 5.0)
    turned = replace(now, uploads=now.uploads[::-1])
    assert far_of(turned) == ["c7"]
    dots = now.dots()
    ids = [f"c{i}" for i in range(9)]
    small, large = outlier_scores(ids, 1e-12 * dots), outlier_scores(ids, 1e12 * dots)
    assert small == {id: pytest.approx(distance) for id, distance in large.items()}


def test_of_four_clients_nobody_is_far():
    now = longer(heads(4), 3, -10.0)
    assert not any(distance["far"] for distance in outlier_scores(list("abcd"), now.dots()).values())


def test_who_is_far_in_most_rounds_is_told_in_words():
    def line(*is_outlier):
        flagged = zip("ab", is_outlier, strict=True)
        return {
            "training": "0-all",
            "clients": {i: {"norm": 9.0, "cosine": -0.5, "far": f} for i, f in flagged},
        }

    messages = describe_outliers([line(True, False), line(True, True), line(False, True), line(True, False)])
    assert len(messages) == 1
    assert messages[0].startswith("client a was far from the rest in 3 of 4 rounds of 0-all")


def test_dots_are_those_of_what_clients_say_per_row():
    now, _, _ = statistics(rows=(60, 40))
    flat_means = [
        torch.cat([(means * (rows > 0)[:, None]).flatten() for means, rows in now.to_means(i).values()])
        for i in range(len(now.uploads))
    ]
    plain = torch.stack(flat_means) @ torch.stack(flat_means).mT
    assert torch.allclose(now.dots(), plain, rtol=1e-6, atol=0)


def test_a_total_beyond_single_precision_leaves_the_comparison_finite():
    now = heads()
    uploads = [{"head": upload["head"].double()} for upload in now.uploads]
    uploads[3] = {"head": 1e60 * uploads[3]["head"]}
    dots = replace(now, upload_sum="total", uploads=uploads).dots()
    assert dots.isfinite().all()
    assert dots.diagonal().argmax() == 3


def test_many_clients_may_send_the_largest_numbers_or_none():
    now = heads(40)
    uploads = [{"head": upload["head"].double()} for upload in now.uploads]
    uploads[3] = {"head": 1e60 * uploads[3]["head"]}
    summary = replace(now, upload_sum="total", uploads=uploads).approximate_dots()
    assert summary.isfinite().all() and summary.diagonal().argmax() == 3
    held = [{"holders": torch.ones(5, dtype=torch.int32)}] * 40
    none = UploadRound(make("tofa", min_class_clients=3, rounds=2), "total", held, [{}] * 40, torch.ones(40))
    assert torch.equal(none.approximate_dots(), torch.zeros(40, 40).double())


def test_what_is_known_of_many_clients_is_what_is_known_of_few(monkeypatch):
    """Exact in single precision; of folded uploads the norms are exact, and nearly the cosines."""
    now = longer(heads(40), 3, -6.0)
    totals, _, _ = statistics(count=40, rows=(60, 40))
    for round_case in (now, totals):
        exact = round_case.dots()
        norms = exact.diagonal().sqrt()
        assert torch.allclose(round_case.approximate_dots(), exact, rtol=0, atol=1e-6 * float(norms.max()) ** 2)
    monkeypatch.setattr(outliers, "MAX_EXACT_PRODUCTS", 0)
    monkeypatch.setattr(outliers, "SKETCH_SIZE", 64)
    exact, folded = totals.dots(), totals.approximate_dots()
    norms = exact.diagonal().sqrt()
    assert torch.allclose(folded.diagonal().sqrt(), norms, rtol=1e-6)
    assert ((folded - exact) / norms / norms[:, None]).abs().max() < 4 / 64**0.5


def test_a_client_that_is_far_is_found_among_many(monkeypatch):
    now = longer(longer(heads(200), 3, -6.0), 7, 20.0)
    ids = [f"client-{i}" for i in range(200)]
    assert [id for id, upload in run_pipeline(Channel(), now).outliers.items() if upload["far"]] == [
        "client-3",
        "client-7",
    ]
    exact = outlier_scores(ids, now.dots())
    monkeypatch.setattr(outliers, "SKETCH_SIZE", 16)
    monkeypatch.setattr(outliers, "MAX_EXACT_PRODUCTS", 0)
    folded = outlier_scores(ids, now.approximate_dots())
    assert [id for id in ids if folded[id]["far"]] == [id for id in ids if exact[id]["far"]]
    still = replace(now, uploads=[dict(upload) for upload in now.sent])
    assert run_pipeline(Channel(), still).outliers == {}


def test_nobody_can_aim_at_how_uploads_are_folded(monkeypatch):
    """A change against all others that would look like theirs under signs known beforehand."""
    monkeypatch.setattr(outliers, "MAX_EXACT_PRODUCTS", 0)
    monkeypatch.setattr(outliers, "SKETCH_SIZE", 64)
    honest = [draw(1, 4096) + 0.1 * draw(1, 4096, seed=i + 1) for i in range(20)]
    signs = torch.randint(0, 2, (4096,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    folded = (signs * draw(1, 4096)[0]).reshape(-1, 64).sum(0)
    attack = -draw(1, 4096)
    attack[0, :64] += 2 * signs[:64] * folded
    uploads = [{"head": head} for head in (*honest, attack)]
    sent = [{"head": torch.zeros(1, 4096)}] * 21
    summary = UploadRound(make("fedavg"), "rows", uploads, sent, torch.full((21,), 50.0)).approximate_dots()
    assert summary[20, 0] < 0 < summary[1, 0]
