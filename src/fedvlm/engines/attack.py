"""Clients that mean harm, in a simulation: what they upload in place of what they have learnt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedvlm import seeds
from fedvlm.channel.compare import Round
from fedvlm.core import Tensors, sums
from fedvlm.engines.attackers import Attack, attackers
from fedvlm.engines.client import Answers, Task, Terms, World


def mislabelled(world: World, ids: Sequence[str]) -> World:
    """Under label-flip, attackers' training rows of class c count as of the last class but c."""
    attack = world.attack
    if attack is None or attack.kind != "label-flip":
        return world
    y = world.y.clone()
    for id in sorted(attackers(attack, ids, world.seed)):
        rows = torch.from_numpy(world.members[id].train)
        order = torch.randperm(len(rows), generator=seeds.generator("flipped", world.seed, id))
        rows = rows[order[: round(attack.force * len(rows))]]
        y[rows] = len(world.frozen.classes) - 1 - y[rows]
    return replace(world, y=y)


def attacked(
    terms: Terms, ids: Sequence[str], number: int, tasks: Sequence[Task], answers: Answers
) -> Answers:
    """The round's answers with the attackers' uploads in the place of theirs.

    `ids` are all that train. Who colludes knows the uploads of all others.
    """
    attack = terms.attack
    there = [task for task in tasks if task.id in answers.done and answers.done[task.id].upload]
    bad = set() if attack is None else attackers(attack, ids, terms.seed)
    if attack is None or attack.kind == "label-flip" or not bad & {task.id for task in there}:
        return answers
    done = dict(answers.done)
    uploads = [done[task.id].upload or {} for task in there]
    rows = torch.tensor([float(done[task.id].rows) for task in there])
    kind = sums(terms.method) or "clients"
    if attack.kind == "collude":
        honest = [i for i, task in enumerate(there) if task.id not in bad]
        others = Round(
            terms.method,
            kind,
            [uploads[i] for i in honest],
            [there[i].sent for i in honest],
            rows[honest],
        )
        spread = _spread(others, attack.force) if honest else {}
    for place, task in enumerate(there):
        if task.id in bad:
            now = Round(terms.method, kind, [uploads[place]], [task.sent], rows[place : place + 1])
            moved = {key: values[0] for key, values, _ in now.stacks()}
            if attack.kind == "collude":
                moved = spread or moved
            else:
                draw = seeds.generator("attack", terms.seed, task.id, number)
                moved = _lied(moved, attack, draw)
            done[task.id] = replace(done[task.id], upload=_upload(now, moved))
    return replace(answers, done=done)


def _spread(others: Round, force: float) -> Tensors:
    """A little is enough: the others' mean, less some of their deviations, number by number."""
    out = {}
    for key, values, _ in others.stacks():
        values = values.double()
        middle = values.mean(0)
        out[key] = middle - force * (values - middle).square().mean(0).sqrt()
    return out


def _lied(moved: Mapping[str, Tensor], attack: Attack, draw: torch.Generator) -> Tensors:
    if attack.kind == "noise":  # of the change's own length, times the strength
        count = sum(value.numel() for value in moved.values())
        length = sum(float(value.double().square().sum()) for value in moved.values()) ** 0.5
        each = attack.force * length / max(count, 1) ** 0.5
        return {
            key: value + each * torch.randn(value.shape, generator=draw)
            for key, value in moved.items()
        }
    sign = -1.0 if attack.kind == "sign-flip" else 1.0
    return {key: sign * attack.force * value for key, value in moved.items()}


def _upload(now: Round, moved: Mapping[str, Tensor]) -> Tensors:
    """An upload of these changes, of the types and shapes that an honest one has."""
    upload = now.uploads[0]
    if now.kind == "total":
        said = now.said(0)
        whole = now.whole({key: (moved[key], rows) for key, (_, rows) in said.items()})
        return {**upload, **{key: _typed(value, upload[key]) for key, value in whole.items()}}
    first = {key: now.first(0, key) for key in upload}
    return {
        key: _typed(first[key] + moved[key].reshape(first[key].shape), one)
        for key, one in upload.items()
    }


def _typed(value: Tensor, like: Tensor) -> Tensor:
    if like.is_floating_point():
        return value.to(like.dtype)
    if like.dtype == torch.bool:
        return value > 0
    limits = torch.iinfo(like.dtype)
    return value.double().round().clamp(limits.min, limits.max).to(like.dtype)
