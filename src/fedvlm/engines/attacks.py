"""Simulate attacks: what malicious clients upload in place of their updates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel.outliers import UploadRound
from fedvlm.core import Tensors, upload_sum
from fedvlm.engines.client import Attack, RoundReplies, Task, TrainingTerms, World, choose_attackers


def flip_labels(world: World, ids: Sequence[str]) -> World:
    """Under label-flip, relabel attackers' training samples of class c as class (classes - 1 - c)."""
    attack = world.attack
    if attack is None or attack.kind != "label-flip":
        return world
    y = world.y.clone()
    for id in sorted(choose_attackers(attack, ids, world.seed)):
        rows = torch.from_numpy(world.members[id].train)
        order = torch.randperm(len(rows), generator=seeds.generator("flipped", world.seed, id))
        rows = rows[order[: round(attack.effective_strength * len(rows))]]
        y[rows] = len(world.frozen.classes) - 1 - y[rows]
    return replace(world, y=y)


def apply_attack(
    terms: TrainingTerms, ids: Sequence[str], number: int, tasks: Sequence[Task], answers: RoundReplies
) -> RoundReplies:
    """Replace the uploads of attackers among all training clients `ids`; colluding ones know all other uploads."""
    attack = terms.attack
    uploading_tasks = [task for task in tasks if task.id in answers.replies and answers.replies[task.id].upload]
    attacker_ids = set() if attack is None else choose_attackers(attack, ids, terms.seed)
    if attack is None or attack.kind == "label-flip" or not attacker_ids & {task.id for task in uploading_tasks}:
        return answers
    done = dict(answers.replies)
    uploads = [done[task.id].upload or {} for task in uploading_tasks]
    rows = torch.tensor([float(done[task.id].rows) for task in uploading_tasks])
    kind = upload_sum(terms.method) or "clients"
    if attack.kind == "collude":
        honest = [i for i, task in enumerate(uploading_tasks) if task.id not in attacker_ids]
        honest_round = UploadRound(
            terms.method, kind, [uploads[i] for i in honest], [uploading_tasks[i].sent for i in honest], rows[honest]
        )
        colluded = _collude(honest_round, attack.effective_strength) if honest else {}
    for place, task in enumerate(uploading_tasks):
        if task.id in attacker_ids:
            upload_round = UploadRound(terms.method, kind, [uploads[place]], [task.sent], rows[place : place + 1])
            change = {key: values[0] for key, values, _ in upload_round.stacks()}
            if attack.kind == "collude":
                change = colluded or change
            else:
                draw = seeds.generator("attack", terms.seed, task.id, number)
                change = _attack_change(change, attack, draw)
            done[task.id] = replace(done[task.id], upload=_upload_from_change(upload_round, change))
    return replace(answers, replies=done)


def _collude(honest_round: UploadRound, force: float) -> Tensors:
    """Return the honest mean minus some standard deviations, value by value (A Little Is Enough)."""
    out = {}
    for key, values, _ in honest_round.stacks():
        values = values.double()
        middle = values.mean(0)
        out[key] = middle - force * (values - middle).square().mean(0).sqrt()
    return out


def _attack_change(change: Mapping[str, Tensor], attack: Attack, draw: torch.Generator) -> Tensors:
    if attack.kind == "noise":  # as long as the change, times the strength
        count = sum(value.numel() for value in change.values())
        length = sum(float(value.double().square().sum()) for value in change.values()) ** 0.5
        std = attack.effective_strength * length / max(count, 1) ** 0.5
        return {key: value + std * torch.randn(value.shape, generator=draw) for key, value in change.items()}
    sign = -1.0 if attack.kind == "sign-flip" else 1.0
    return {key: sign * attack.effective_strength * value for key, value in change.items()}


def _upload_from_change(upload_round: UploadRound, change: Mapping[str, Tensor]) -> Tensors:
    """Return an upload with these changes, of the types and shapes of an honest one."""
    upload = upload_round.uploads[0]
    if upload_round.upload_sum == "total":
        means = upload_round.to_means(0)
        totals = upload_round.from_means({key: (change[key], rows) for key, (_, rows) in means.items()})
        return {**upload, **{key: _cast_like(value, upload[key]) for key, value in totals.items()}}
    first = {key: upload_round.start(0, key) for key in upload}
    return {
        key: _cast_like(first[key] + change[key].reshape(first[key].shape), tensor) for key, tensor in upload.items()
    }


def _cast_like(value: Tensor, like: Tensor) -> Tensor:
    if like.is_floating_point():
        return value.to(like.dtype)
    if like.dtype == torch.bool:
        return value > 0
    limits = torch.iinfo(like.dtype)
    return value.double().round().clamp(limits.min, limits.max).to(like.dtype)
