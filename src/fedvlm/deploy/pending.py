"""The request that waits for a person at a site, in plain words."""

from pathlib import Path
from typing import Any

from fedvlm.deploy import events
from fedvlm.deploy.account import PrivacyBudget, upload_cost
from fedvlm.deploy.consent import check_consent
from fedvlm.deploy.policy import Policy, read_policy
from fedvlm.deploy.reasons import RequestRefused
from fedvlm.deploy.rows import SiteTraining
from fedvlm.engines.client import make_client
from fedvlm.runner.settings import Settings
from fedvlm.tensors import count_bytes


def pending_request(folder: Path) -> dict[str, Any] | None:
    """The last request, if it still needs a person: what would leave, how often, at what cost."""
    if not read_policy(folder).consent:
        return None
    requests = [event for event in events.read_events(folder) if event["kind"] == "asks"]
    if not requests:
        return None
    try:
        check_consent(folder, str(requests[-1]["method"]))
    except RequestRefused:
        return requests[-1]
    return None


def describe_request(
    settings: Settings, site_training: SiteTraining, account: PrivacyBudget, policy: Policy
) -> dict[str, Any]:
    """What a person is asked to consent to; the upload is made to see what it holds, and stays."""
    method, channel = settings.method, settings.channel
    [id] = site_training.world.members
    shared, local = method.init(site_training.world.frozen)
    sent = method.send(shared, id)
    upload, _ = method.update(site_training.world.frozen, sent, local, make_client(site_training.world, id, 0))
    once = upload_cost(method, channel, len(site_training.labels))
    return {
        "method": method.name,
        "rounds": method.rounds,
        "leaves": [f"{key} {list(value.shape)}" for key, value in upload.items()],
        "bytes": count_bytes(upload),
        "noise": channel.noise_multiplier,
        "before": account.epsilon(policy.delta),
        "after": account.epsilon(policy.delta, extra_cost=once * method.rounds),
    }


def format_request(asked_event: dict[str, Any] | None) -> list[str]:
    if asked_event is None:
        return []
    noise = "without noise" if not asked_event["noise"] else f"with noise {asked_event['noise']:g}"
    lines = [
        f"The server asks for {asked_event['method']}, {asked_event['rounds']} rounds.",
        f"In the first round {', '.join(asked_event['leaves']) or 'nothing but scores'} would leave this "
        f"site ({asked_event['bytes']} bytes), {noise}. No image leaves.",
    ]
    if asked_event["after"]:
        lines.append(f"ε so far {asked_event['before']:.3g}, after this run {asked_event['after']:.3g}.")
    return lines
