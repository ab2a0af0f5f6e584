"""Train a method on several findings per image: one binary problem for each finding.

The method itself sees two classes, "no FINDING" and "FINDING". The tensors of all findings are stacked along a first
axis, so that a federation of findings sends, stores and sums them like those of any other method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import (
    ClassStatistics,
    Client,
    Conditioned,
    Described,
    Frozen,
    Method,
    Noisy,
    StateBounded,
    Tensors,
    Totalled,
    Traits,
    as_stacked,
    upload_sum,
)
from fedvlm.errors import SettingsError
from fedvlm.parts.bodies import adapts

SINGLE_PREFIX = "finding "  # of a tensor that not all findings have in one shape
Means = Mapping[str, tuple[Tensor, Tensor]]


def check_multi_label(method: Method) -> None:
    """Refuse a method that cannot train several findings per image."""
    if not method.traits.classes.multi_label:
        problem = f"{method.name} gives every image exactly one class, and these data have several findings per image"
        raise SettingsError(f"{problem}; `fedvlm list methods` shows the methods for several findings")


def finding_frozen(frozen: Frozen, finding: int) -> Frozen:
    """Return what is frozen for one finding: two classes, without and with it."""
    text, tower = frozen.text, frozen.text_tower
    name = frozen.classes[finding]
    if text is not None and frozen.negative_text is not None:
        text = torch.stack([frozen.negative_text[finding], text[finding]])
    if tower is not None:  # made for "no FINDING", "FINDING" of each finding in turn
        part = slice(2 * finding, 2 * finding + 2)
        tower = replace(tower, suffixes=tower.suffixes[part], ends=tower.ends[part], cache={})  # type: ignore[type-var]
    none: dict[str, Any] = {"descriptions": None, "negative_text": None, "multi_label": False}
    return replace(frozen, classes=(f"no {name}", name), text=text, text_tower=tower, **none)


def finding_client(client: Client, finding: int) -> Client:
    """Return a client with the labels of one finding; samples whose label is unknown are in no minibatch.

    A sample changes the statistics of all findings, so that their common sensitivity, and with it the noise of each,
    is larger by the root of their number.
    """
    n_findings, y, val_y = client.y.shape[-1], client.y[..., finding], client.val_y[..., finding]
    width = client.noise.shape[-1] // n_findings
    noise = n_findings**0.5 * client.noise[..., finding * width : (finding + 1) * width]
    flat = client.order.clamp(min=0).flatten(-2)
    known = y.gather(-1, flat).reshape(client.order.shape) >= 0
    order = torch.where(known, client.order, -1)
    return replace(client, y=y, val_y=val_y, order=order, texts=client.texts[..., :2, :0, :], noise=noise)


def _states(frozen: Frozen, sent: Tensors, local: Tensors) -> list[tuple[Frozen, Tensors, Tensors]]:
    """Return what is frozen, sent and local of each finding."""
    findings = range(len(frozen.classes))
    return [(finding_frozen(frozen, k), select_finding(sent, k), select_finding(local, k)) for k in findings]


def per_finding(method: Method) -> Method:
    """Return the method as it trains all findings of `frozen.classes`, each as a binary problem."""
    check_multi_label(method)
    verbs: dict[str, Any] = dict(vars(_Verbs))
    for protocol, names in (
        (Described, ("describe",)),
        (Conditioned, ("condition",)),
        (ClassStatistics, ("covered_classes", "class_means")),
        (Totalled, ("to_means", "from_means")),
        (Noisy, ("noise",)),
        (StateBounded, ("check_state",)),
    ):
        if not isinstance(method, protocol):
            for name in names:
                del verbs[name]
    if not adapts(method):
        del verbs["adapt"]
    if as_stacked(method) is None:
        del verbs["update_many"]
    members: dict[str, Any] = {name: verb for name, verb in verbs.items() if not name.startswith("__")}
    members["__reduce__"] = lambda self: (per_finding, (_single(self),))  # to worker processes
    kind = type(type(method).__name__, (type(method),), members)
    out: Method = object.__new__(kind)
    out.__dict__.update(vars(method))
    return out


class _Verbs:
    """The verbs of a method over several findings."""

    @cached_property
    def single(self) -> Any:
        """Return the method of one finding, with the settings of this one."""
        settings: Any = self
        return type(self).__mro__[1](**{field.name: getattr(self, field.name) for field in fields(settings)})

    @property
    def traits(self) -> Traits:
        traits: Traits = _single(self).traits
        return replace(traits, privacy=replace(traits.privacy, upload_sum=upload_sum(_single(self))))

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        pairs = [_single(self).init(finding_frozen(frozen, finding)) for finding in range(len(frozen.classes))]
        return _stack([shared for shared, _ in pairs]), _stack([local for _, local in pairs])

    def send(self, shared: Tensors, id: str) -> Tensors:
        return _stack([_single(self).send(part, id) for part in _unstack(shared)])

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        states = enumerate(_states(frozen, sent, local))
        pairs = [_single(self).update(*state, finding_client(client, finding)) for finding, state in states]
        return _stack([upload for upload, _ in pairs]), _stack([new_local for _, new_local in pairs])

    def update_many(self, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
        states = enumerate(_states(frozen, _clients_first(sent), _clients_first(local)))
        pairs = [_single(self).update_many(*state, finding_client(clients, finding)) for finding, state in states]
        uploads, locals_ = (_stack([pair[which] for pair in pairs]) for which in (0, 1))
        return _clients_first(uploads), _clients_first(locals_)

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        by_finding = zip(_unstack(shared), *map(_unstack, uploads), strict=True)
        return _stack([_single(self).aggregate(part, parts, weights, ids) for part, *parts in by_finding])

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        states = enumerate(_states(frozen, sent, local))
        return _stack([_single(self).adapt(*state, finding_client(client, finding)) for finding, state in states])

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        """Return (samples, findings): the log odds of each finding."""
        logits = [_single(self).predict(*state, x) for state in _states(frozen, sent, local)]
        return torch.stack([pair[..., 1] - pair[..., 0] for pair in logits], dim=-1)

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """Return means over the findings."""
        described = [_single(self).describe(*state) for state in _states(frozen, sent, local)]
        return {key: fmean(numbers[key] for numbers in described) for key in described[0]}

    def noise(self, frozen: Frozen) -> int:
        return len(frozen.classes) * int(_single(self).noise(finding_frozen(frozen, 0)))

    def check_state(self, before: Tensors, after: Tensors, members: int) -> None:
        for pair in zip(_unstack(before), _unstack(after), strict=True):
            _single(self).check_state(*pair, members)

    def condition(self, local: Tensors) -> float:
        return max(float(_single(self).condition(part)) for part in _unstack(local))

    def covered_classes(self, upload: Tensors) -> Tensor:
        return torch.stack([_single(self).covered_classes(part).any() for part in _unstack(upload)])

    def class_means(self, upload: Tensors) -> Tensor | None:
        means = [_single(self).class_means(part) for part in _unstack(upload)]
        return None if means[0] is None else torch.stack([pair[1] for pair in means])

    def to_means(self, upload: Tensors, reference_means: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        out: dict[str, tuple[Tensor, Tensor]] = {}
        for finding, part in enumerate(_unstack(upload)):
            prefix = f"{finding} "
            reference = {k.removeprefix(prefix): v for k, v in reference_means.items() if k.startswith(prefix)}
            out |= {prefix + key: pair for key, pair in _single(self).to_means(part, reference).items()}
        return out

    def from_means(self, means: Means) -> Tensors:
        by_finding: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        for key, pair in means.items():
            finding, _, name = key.partition(" ")
            by_finding.setdefault(int(finding), {})[name] = pair
        return _stack([_single(self).from_means(by_finding[finding]) for finding in sorted(by_finding)])


def _single(method: Any) -> Any:
    """Return the method of one finding."""
    return method.single


def _clients_first(stacked: Tensors) -> Tensors:
    """Exchange the axes of findings and clients."""
    return {key: v if key.startswith(SINGLE_PREFIX) else v.transpose(0, 1) for key, v in stacked.items()}


def _stack(parts: Sequence[Tensors]) -> Tensors:
    """Stack the tensors that all findings have in one shape; the others keep a name with the finding's number."""
    shapes = [{key: value.shape for key, value in part.items()} for part in parts]
    regular = [key for key in shapes[0] if all(shape.get(key) == shapes[0][key] for shape in shapes)] if parts else []
    out = {key: torch.stack([part[key] for part in parts]) for key in regular}
    for finding, part in enumerate(parts):
        out |= {f"{SINGLE_PREFIX}{finding} {key}": value for key, value in part.items() if key not in regular}
    return out


def select_finding(stacked: Tensors, finding: int) -> Tensors:
    """Invert `_stack` for one finding."""
    prefix = f"{SINGLE_PREFIX}{finding} "
    out = {key: value[finding] for key, value in stacked.items() if not key.startswith(SINGLE_PREFIX)}
    return out | {key.removeprefix(prefix): value for key, value in stacked.items() if key.startswith(prefix)}


def _unstack(stacked: Tensors) -> list[Tensors]:
    counts = [
        1 + int(key.removeprefix(SINGLE_PREFIX).partition(" ")[0]) if key.startswith(SINGLE_PREFIX) else len(value)
        for key, value in stacked.items()
    ]
    return [select_finding(stacked, finding) for finding in range(max(counts, default=0))]
