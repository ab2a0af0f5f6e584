"""A race over sites: the same choice as in one process, and nothing but validation hits told."""

import json

import pytest

from fedvlm.deploy.kits import read_site
from fedvlm.deploy.site.ledger import Ledger, PrivacyBudget
from fedvlm.deploy.site.policy import example_policy
from fedvlm.deploy.site.service import Site
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError
from fedvlm.maths.privacy import epsilon
from fedvlm.runner.tune import make_candidates

NAMES = ["art", "photo", "sketch"]
METHOD = {"name": "fedot", "rounds": 4, "lr": 1e-4}
NOISE = {"clip": 0.1, "noise_multiplier": 5.0}


def rule(place, name="art", **rules):
    """A policy with other rules, and the site started anew."""
    lines = [line for line in example_policy(plain=True).splitlines() if line.split(" = ")[0] not in rules]
    lines += [f"{key} = {json.dumps(value)}" for key, value in rules.items()]
    (place.site(name) / "policy.toml").write_text("\n".join(lines) + "\n")
    place.desks[name] = Site(read_site(place.site(name)))


def tuned_settings(place, **overrides):
    return place.settings(METHOD, tune=["lr"], **overrides)


def uploads(place, name):
    return PrivacyBudget(Ledger(place.site(name)).history()).rounds.total()


def test_a_race_over_sites_is_the_race_of_one_process(place):
    deployed, alone = place.run(tuned_settings(place)), place.alone(tuned_settings(place))
    deployed_tuning, theirs = deployed.manifest["tuned"], alone.manifest["tuned"]
    assert deployed_tuning["chosen"] == theirs["chosen"] and deployed_tuning["trials"] == theirs["trials"]
    assert deployed.manifest["identity"]["method"] == alone.manifest["identity"]["method"]
    assert deployed.tables == alone.tables
    assert "tuned on validation samples (4 trials)" in deployed.table()


def test_every_seed_is_raced_over_the_sites(place):
    for name in NAMES:
        rule(place, name, server_divides=True)
    settings = tuned_settings(place, seeds=[0, 1])
    deployed, alone = place.run(settings), place.alone(settings)
    for seed in ("0", "1"):
        tunings = [result.manifest["tuned"]["seeds"][seed] for result in (deployed, alone)]
        assert tunings[0]["chosen"] == tunings[1]["chosen"]
    assert deployed.tables == alone.tables


def test_a_trial_tells_hits_on_validation_rows_and_leaves_no_classifier(place):
    replies, answer = [], place.desks["photo"].answer

    def listen(request, state):
        reply, state = answer(request, state)
        replies.append((request.header, reply.header))
        return reply, state

    place.desks["photo"].answer = listen
    place.run(tuned_settings(place))
    opened = [
        (request_header, reply_header) for request_header, reply_header in replies if request_header["kind"] == "open"
    ]
    trials = {request_header["training"] for request_header, _ in opened if "tuning" in request_header["spec"]}
    assert len(trials) == 4 and len(opened) == 5
    assert all(
        reply_header["samples"]["test"] == 0
        for request_header, reply_header in opened
        if request_header["training"] in trials
    )
    trial_replies = [
        reply_header
        for request_header, reply_header in replies
        if request_header["kind"] != "open" and request_header["training"] in trials
    ]
    assert trial_replies
    for reply_header in trial_replies:
        names = {"validation_rows", "validation_hits", "test_rows", "test_hits"}
        assert reply_header["scores"].keys() == names and reply_header["described"] == {}
        assert reply_header["scores"]["test_rows"] == 0 < reply_header["scores"]["validation_rows"]
    assert len(list((place.site("photo") / "classifiers").iterdir())) == 1


def test_every_upload_of_every_trial_counts_at_its_site_and_in_the_record(place):
    for name in NAMES:
        rule(place, name, epsilon=8.0, scores="coarse")
    run = place.run(tuned_settings(place, channel=NOISE))
    total = sum(trial["rounds"] for trial in run.manifest["tuned"]["trials"]) + METHOD["rounds"]
    assert total == 4 * 1 + 2 * 3 + 4
    assert [uploads(place, name) for name in NAMES] == [total] * 3
    assert run.rounds[-1]["epsilon"] == pytest.approx(epsilon(5.0, total, delta=1e-5))
    account = PrivacyBudget(Ledger(place.site("art")).history())
    assert account.epsilon(1e-5) == pytest.approx(run.rounds[-1]["epsilon"])


@pytest.mark.parametrize(
    ("rules", "overrides"),
    [
        ({"trainings": 4}, {}),
        ({"all_rounds": 13}, {}),
        ({"epsilon": epsilon(5.0, 13, delta=1e-5), "scores": "coarse"}, {"channel": NOISE}),
    ],
)
def test_a_race_over_a_sites_budget_is_refused_before_anything_leaves(place, rules, overrides):
    rule(place, "sketch", **rules)
    with pytest.raises(FederationError, match="does not start; sketch: .* exceeds its budget"):
        place.run(tuned_settings(place, **overrides))
    assert [uploads(place, name) for name in NAMES] == [0, 0, 0]
    assert not (place.folder / "run").exists()


@pytest.mark.parametrize("rules", [{"trainings": 5}, {"all_rounds": 14}])
def test_a_race_that_just_fits_is_run(place, rules):
    rule(place, "sketch", **rules)
    assert place.run(tuned_settings(place)).manifest["tuned"]["chosen"]
    assert uploads(place, "sketch") == 14


def test_a_race_among_sites_that_tell_no_scores_is_refused(place):
    for name in NAMES:
        rule(place, name, scores="none")
    with pytest.raises(FederationError, match="no site reports its correct validation samples"):
        place.run(tuned_settings(place))


@pytest.mark.parametrize("after", [3, 7, 12])
def test_a_race_that_was_stopped_goes_on_where_it_was(place, after):
    grid, requests = local_grid(place.desks), []
    push = grid.push_messages

    def stop(messages):
        messages = list(messages)
        requests.append(messages[0].metadata.group_id)
        if len(requests) == len(make_candidates(tuned_settings(place))[0]) + after:
            raise KeyboardInterrupt
        return push(messages)

    grid.push_messages = stop
    with pytest.raises(KeyboardInterrupt):
        place.run(tuned_settings(place), grid=grid)
    again = place.run(tuned_settings(place))
    assert again.manifest["tuned"] == place.alone(tuned_settings(place)).manifest["tuned"]
    assert [uploads(place, name) for name in NAMES] == [14] * 3
