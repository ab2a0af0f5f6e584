"""Consent: what a person is asked, who may answer, and that an answer is for exactly one plan."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.deploy.kits import read_site
from fedvlm.deploy.messages import ReportedError
from fedvlm.deploy.operations import events
from fedvlm.deploy.operations.status import status
from fedvlm.deploy.site import consent, people
from fedvlm.deploy.site.consent import (
    accept_request,
    check_consented_size,
    check_plan,
    find_request,
    format_request,
    plan_hash,
    refuse_request,
    waiting_requests,
    withdraw_consent,
)
from fedvlm.deploy.site.ledger import Ledger, PrivacyBudget
from fedvlm.deploy.site.people import LoginError, Person, add_person, authenticate, read_people, remove_person
from fedvlm.deploy.site.policy import Policy
from fedvlm.deploy.site.service import Site
from fedvlm.errors import FederationError, SettingsError
from fedvlm.runner.settings import build

LEE, KIM = Person("Dr Lee", "approver"), Person("Dr Kim", "approver")
GUARD = Person("A. Operator", "operator")


@pytest.fixture(autouse=True)
def quick_logins(monkeypatch):
    monkeypatch.setattr(people, "FAILURE_SECONDS", 0.0)
    monkeypatch.setattr(people, "SCRYPT_COST", (1 << 10, 8, 1))


@pytest.fixture
def asked(place):
    """The folder of a site at which a request waits; the two other sites need no consent."""
    place.asks_for_consent("art")
    place.rules(quorum=1.0)
    with pytest.raises(FederationError, match="nobody at this site has consented"):
        place.run()
    return place.site("art")


def words(folder):
    [request] = waiting_requests(folder)
    return dict(format_request(folder, request))


def test_a_request_says_in_plain_words_what_a_person_must_know(place, asked):
    text = words(asked)
    assert text["Who asks"] == "the server at 127.0.0.1:8443; contact: tests@example.org"
    assert text["What for"] == "a test of consent"
    assert text["Method"].startswith("fedot. FedOT: a shared head over features that every client rotates")
    assert text["What leaves"].startswith("head (4 × 16 numbers), 256 bytes in the first round; exact scores. No image")
    assert text["From"] == "48 training samples (the data do not say of how many patients)"
    assert text["Privacy cost"] == "no bound: sent without noise"
    assert text["How long"].startswith("3 rounds in one training;")
    assert text["Last time"] == "this site has not finished a run yet"
    assert text["Plan"] == waiting_requests(asked)[0].plan


def test_a_run_without_noise_has_no_bound_whatever_was_spent_before(place):
    noisy = place.settings(channel={"clip": 0.1, "noise_multiplier": 5.0})
    place.run(noisy)
    place.asks_for_consent("art")
    place.desks["art"] = Site(read_site(place.site("art")))
    place.run(place.settings({"name": "fedavg", "rounds": 2}), out="second")
    assert words(place.site("art"))["Privacy cost"] == "no bound: sent without noise"
    place.run(replace(noisy, purpose="again, with noise"), out="third")
    cost = dict(format_request(place.site("art"), waiting_requests(place.site("art"))[0]))["Privacy cost"]
    assert cost.startswith("ε = ") and "with all earlier uploads" in cost


def test_patients_are_counted_where_the_data_name_them(place):
    of_art = place.rows.domains == "art"
    place.change("art", groups=np.array([f"patient {number // 4}" for number in range(of_art.sum())]))
    place.asks_for_consent("art")
    policy = place.site("art") / "policy.toml"
    policy.write_text(policy.read_text().replace("\nmin_samples = 16", "\nmin_samples = 4"))  # few patients
    place.run()
    count = int(words(place.site("art"))["From"].split("(")[1].split()[0])
    assert 1 < count <= (of_art.sum() + 3) // 4
    assert "patient 1" not in json.dumps(waiting_requests(place.site("art"))[0].facts)


def test_an_accepted_plan_runs_and_no_other(place, asked):
    assert "consents until" in accept_request(asked, LEE, waiting_requests(asked)[0].plan, 2)
    place.run()
    assert waiting_requests(asked) == []
    for changed in (
        place.settings({"name": "fedot", "rounds": 4, "lr": 1e-3}),
        place.settings(purpose="something else"),
        place.settings(seeds=[1]),
        place.settings(channel={"clip": 2.0}),
    ):
        with pytest.raises(FederationError, match="nobody at this site has consented"):
            place.run(changed, out="other")
    assert len(waiting_requests(asked)) == 4


def test_the_next_request_says_what_the_site_gained_last_time(place, asked):
    place.consents("art")
    place.run()
    with pytest.raises(FederationError):
        place.run(place.settings(purpose="once more"), out="second")
    [gain] = [event for event in events.read_events(asked) if event["kind"] == "gained"]
    assert words(asked)["Last time"].startswith(f"{gain['federated']} of {gain['samples']} correct with the federation")


@pytest.mark.parametrize(
    ("federated", "advice"),
    [(15, "15 of 24 correct with the federation, 20 of 24 alone: keep your own classifier"), (21, "use the fed")],
)
def test_the_headline_says_whether_the_site_gained(federated, advice):
    choice = "use the federation's classifier" if federated > 20 else "keep your own classifier"
    facts = {"samples": 24, "federated": federated, "alone": 20, "advice": choice}
    assert advice in events.format_event({"time": "2026-01-02T03:04:05+00:00", "kind": "gained", **facts})


def test_answers_are_lines_of_the_ledger_and_a_refused_request_is_deleted(place, asked):
    plan = waiting_requests(asked)[0].plan
    refuse_request(asked, GUARD, plan[:8], "not on a Sunday")
    line = Ledger(asked).read().lines[-1]
    assert (line["direction"], line["kind"], line["by"], line["plan"]) == ("consent", "refused", "A. Operator", plan)
    assert list((asked / "requests").glob("*")) == [] and waiting_requests(asked) == []
    with pytest.raises(FederationError, match="a person at this site has refused") as caught:
        place.run()
    assert "Sunday" not in str(caught.value)
    assert list((asked / "requests").glob("*")) == []  # it is not asked again
    done = CliRunner().invoke(app, ["ledger", str(asked)])
    assert done.exit_code == 0 and "A. Operator (operator), plan" in done.stdout and "not on a Sunday" in done.stdout


def test_two_approvers_are_two_people(place):
    place.asks_for_consent("art", approvers=2)
    place.rules(quorum=1.0)
    folder = place.site("art")
    for person in (LEE, LEE, KIM):
        with pytest.raises(FederationError, match="nobody at this site has consented"):
            place.run()
        accept_request(folder, person, waiting_requests(folder)[0].plan, 1)
    place.run()


def test_an_operator_cannot_consent_but_can_refuse(place, asked):
    plan = waiting_requests(asked)[0].plan
    with pytest.raises(SettingsError, match="an approver has to consent"):
        accept_request(asked, GUARD, plan, 1)
    assert "deleted" in refuse_request(asked, GUARD, plan, "")


def test_a_consent_ends_after_its_days_and_can_be_withdrawn(place, asked):
    accept_request(asked, LEE, waiting_requests(asked)[0].plan, 1e-9)
    with pytest.raises(FederationError, match="has ended"):
        place.run()
    accept_request(asked, LEE, waiting_requests(asked)[0].plan, 1)
    assert f"plan {waiting_or_granted(asked)[:8]} by Dr Lee until" in status(asked)["consent"]
    withdraw_consent(asked, LEE)
    with pytest.raises(FederationError, match="nobody at this site has consented"):
        place.run()


def waiting_or_granted(folder):
    return next(line["plan"] for line in Ledger(folder).read().lines if line["direction"] == "consent")


@pytest.mark.parametrize("days", [0, -1, 366, float("nan"), float("inf")])
def test_a_consent_for_no_time_or_for_ever_is_refused(asked, days):
    with pytest.raises(SettingsError, match="days must be above 0 and at most 365"):
        accept_request(asked, LEE, waiting_requests(asked)[0].plan, days)


@pytest.mark.parametrize("plan", ["", "0000000", "ffffffffffff", "*"])
def test_a_plan_must_be_named_by_its_hash(asked, plan):
    with pytest.raises(SettingsError, match="no request with the plan .* waits here; name at least 8 characters"):
        find_request(asked, plan)


def test_a_forged_line_consents_to_nothing(place, asked):
    accept_request(asked, LEE, waiting_requests(asked)[0].plan, 1)
    path = asked / "ledger.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1].replace("Dr Lee", "Dr Kim")]) + "\n")
    with pytest.raises(FederationError, match="its ledger was changed"):
        place.run()


def test_a_request_that_was_changed_on_disk_is_not_shown(asked):
    [path] = (asked / "requests").glob("*.json")
    path.write_text(path.read_text().replace("a test of consent", "a holiday"))
    assert waiting_requests(asked) == []


def test_a_request_without_purpose_or_contact_is_refused_with_the_remedy(place):
    place.asks_for_consent("art")
    place.rules(quorum=1.0)
    for statement in ({"purpose": ""}, {"contact": " "}):
        with pytest.raises(FederationError, match="names no purpose or no contact; set both in the experiment"):
            place.run(place.settings(**statement))


@pytest.mark.parametrize("text", ["x" * 501, "two\nlines"])
def test_a_purpose_is_one_line(place, text):
    with pytest.raises(SettingsError, match="purpose must be one line of at most 500 characters"):
        place.settings(purpose=text)


def test_purpose_and_contact_decide_no_number(place):
    first, second = place.settings(), place.settings(purpose="another", contact="b")
    assert first.identity() == second.identity()
    assert "purpose" not in first.identity()


def spec_of(place, settings, **changes):
    identity = json.loads(json.dumps(settings.identity()))
    run = {"identity": identity, **settings.statement, "trainings": 1, "rounds": 3}
    return {"identity": identity, "classes": ["a"], "seed": 0, "training": "all", "run": run, **changes}


def test_a_training_must_be_part_of_the_run_it_names(place):
    settings = place.settings(tune=["lr"])
    spec = spec_of(place, settings)
    check_plan(spec, settings)
    candidate = build({**spec["identity"], "method": {**spec["identity"]["method"], "lr": 1e-2}, "tune": []})
    check_plan(spec, candidate)
    crafted = build({**spec["identity"], "method": {**spec["identity"]["method"], "lr": 100.0}})
    other = build({**spec["identity"], "channel": {"clip": 3.0}})
    for wrong, seed in ((crafted, 0), (other, 0), (settings, 1)):
        with pytest.raises(ReportedError, match="is not part of the run"):
            check_plan({**spec, "seed": seed}, wrong)


def test_a_consent_covers_as_many_trainings_and_rounds_as_the_plan_has(place):
    spec, budget = spec_of(place, place.settings()), PrivacyBudget(Ledger(place.folder).history())
    check_consented_size(spec, 3, budget, "first")
    budget.count_line({"costs": "training", "training": "first", "plan": plan_hash(spec)})
    check_consented_size(spec, 3, budget, "first")
    with pytest.raises(ReportedError, match="consented to 1 of these"):
        check_consented_size(spec, 3, budget, "second")
    for _ in range(3 + consent.MAX_REPEATED_ROUNDS):
        check_consented_size(spec, 3, budget, "first")
        budget.count_line({"costs": "upload", "training": "first"})
    with pytest.raises(ReportedError, match="consented to 3 of these"):
        check_consented_size(spec, 3, budget, "first")


def test_a_whole_tuning_search_needs_one_answer(place):
    place.asks_for_consent("art")
    place.rules(quorum=1.0)
    settings = place.settings({"name": "fedot", "rounds": 4, "lr": 1e-4}, tune=["lr"])
    with pytest.raises(FederationError, match="nobody at this site has consented"):
        place.run(settings)
    [request] = waiting_requests(place.site("art"))
    assert request.facts["trainings"] == 5
    place.consents("art")
    place.run(settings)


def test_old_requests_make_room(place, monkeypatch):
    monkeypatch.setattr(consent, "MAX_REQUESTS", 2)
    place.asks_for_consent("art")
    for number in range(4):
        place.run(place.settings(purpose=f"number {number}"), out=str(number))
    assert [request.facts["purpose"] for request in waiting_requests(place.site("art"))] == ["number 3", "number 2"]


# People


def test_a_person_proves_who_it_is_and_nothing_secret_is_stored(tmp_path):
    token = add_person(tmp_path, "Dr Lee", "approver")
    add_person(tmp_path, "Zoë", "operator", "correct horse battery")
    assert authenticate(tmp_path, "Dr Lee", token) == Person("Dr Lee", "approver")
    assert authenticate(tmp_path, "Zoe\u0308", "correct horse battery").role == "operator"
    stored = (tmp_path / "people.json").read_text()
    assert token not in stored and "horse" not in stored
    assert (tmp_path / "people.json").stat().st_mode & 0o077 == 0
    for name, secret in (("Dr Lee", "x"), ("Dr Lee", ""), ("nobody", token), ("Zoë", token)):
        with pytest.raises(LoginError, match="is wrong; try again"):
            authenticate(tmp_path, name, secret)
    refusals = (tmp_path / "security.jsonl").read_text()
    assert refusals.count('"event": "login"') == 4 and token not in refusals


def test_a_new_token_ends_the_old_one_and_a_removed_person_is_nobody(tmp_path):
    old, new = (add_person(tmp_path, "Dr Lee", "approver") for _ in range(2))
    with pytest.raises(LoginError):
        authenticate(tmp_path, "Dr Lee", old)
    authenticate(tmp_path, "Dr Lee", new)
    with pytest.raises(SettingsError, match="'Dr Le' is not on the list; it has Dr Lee"):
        remove_person(tmp_path, "Dr Le")
    remove_person(tmp_path, "Dr Lee")
    with pytest.raises(LoginError, match="nobody is on this site's list of people; add an approver"):
        authenticate(tmp_path, "Dr Lee", new)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("", "operator"), "a name must have 1 to 63"),
        (("a\nb", "operator"), "a name must have 1 to 63"),
        (("a", "boss"), "role must be one of operator, approver; got 'boss'"),
        (("a", "operator", "short"), "at least 12 characters, got 5"),
    ],
)
def test_odd_people_are_refused(tmp_path, values, message):
    with pytest.raises(SettingsError, match=message):
        add_person(tmp_path, *values)
    assert read_people(tmp_path) == {}


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', '{"a": {"role": "boss"}}'])
def test_a_damaged_list_lets_nobody_in(tmp_path, text):
    (tmp_path / "people.json").write_text(text)
    with pytest.raises(SettingsError, match=r"people.json is damaged; restore it"):
        authenticate(tmp_path, "a", "b")


def test_people_answer_on_the_command_line(place, asked):
    def invoke(*arguments, text=""):
        return CliRunner().invoke(app, ["deploy", *map(str, arguments)], input=text)

    assert "nobody yet; add somebody" in invoke("people", asked).stdout
    made = invoke("people", asked, "--add", "Dr Lee", "--role", "approver")
    token = made.stdout.split("token: ")[1].splitlines()[0]
    assert "Dr Lee: approver" in invoke("people", asked).stdout
    shown = invoke("consent", asked).stdout
    assert "What for: a test of consent" in shown and "accept with: fedvlm deploy consent" in shown
    plan = waiting_requests(asked)[0].plan[:8]
    wrong = invoke("consent", asked, "--by", "Dr Lee", "--plan", plan, text="wrong\n")
    assert isinstance(wrong.exception, LoginError) and waiting_requests(asked)
    right = invoke("consent", asked, "--by", "Dr Lee", "--plan", plan, "--days", "7", text=f"{token}\n")
    assert right.exit_code == 0 and "Dr Lee consents until" in right.stdout
    place.run()
    done = invoke("consent", asked, "--by", "Dr Lee", "--withdraw", text=f"{token}\n")
    assert "withdrawn" in done.stdout and token not in done.stdout
    assert invoke("consent", asked, "--refuse", "no").exit_code == 2
    assert "no longer on the list" in invoke("people", asked, "--remove", "Dr Lee").stdout


def test_the_policy_allows_a_site_without_people(tmp_path):
    assert Policy().approvers == 1 and not Policy().consent
