"""A policy in plain words: what the site allows, and what each rule protects from."""

from dataclasses import fields
from json import dumps

from fedvlm.deploy.account import PrivacyBudget
from fedvlm.deploy.policy import ALL_METHODS, DEFAULT_METHODS, Policy

# By rule: what it is, and what it is good for. Written into policy.toml and told by the command.
RULE_TEXTS = {
    "methods": (
        "methods that may run here",
        'a method sends what it sends; name those you have read about. ["*"] is all of them',
    ),
    "min_class_samples": (
        "statistics of a class of fewer training rows stay here",
        "the mean of few images is nearly the images themselves",
    ),
    "min_samples": (
        "with fewer training rows than this nothing is trained",
        "a model of a handful of rows tells which they were",
    ),
    "max_samples": (
        "training rows that are used at most, drawn here; 0: all",
        "what is not used cannot leave",
    ),
    "server_divides": (
        "the server may say shots, ratios and the seed of the division",
        "two trainings that differ by one row tell that row",
    ),
    "max_upload_bytes": (
        "bytes of one message to the server; 0: any",
        "a large message can hold the data; heads, prompts and statistics are small",
    ),
    "clip": (
        "the channel must clip to this norm or a smaller one; 0: it need not",
        "one site's change is bounded, and noise counts for something",
    ),
    "noise_multiplier": (
        "the channel's noise multiplier must be this or more",
        "with noise nobody can be sure whether a row was there",
    ),
    "epsilon": (
        "ε of all that leaves, in total; 0: not limited",
        "noise is used up by asking often; above it no upload leaves",
    ),
    "delta": ("δ at which ε is counted", "the chance that the promise of ε does not hold"),
    "secure": (
        "uploads leave in a secure sum only",
        "the server sees what all sites say together, and not what this one says",
    ),
    "scores": (
        'what is told of how well it works here: "exact", "coarse" or "none"',
        "exact losses of heads that a server makes up tell of rows; beside noise they are not told",
    ),
    "trainings": ("trainings that may be opened, in total", "each tells a little more"),
    "rounds": ("rounds that are answered, per training", "each tells a little more"),
    "all_rounds": ("rounds that are answered, in total", "each tells a little more"),
    "measures": (
        "answers of scores alone, per training",
        "a server could ask for the loss of any head, as often as it likes",
    ),
    "consent": (
        "no round starts without a person's consent (fedvlm deploy consent)",
        "somebody knows that it happens",
    ),
}


def example_policy(methods: tuple[str, ...] = DEFAULT_METHODS) -> str:
    """The policy that `fedvlm deploy init` writes."""
    lines = ["# What this site allows; the server cannot change it. `fedvlm deploy policy` explains."]
    for rule in fields(Policy):
        value = list(methods) if rule.name == "methods" else rule.default
        lines.append(f"{rule.name} = {dumps(value)}  # {RULE_TEXTS[rule.name][0]}")
    return "\n".join(lines) + "\n"


def explain_policy(policy: Policy) -> list[str]:
    """A line or two for each rule."""
    out = []
    for name, (meaning, benefit) in RULE_TEXTS.items():
        value = getattr(policy, name)
        if name == "methods":
            value = "all" if ALL_METHODS in value else ", ".join(value) or "none: nothing is answered"
        usual = "" if name == "methods" or value == getattr(Policy(), name) else " (not the usual)"
        out.append(f"{name} = {_yes_no(value)}{usual}: {meaning}.\n    Why: {benefit}.")
    if policy.score_detail == "none":
        out.append("No scores of this site's rows are told.")
    else:
        out.append(f"Scores of this site's rows are told, {policy.score_detail}.")
    return out


def describe_spending(account: PrivacyBudget, policy: Policy) -> list[str]:
    """What has left by the ledger, beside what may."""
    if account.broken:
        return ["The ledger was changed: no request is answered until it is whole again."]
    out = [
        f"So far: {len(account.trainings)} of {policy.trainings} trainings, "
        f"{account.rounds.total()} of {policy.all_rounds} rounds."
    ]
    for key in sorted(account.trainings):
        spent = account.noise_spent.get(key, 0.0)
        eps = f", ε = {account.epsilon(policy.delta, key):.3g}" if spent else ""
        out.append(
            f"    training {key}: {account.rounds[key]} of {policy.rounds} rounds, "
            f"{account.measurements[key]} of {policy.measures} measurements{eps}"
        )
    if any(account.noise_spent.values()):
        limit = f" of {policy.epsilon:g}" if policy.epsilon else ""
        out.append(f"ε of all uploads with noise: {account.epsilon(policy.delta):.3g}{limit}.")
    return out


def _yes_no(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


DEFAULT_POLICY_TEXT = example_policy()
