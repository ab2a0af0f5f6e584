"""A site's own rules: what they refuse, and that a typo in them is not a rule."""

from dataclasses import asdict

import numpy as np
import pytest

from fedvlm.channel import Channel
from fedvlm.deploy.policy import (
    EXAMPLE,
    Policy,
    give_consent,
    read_policy,
    withdraw_consent,
)
from fedvlm.deploy.reasons import Refused
from fedvlm.errors import SettingsError

LABELS = np.array([0, 0, 0, 1, 1, 1, 3])


def policy(folder, text):
    (folder / "policy.toml").write_text(text)
    return read_policy(folder)


def test_without_a_file_all_is_allowed_and_the_example_says_the_same(tmp_path):
    assert read_policy(tmp_path) == Policy() == policy(tmp_path, EXAMPLE)
    Policy().admit(tmp_path, "fedot", Channel(), LABELS)
    Policy().release(10**12)
    assert set(asdict(Policy())) == {
        line.split(" = ")[0] for line in EXAMPLE.splitlines() if " = " in line
    }


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (
            'methods = ["fedavg", "fedlt"]',
            "the method fedot is not allowed here, only fedavg, fedlt",
        ),
        ("smallest_class = 2", "a class has fewer than 2 training rows, and"),
        ("clip = 0.5", "channel.clip = 1, but this site wants its change clipped to 0.5 or less"),
        ("noise = 3", "channel.noise = 2, but this site wants 3 or more"),
        ("consent = true", "nobody at this site has consented"),
    ],
)
def test_a_round_against_the_policy_is_refused_by_reason(tmp_path, rule, says):
    mine = policy(tmp_path, rule)
    with pytest.raises(Refused, match=says):
        mine.admit(tmp_path, "fedot", Channel(clip=1.0, noise=2.0), LABELS)


def test_a_round_within_the_policy_is_admitted(tmp_path):
    mine = policy(
        tmp_path,
        'methods = ["fedot"]\nsmallest_class = 1\nclip = 1.0\nnoise = 2\nlargest_upload = 9',
    )
    mine.admit(tmp_path, "fedot", Channel(clip=1.0, noise=2.0), LABELS)
    mine.admit(tmp_path, "fedot", Channel(clip=0.1, noise=9.0), LABELS)
    mine.release(9)
    with pytest.raises(Refused, match="the answer has 10 bytes, but this site sends 9 at most"):
        mine.release(10)


def test_a_channel_that_does_not_clip_is_no_smaller_clip(tmp_path):
    with pytest.raises(Refused, match="channel.clip = 0,"):
        policy(tmp_path, "clip = 0.5").admit(tmp_path, "fedot", Channel(), LABELS)


def test_a_class_without_rows_is_no_small_class(tmp_path):
    Policy(smallest_class=3).admit(tmp_path, "fedot", Channel(), LABELS[:6])


def test_consent_is_for_its_methods_and_its_time_and_can_be_withdrawn(tmp_path):
    mine = Policy(consent=True)

    def ask(method="fedot"):
        mine.admit(tmp_path, method, Channel(), LABELS)

    give_consent(tmp_path, "A. Person", ["fedot"])
    ask()
    with pytest.raises(Refused, match="is not for the method fedavg"):
        ask("fedavg")
    give_consent(tmp_path, "A. Person", days=1e-9)
    with pytest.raises(Refused, match="ended at 20"):
        ask()
    give_consent(tmp_path, "A. Person")
    ask("fedavg")
    withdraw_consent(tmp_path)
    with pytest.raises(Refused, match="nobody at this site"):
        ask()
    (tmp_path / "consent.json").write_text("{}")
    with pytest.raises(Refused, match="cannot be read"):
        ask()


def test_consent_of_nobody_or_for_no_time_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="nobody is named"):
        give_consent(tmp_path, " ")
    with pytest.raises(SettingsError, match="days = 0"):
        give_consent(tmp_path, "A. Person", days=0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("smalest_class = 5", "did you mean 'smallest_class'"),
        ('methods = "fedot"', "methods = 'fedot'; write names"),
        ("consent = 1", "consent = 1 does not fit"),
        ("noise = -1.0", "noise = -1.0 is negative"),
        ("noise = ", "is not valid TOML"),
    ],
)
def test_a_policy_with_a_typo_is_refused(tmp_path, text, says):
    with pytest.raises(SettingsError, match=says):
        policy(tmp_path, text)
