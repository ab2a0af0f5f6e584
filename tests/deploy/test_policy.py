"""A site's own rules: what they refuse, and that a typo in them is not a rule."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedvlm.channel import Channel
from fedvlm.cli import app
from fedvlm.core import make
from fedvlm.data.clients import Clients
from fedvlm.deploy.messages import ERROR_MESSAGES, RequestRefused, encode_error, render_error
from fedvlm.deploy.site.policy import (
    RULE_TEXTS,
    Policy,
    current_policy,
    example_policy,
    explain_policy,
    read_policy,
)
from fedvlm.errors import FedVLMError, SettingsError

LABELS = np.array([0] * 20 + [1] * 16 + [3] * 2)
OPEN = 'methods = ["*"]\nplain = true\n'
VERIFIED = 'methods = ["*"]\n'  # as by default
FEDOT = make("fedot")


def policy(folder, text):
    (folder / "policy.toml").write_text(text)
    return read_policy(folder)


def test_what_init_writes_is_the_default_with_its_methods(tmp_path):
    site_policy = policy(tmp_path, example_policy())
    assert replace(site_policy, methods=()) == Policy()
    written = {line.split(" = ")[0] for line in example_policy().splitlines()[1:]}
    assert written == set(asdict(Policy())) == set(RULE_TEXTS)
    for name in ("auto", "fedot", "faa-clip", "fedotp", "tofa"):
        site_policy.admit(make(name), Channel(verified=True), LABELS)
        with pytest.raises(RequestRefused, match="in a verified sum only"):
            site_policy.admit(make(name), Channel(), LABELS)
        replace(site_policy, noise_multiplier=1.0).admit(make(name), Channel(clip=1.0, noise_multiplier=1.0), LABELS)


def test_nothing_is_allowed_that_is_not_named(tmp_path):
    with pytest.raises(RequestRefused, match="the method fedot is not allowed here, only none"):
        Policy().admit(FEDOT, Channel(), LABELS)
    with pytest.raises(RequestRefused, match="fens is not allowed"):
        policy(tmp_path, example_policy()).admit(make("fens"), Channel(), LABELS)
    policy(tmp_path, OPEN).admit(make("fens"), Channel(), LABELS)


@pytest.mark.parametrize(
    ("rule", "kind", "message"),
    [
        ('methods = ["fedavg"]', "method", "the method fedot is not allowed here, only fedavg"),
        (f"{OPEN}min_samples = 39", "samples", "fewer than 39 training samples"),
        (f"{OPEN}clip = 0.5", "clip", "channel.clip must be above 0 and at most 0.5, got 1"),
        (
            f"{OPEN}noise_multiplier = 3",
            "noise",
            "channel.noise_multiplier must be at least 3, got 2",
        ),
        (VERIFIED, "plain", "in a verified sum only"),
    ],
)
def test_a_round_against_the_policy_is_refused_by_reason(tmp_path, rule, kind, message):
    site_policy = policy(tmp_path, rule)
    with pytest.raises(RequestRefused, match=message) as error:
        site_policy.admit(FEDOT, Channel(clip=1.0, noise_multiplier=2.0), LABELS)
    assert error.value.code == kind
    assert render_error(encode_error(error.value)).startswith("refused by its policy: ")


def test_a_round_within_the_policy_is_admitted(tmp_path):
    site_policy = policy(tmp_path, f"{VERIFIED}clip = 1.0\nnoise_multiplier = 2\nmax_upload_bytes = 9")
    for channel in (
        Channel(clip=1.0, noise_multiplier=2.0),
        Channel(clip=0.1, noise_multiplier=9.0),
    ):
        site_policy.admit(FEDOT, replace(channel, verified=True), LABELS)
    site_policy.check_upload_size(9)
    with pytest.raises(
        RequestRefused,
        match="the reply has 10 bytes, but this site sends at most 9; raise max_upload_bytes in its policy",
    ):
        site_policy.check_upload_size(10)


def test_a_channel_that_does_not_clip_is_no_smaller_clip(tmp_path):
    with pytest.raises(RequestRefused, match="at most 0.5, got 0"):
        policy(tmp_path, f"{OPEN}clip = 0.5").admit(FEDOT, Channel(), LABELS)


def test_small_classes_are_left_out_and_stop_no_round(tmp_path):
    site_policy = policy(tmp_path, OPEN)
    assert site_policy.small_classes(LABELS) == [3]  # a class without rows is no small class
    site_policy.admit(make("tofa"), Channel(), LABELS)
    assert site_policy.with_min_class_samples(replace(make("tofa"), min_class_samples=1)).min_class_samples == 16
    assert site_policy.with_min_class_samples(replace(make("tofa"), min_class_samples=40)).min_class_samples == 40
    assert site_policy.with_min_class_samples(FEDOT) is FEDOT


def test_a_method_that_cannot_leave_a_small_class_out_is_refused(tmp_path):
    class Bare:
        name = "bare"

        def covered_classes(self, upload): ...
        def class_means(self, upload): ...

    site_policy = policy(tmp_path, OPEN)
    with pytest.raises(RequestRefused, match="a class has fewer than 16 training samples"):
        site_policy.admit(Bare(), Channel(), LABELS)
    site_policy.admit(Bare(), Channel(), LABELS[:36])


@pytest.mark.parametrize(
    "clients",
    [{"shots": 1}, {"ratios": (0.5, 0.25, 0.25)}, {"val_shots": 2}, {"public_ratio": 0.1}],
)
def test_how_rows_are_divided_is_the_sites_to_say(clients):
    Policy().check_partition(Clients(partition="dirichlet", count=3))
    Policy(server_divides=True).check_partition(Clients(**clients))
    with pytest.raises(RequestRefused, match="chosen by the site"):
        Policy().check_partition(Clients(**clients))


SCORES = {
    **{"loss": 0.4321, "validation_rows": 30, "validation_hits": 17, "test_rows": 0},
    **{"test_hits": 0, "AUC": 0.777, "reliability": [[1, 2, 3]], "confusion": [[0, 1, 1]]},
}


def test_scores_are_told_as_far_as_the_policy_says():
    exact = {key: SCORES[key] for key in SCORES if key not in ("reliability", "confusion")}
    assert Policy().allowed_scores(SCORES) == exact
    coarse = Policy(scores="coarse").allowed_scores(SCORES)
    assert coarse == {**exact, "loss": 0.45, "AUC": 0.8, "validation_hits": 16}
    silent = Policy(scores="none").allowed_scores(SCORES)
    assert set(silent.values()) == {0} and "loss" not in silent
    for site_policy in (Policy(noise_multiplier=1.0), Policy(epsilon=3.0)):
        assert site_policy.allowed_scores(SCORES) == silent
        assert replace(site_policy, scores="coarse").allowed_scores(SCORES) == coarse


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_clas_samples = 5", "did you mean 'min_class_samples'"),
        ('methods = "fedot"', "methods must be names.*, got 'fedot'"),
        ("consent = 1", "consent must be .*, got 1"),
        ("approvers = 0", "approvers must be at least 1, got 0"),
        ("noise_multiplier = -1.0", "noise_multiplier must be at least 0, got -1.0"),
        ("noise_multiplier = nan", "noise_multiplier must be finite and at least 0, got nan"),
        ("epsilon = inf", "epsilon must be finite and at least 0, got inf"),
        ("delta = 1.0", "delta must be above 0 and below 1, got 1.0"),
        ('scores = "all"', "scores must be .*, got 'all'"),
        ("noise = ", "is not valid TOML"),
        (None, "there is no settings file"),
    ],
)
def test_a_policy_that_is_missing_or_unreadable_refuses(tmp_path, text, message):
    if text is not None:
        (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_policy(tmp_path)
    with pytest.raises(RequestRefused, match=message) as error:
        current_policy(tmp_path)
    assert render_error(encode_error(error.value)) == ERROR_MESSAGES["policy"]  # and nothing of the file's


def test_a_policy_that_is_no_file_refuses(tmp_path):
    (tmp_path / "policy.toml").mkdir()
    with pytest.raises(RequestRefused):
        current_policy(tmp_path)


def test_the_command_says_every_rule_and_what_it_is_good_for(tmp_path):
    (tmp_path / "policy.toml").write_text(example_policy(("fedot",)) + "")
    output = CliRunner().invoke(app, ["deploy", "policy", str(tmp_path)])
    assert output.exit_code == 0, output.output
    for name, (meaning, benefit) in RULE_TEXTS.items():
        assert f"{name} = " in output.stdout and meaning in output.stdout and benefit in output.stdout
    assert "So far: 0 of 100 trainings, 0 of 10000 rounds." in output.stdout
    assert "No scores" in explain_policy(Policy(noise_multiplier=1.0))[-1]
    assert "are reported: exact" in explain_policy(Policy())[-1]


@pytest.mark.parametrize("kind", ERROR_MESSAGES)
def test_an_error_travels_as_a_kind_and_numbers(kind):
    names = [
        value_name
        for value_name in ("most", "least", "bytes", "count", "trainings", "rounds")
        if "{" + value_name in ERROR_MESSAGES[kind]
    ]
    error = RequestRefused(kind, "/home/a/secret.png", **dict.fromkeys(names, 7))
    assert encode_error(error) == {"code": kind, "numbers": dict.fromkeys(names, 7)}
    assert "secret" not in render_error(encode_error(error))


@pytest.mark.parametrize("payload", [None, [], "x", {}, {"code": []}, {"code": "samples", "numbers": {"least": "<b>"}}])
def test_an_error_in_words_of_its_own_is_not_repeated(payload):
    assert render_error(payload).startswith("it reports an error")


def test_an_error_of_the_program_tells_no_trace():
    assert encode_error(KeyError("/home/a")) == {"code": "failure", "numbers": {}}
    assert encode_error(FedVLMError("x"))["code"] == "failure"
    assert encode_error(SettingsError("x"))["code"] == "settings"
