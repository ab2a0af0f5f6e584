"""The protocols' trainings and what their hits add up to."""

import pytest

from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import mean_and_std
from fedvlm.evaluate.protocols import Training, make_protocol, protocols, register

DOMAINS = {id: id for id in ("art", "photo", "sketch")}
MANY_CLIENTS = {f"{i:02}": "" for i in range(20)}


def trainings(name, domains, seed=0, **knobs):
    return make_protocol(name, **knobs).trainings(domains, seed)


def table(name, domains, done, generalises):
    return make_protocol(name).table(domains, done, generalises)


def make_scores(**values):
    return {id: {"test_hits": value, "test_rows": 10} for id, value in values.items()}


def test_each_domain_is_unseen_once():
    result = trainings("leave-one-domain-out", DOMAINS)
    assert [(training.train, training.unseen) for training in result] == [
        (("photo", "sketch"), ("art",)),
        (("art", "sketch"), ("photo",)),
        (("art", "photo"), ("sketch",)),
    ]


def test_g_p_and_c_are_the_means_of_their_cells():
    done = dict(
        zip(
            DOMAINS,
            zip(
                trainings("leave-one-domain-out", DOMAINS),
                [
                    make_scores(art=1, photo=5, sketch=6),
                    make_scores(art=7, photo=2, sketch=8),
                    make_scores(art=9, photo=10, sketch=3),
                ],
                strict=True,
            ),
            strict=True,
        )
    )
    got = table("leave-one-domain-out", DOMAINS, done, True)
    assert got["G"] == pytest.approx(0.2)
    assert got["P"] == pytest.approx(0.75)
    assert got["C"] == pytest.approx((0.2 + 2 * 0.75) / 3)
    assert got["G art"] == 0.1
    assert got["P art"] == pytest.approx(0.8)
    alone = table("leave-one-domain-out", DOMAINS, done, False)
    assert alone["G"] is None
    assert alone["C"] is None
    assert alone["P"] == got["P"]


def test_cross_device_tests_on_the_same_unseen_clients_for_every_seed_and_count():
    results = [
        training
        for seed in (0, 1)
        for training in trainings("cross-device", MANY_CLIENTS, counts=[1, 5, 12], unseen=8, seed=seed)
    ]
    assert len({training.unseen for training in results}) == 1
    assert all(not set(training.train) & set(training.unseen) for training in results)
    assert [len(training.train) for training in results] == [1, 5, 12] * 2
    assert results[1].train != results[4].train
    assert set(results[0].train) < set(results[1].train) < set(results[2].train)


@pytest.mark.parametrize(("counts", "unseen"), [([], 5), ([16], 5), ([0], 5), ([5], 0)])
def test_cross_device_refuses_numbers_that_do_not_fit(counts, unseen):
    with pytest.raises(SettingsError, match="but there are 20"):
        trainings("cross-device", MANY_CLIENTS, counts=counts, unseen=unseen)


def test_leave_one_domain_out_without_domains_is_refused():
    with pytest.raises(SettingsError, match="needs two or more domains"):
        trainings("leave-one-domain-out", MANY_CLIENTS)


def test_an_unknown_protocol_is_refused_with_the_nearest():
    with pytest.raises(SettingsError, match="did you mean 'own-test'"):
        trainings("own-tst", MANY_CLIENTS)


def test_spread_is_mean_and_sample_deviation():
    got = mean_and_std([{"G": 0.1, "P": None}, {"G": 0.3, "P": None}])
    assert got["G"] == (pytest.approx(0.2), pytest.approx(0.02**0.5))
    assert got["P"] == (None, None)
    assert mean_and_std([{"G": 0.1}])["G"] == (0.1, None)


def test_clients_that_share_a_domain_have_its_mean_and_deviation():
    domains = {f"art-{i}": "art" for i in range(3)}
    domains |= {"photo": "photo", "any": ""}
    scores = make_scores(**{"art-0": 2, "art-1": 4, "art-2": 9, "photo": 5, "any": 10})
    (training,) = trainings("own-test", domains)
    result = table("own-test", domains, {"all": (training, scores)}, True)
    assert result["own"] == pytest.approx(0.6)
    assert result["mean art"] == pytest.approx(0.5)
    assert result["deviation art"] == pytest.approx((0.09 + 0.01 + 0.16) ** 0.5 / 2**0.5)
    assert {"mean photo", "mean "}.isdisjoint(result)  # one client has no deviation
    assert result["art-2"] == 0.9


def test_a_knob_of_another_protocol_is_refused_by_name():
    with pytest.raises(SettingsError, match="is for protocol = 'cross-device', not 'own-test'"):
        make_protocol("own-test", counts=(1, 2))


def test_a_protocol_without_a_table_is_refused():
    class IncompleteProtocol:
        name = "half"

    with pytest.raises(SettingsError, match="IncompleteProtocol: it is a frozen dataclass with a `name`"):
        register(IncompleteProtocol)


def test_every_protocol_says_what_it_is_and_names_its_clients_once():
    for name, rules in protocols().items():
        assert rules.summary and rules.name == name
    result = make_protocol("own-test").trainings(DOMAINS, 0)
    assert result == [Training("all", tuple(DOMAINS), ())]


def test_a_client_called_as_a_column_does_not_take_its_place():
    domains = {"own": "", "global": "", "b": ""}
    rules = make_protocol("own-test", global_test=True)
    (training,) = rules.trainings(domains, 0)
    scores = make_scores(own=1, b=5, everyone=7) | make_scores(**{"global": 3})
    result = rules.table(domains, {"all": (training, scores)}, True)
    assert result == {"own": pytest.approx(0.3), "global": 0.7, "b": 0.5}
