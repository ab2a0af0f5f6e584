"""The request that waits for a person at a site, in plain words."""

from pathlib import Path
from typing import Any

from fedvlm.deploy import events
from fedvlm.deploy.account import Account, cost
from fedvlm.deploy.consent import check_consent
from fedvlm.deploy.policy import Policy, read_policy
from fedvlm.deploy.reasons import Refused
from fedvlm.deploy.rows import Own
from fedvlm.engines.client import client
from fedvlm.runner.settings import Settings
from fedvlm.tensors import count_bytes


def pending(folder: Path) -> dict[str, Any] | None:
    """The last request, if it still needs a person: what would leave, how often, at what cost."""
    if not read_policy(folder).consent:
        return None
    asked = [event for event in events.read(folder) if event["kind"] == "asks"]
    if not asked:
        return None
    try:
        check_consent(folder, str(asked[-1]["method"]))
    except Refused:
        return asked[-1]
    return None


def request(settings: Settings, own: Own, account: Account, policy: Policy) -> dict[str, Any]:
    """What a person is asked to consent to; the upload is made to see what it holds, and stays."""
    method, channel = settings.method, settings.channel
    [id] = own.world.members
    shared, local = method.init(own.world.frozen)
    sent = method.send(shared, id)
    upload, _ = method.update(own.world.frozen, sent, local, client(own.world, id, 0))
    once = cost(method, channel, len(own.labels))
    return {
        "method": method.name,
        "rounds": method.rounds,
        "leaves": [f"{key} {list(value.shape)}" for key, value in upload.items()],
        "bytes": count_bytes(upload),
        "noise": channel.noise_multiplier,
        "before": account.epsilon(policy.delta),
        "after": account.epsilon(policy.delta, more=once * method.rounds),
    }


def in_words(asked: dict[str, Any] | None) -> list[str]:
    if asked is None:
        return []
    noise = "without noise" if not asked["noise"] else f"with noise {asked['noise']:g}"
    lines = [
        f"The server asks for {asked['method']}, {asked['rounds']} rounds.",
        f"In the first round {', '.join(asked['leaves']) or 'nothing but scores'} would leave this "
        f"site ({asked['bytes']} bytes), {noise}. No image leaves.",
    ]
    if asked["after"]:
        lines.append(f"ε so far {asked['before']:.3g}, after this run {asked['after']:.3g}.")
    return lines
