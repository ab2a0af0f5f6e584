"""A site's own account: what a server may ask for, and that asking again gives nothing new."""

import copy
import json

import numpy as np
import pytest

from fedvlm.channel import Channel
from fedvlm.core import make
from fedvlm.deploy.identity.keys import Signer
from fedvlm.deploy.kits import read_site
from fedvlm.deploy.messages import ERROR_MESSAGES, render_error, training_key
from fedvlm.deploy.site.ledger import (
    MAX_CACHED_REPLIES,
    Ledger,
    PrivacyBudget,
    ReplyCache,
    describe_spending,
    upload_cost,
)
from fedvlm.deploy.site.policy import Policy, example_policy, read_policy
from fedvlm.deploy.site.service import Site
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import Message, from_records
from fedvlm.maths.privacy import epsilon

NOISE = {"clip": 0.1, "noise_multiplier": 2.0}
METHOD = {"name": "fedavg", "rounds": 2, "lr": 1e-3}


@pytest.fixture
def recorded(place):
    """The requests of an honest run with noise, as the site `art` got them, and its replies."""
    pairs, answer = [], place.desks["art"].answer

    def listen(request, state):
        reply, state = answer(request, state)
        pairs.append((request, reply))
        return reply, state

    place.desks["art"].answer = listen
    place.run(place.settings(METHOD, channel=NOISE))
    del place.desks["art"].answer
    return place, pairs


def rule(place, name="art", **rules):
    """A policy with other rules, and the site started anew."""
    lines = [line for line in example_policy(plain=True).splitlines() if line.split(" = ")[0] not in rules]
    lines += [f"{key} = {json.dumps(value)}" for key, value in rules.items()]
    (place.site(name) / "policy.toml").write_text("\n".join(lines) + "\n")
    place.desks[name] = Site(read_site(place.site(name)))
    return place.desks[name]


def send_request(place, request, **words):
    """A request of the server's with other words, and signed."""
    about = {key: field_value for key, field_value in request.header.items() if key not in ("checksum", "signature")}
    sign = Signer(place.kit.folder / "signing.key")
    return sign(Message({**about, "nonce": "another", **words}, request.arrays))


def same(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[k], second[k]) for k in first)


def error_code(reply):
    return render_error(reply.header["error"])


def test_a_round_asked_for_again_is_answered_with_the_same_bytes_and_costs_nothing(recorded):
    place, pairs = recorded
    request, first = pairs[1]
    site = rule(place)  # another process: the files alone have it
    before = site.budget.rounds.total()
    for _ in range(20):
        again, _ = site.answer(send_request(place, request), Message({}))
        assert same(again.arrays, first.arrays) and again.header["nonce"] == "another"
        per_message = ("nonce", "checksum", "signature")
        assert all(again.header[key] == first.header[key] for key in first.header if key not in per_message)
    assert site.budget.rounds.total() == before == 2


@pytest.mark.parametrize("rounds", [2, MAX_CACHED_REPLIES + 2])
def test_the_same_experiment_run_again_ends_the_same(place, rounds):
    """From answers that were given before, and from state as it was then; FedOT has local maps."""
    method = {"name": "fedot", "rounds": rounds, "lr": 1e-3}
    first, two = (place.run(place.settings(method), name) for name in ("one", "two"))
    assert first.tables == two.tables and len(two.rounds) == rounds
    if rounds < MAX_CACHED_REPLIES:
        assert PrivacyBudget(Ledger(place.site("art")).history()).rounds.total() == rounds
    assert all(sorted(line["clients"]) == ["art", "photo", "sketch"] for line in two.rounds)


def test_another_request_for_the_same_round_is_another_release(recorded):
    place, pairs = recorded
    request, first = pairs[1]
    site = rule(place)
    moved = Message(request.header, {key: array + 1e-3 for key, array in request.arrays.items()})
    again, _ = site.answer(send_request(place, moved), Message({}))
    assert "error" not in again.header, error_code(again)
    assert not same(again.arrays, first.arrays)
    assert site.budget.rounds.total() == 3 == again.header["releases"]


def test_the_account_is_the_ledgers_and_survives_a_restart(recorded):
    place, _pairs = recorded
    account = PrivacyBudget(Ledger(place.site("art")).history())
    [key] = account.trainings
    assert account.rounds == {key: 2} and account.measurements == {key: 1}  # the adaptation
    assert account.epsilon(1e-5) == pytest.approx(epsilon(2.0, 2, delta=1e-5))
    assert account.epsilon(1e-5, key) == account.epsilon(1e-5)
    summary = "\n".join(describe_spending(account, Policy(epsilon=9.0)))
    assert f"training {key}: 2 of 500 rounds, 1 of 600 measurements, ε = " in summary
    assert "of 9." in summary


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        ({"rounds": 2}, "rounds"),
        ({"all_rounds": 2}, "all rounds"),
        ({"epsilon": 0.5}, "epsilon"),
        ({"trainings": 0}, "trainings"),
        ({"measures": 1}, "measurements"),
        ({"methods": ["fedot"]}, "method"),
        ({"plain": False}, "plain"),
    ],
)
def test_what_is_above_the_policy_is_refused(recorded, rules, kind):
    place, pairs = recorded
    site = rule(place, **rules)
    request = pairs[1][0]
    moved = Message(request.header, {key: array + 1e-3 for key, array in request.arrays.items()})
    words = {"trains": False} if kind == "measurements" else {}
    if kind == "trainings":
        site.budget = PrivacyBudget(Ledger(place.folder / "nowhere").history())
        moved = pairs[0][0]
    reply, _ = site.answer(send_request(place, moved, **words), Message({}))
    assert reply.header["error"]["code"] == kind and not reply.arrays
    assert error_code(reply).startswith("refused by its policy")
    assert Ledger(place.site("art")).read().lines[-1]["direction"] == "refused"


def test_a_limit_of_epsilon_refuses_uploads_without_noise(place):
    rule(place, epsilon=100.0)
    rounds = place.run(place.settings(METHOD)).rounds
    assert all("would have no noise" in line["missing"]["art"] for line in rounds)


def test_a_ledger_that_was_changed_answers_nothing(recorded):
    place, pairs = recorded
    path = place.site("art") / "ledger.jsonl"
    path.write_text(path.read_text().replace('"costs": "upload"', '"costs": "nothing"', 1))
    reply, _ = rule(place).answer(send_request(place, pairs[1][0], version=0, round=1), Message({}))
    assert error_code(reply) == ERROR_MESSAGES["ledger"]


def test_a_policy_taken_away_refuses_and_the_site_goes_on(recorded):
    place, pairs = recorded
    site = place.desks["art"]
    path = place.site("art") / "policy.toml"
    text = path.read_text()
    path.unlink()
    reply, _ = site.answer(send_request(place, pairs[1][0]), Message({}))
    assert error_code(reply) == ERROR_MESSAGES["policy"]
    path.write_text(text)
    reply, _ = site.answer(send_request(place, pairs[1][0]), Message({}))
    assert "error" not in reply.header


def test_shots_that_single_rows_out_are_refused_by_default(place):
    settings = place.settings({"name": "tofa"}, allow_small=True, clients={"shots": 1})
    place.rules(quorum=1.0)
    with pytest.raises(Exception, match="are chosen by the site"):
        place.run(settings)


def uploads(place, settings, out):
    """What each site uploads in the first round."""
    grid, uploads_seen = local_grid(place.desks), {}
    pull = grid.pull_messages

    def listen(ids):
        replies = pull(ids)
        for reply in replies:
            message = from_records(reply.content, "")
            if message.header["kind"] == "round":
                uploads_seen.setdefault(message.header["client"], message.arrays["counts"])
        return replies

    grid.pull_messages = listen
    place.run(settings, out, grid)
    return uploads_seen


def test_statistics_of_small_classes_stay_whatever_the_experiment_says(place):
    """Twelve rows of each class at each site, and sixteen are needed."""
    printed = []
    place.desks["art"].log_text = printed.append
    settings = place.settings({"name": "tofa"}, allow_small=True)
    seen_uploads = uploads(place, settings, "closed")
    assert all((upload == 0).all() for upload in seen_uploads.values()) and len(seen_uploads) == 3
    assert any("nothing of them is uploaded: ant, bee, cat, dog" in line for line in printed)
    for name in ("art", "photo", "sketch"):
        rule(place, name, min_class_samples=1)
    seen_uploads = uploads(place, place.settings({"name": "tofa"}, allow_small=True, seeds=[1]), "open")
    assert all((upload > 0).any() for upload in seen_uploads.values())


def test_another_seed_divides_the_rows_of_a_site_no_other_way(place):
    rows = [place.desks["art"].site_trainings]
    for seed in (0, 1):
        place.run(place.settings(METHOD, seeds=[seed]), f"seed-{seed}")
    first, two = rows[0].values()
    assert first.world.seed == 0 and two.world.seed == 1
    assert np.array_equal(first.world.x[first.world.members["art"].train], two.world.x[two.world.members["art"].train])


def test_a_budget_of_rows_is_the_same_rows_in_every_training(place):
    site = rule(place, max_samples=20)
    for seed in (0, 1):
        place.run(place.settings(METHOD, seeds=[seed]), f"seed-{seed}")
    first, two = (site_training.world for site_training in site.site_trainings.values())
    assert len(first.members["art"].train) == 20
    assert np.array_equal(first.x[first.members["art"].train], two.x[two.members["art"].train])


def test_a_site_whose_scores_stay_there_takes_part(place):
    rule(place, scores="none")
    result = place.run(place.settings(METHOD))
    [first, _] = result.rounds
    assert first["clients"]["art"]["test_rows"] == 0 and "loss" not in first["clients"]["art"]
    assert first["clients"]["photo"]["test_rows"] > 0


def test_the_servers_epsilon_counts_uploads_that_were_lost_too(place):
    """Round 1 is asked for, answered, and asked for again with other tensors by a resumed server
    that lost the first: three releases for two rounds."""
    site = place.desks["art"]
    answer = site.answer

    def twice(request, state):
        if request.header["kind"] == "round" and request.header["round"] == 1:
            moved = Message(request.header, {k: array + 1e-3 for k, array in request.arrays.items()})
            assert "error" not in answer(send_request(place, moved), state)[0].header
        return answer(request, state)

    site.answer = twice
    lines = place.run(place.settings(METHOD, channel=NOISE)).rounds
    assert lines[0]["epsilon"] == pytest.approx(epsilon(2.0, 1, delta=1e-5))
    assert lines[1]["epsilon"] == pytest.approx(epsilon(2.0, 3, delta=1e-5))


def test_a_server_that_crashed_counts_what_was_released_and_no_more(place):
    """The answers of round 1 come, and the server ends before its checkpoint."""
    grid = local_grid(place.desks)
    pull = grid.pull_messages

    def crash(ids):
        replies = pull(ids)
        if replies[0].metadata.group_id == "1":
            raise KeyboardInterrupt
        return replies

    grid.pull_messages = crash
    settings = place.settings(METHOD, channel=NOISE)
    with pytest.raises(KeyboardInterrupt):
        place.run(settings, grid=grid)
    result = place.run(settings)
    accounts = [PrivacyBudget(Ledger(place.site(name)).history()) for name in ("art", "photo", "sketch")]
    assert [budget.rounds.total() for budget in accounts] == [2, 2, 2]
    spent = max(budget.epsilon(1e-5) for budget in accounts)
    assert result.rounds[-1]["epsilon"] == pytest.approx(spent)


def test_what_noise_costs_is_that_of_channel_or_method():
    assert upload_cost(make("fedavg"), Channel(), 100) == 0.0
    assert upload_cost(make("fedavg"), Channel(clip=1.0, noise_multiplier=2.0), 100) == 0.25
    assert upload_cost(make("tofa", noise_multiplier=2.0), Channel(), 100) == 0.25
    prompts = make("dp-fpl", noise_multiplier=2.0, batch_size=32, local_epochs=3)
    assert upload_cost(prompts, Channel(), 100) == pytest.approx(3 * 4 / 4)


def test_only_the_last_answers_are_kept_and_damage_is_no_answer(tmp_path):
    cache = ReplyCache(tmp_path)
    requests = [Message({"round": n, "nonce": "x"}, {"a": np.ones(2)}) for n in range(MAX_CACHED_REPLIES + 3)]
    for request in requests:
        cache.store(
            request,
            Message({"round": request.header["round"], "nonce": "x"}, {"b": np.ones(3)}),
            Message({"s": 1}),
        )
    assert len(list((tmp_path / "replies").iterdir())) == MAX_CACHED_REPLIES
    reply, state = cache.read(requests[-1])
    assert reply.header == {"round": MAX_CACHED_REPLIES + 2, "nonce": "x"} and state.header == {"s": 1}
    path = cache.path(requests[-1])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert cache.read(requests[-1]) is None


def test_init_writes_a_policy_that_can_be_read(place):
    assert read_policy(place.site("art")).trainings == 100


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 1e8}, "fedavg.lr must be above 0 and at most 1000, got 100000000.0"),
        ({"weight_decay": 1e9}, "fedavg.weight_decay must be between 0 and 100, got 1000000000.0"),
        ({"local_epochs": 10**6}, "fedavg.local_epochs must be between 1 and 10000, got 1000000"),
    ],
)
def test_a_site_opens_no_training_whose_settings_are_out_of_range(recorded, settings, words):
    """With lr = 1e8 and one batch an upload is the gradient at a head of the server's choice."""
    place, pairs = recorded
    spec = copy.deepcopy(pairs[0][0].header["spec"])
    spec["identity"]["method"] |= settings
    request = send_request(place, pairs[0][0], spec=spec, training=training_key(spec))
    reply, _ = rule(place).answer(request, Message({}))
    assert "the settings do not fit this site" in error_code(reply)
    assert words in (place.site("art") / "ledger.jsonl").read_text()
