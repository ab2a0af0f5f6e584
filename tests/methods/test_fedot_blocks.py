from dataclasses import replace
from typing import Any

import torch

from fedvlm import tensors
from fedvlm.core import Client, Tensors, make
from fedvlm.engines.chunks import pad_clients
from fedvlm.maths import orthogonal
from fedvlm.methods.fedot import select_candidate
from fedvlm.testing import make_test_client
from tests.helpers.fedot_world import frozen, one_by_one, pick, stacked, unit


def searching(seed: int, truth: int, rows: int, wrong: float) -> Client:
    """A client whose rows are off by a map in `truth` blocks, with some training labels wrong."""
    generator = torch.Generator().manual_seed(seed)
    world, size = frozen(dim=32, classes=4), 32 // truth
    assert world.text is not None
    skew = (1.0 if truth > 1 else 0.2) * torch.randn(truth, size, size, generator=generator)
    y = torch.arange(rows + 200) % 4
    noise = torch.randn(len(y), 32, generator=generator) / 32**0.5
    straight = torch.nn.functional.normalize(world.text[y] + noise, dim=1)
    x = orthogonal.rotate(-skew, straight)
    guesses = torch.randint(4, (rows,), generator=generator)
    labels = torch.where(torch.rand(rows, generator=generator) < wrong, guesses, y[:rows])
    order = torch.randint(rows, (2, 8), generator=generator)
    return make_test_client(x[:rows], labels, order, x[rows:], y[rows:])


def after_rounds(method: Any, cohort: Client, rounds: int) -> tuple[Tensors, Tensors]:
    world = frozen(dim=32, classes=4)
    sent, local = (stacked(part, len(cohort.y)) for part in method.init(world))
    for _ in range(rounds):
        upload, local = method.update_many(world, sent, local, cohort)
    return upload, local


def test_clients_choose_few_freedoms_for_few_doubtful_rows_and_many_for_plenty() -> None:
    doubtful = [searching(seed, truth=16, rows=16, wrong=0.5) for seed in range(3)]
    plenty = [searching(seed, truth=1, rows=200, wrong=0.0) for seed in range(3)]
    method = make("fedot", blocks="auto", lr=5e-3, tau=20.0, rounds=80)
    _, local = after_rounds(method, pad_clients(doubtful + plenty), 40)
    assert local["leader"].tolist() == [8, 8, 8, 1, 1, 1]
    world = frozen(dim=32, classes=4)
    description = method.describe(world, *method.init(world)[:1], tensors.select(local, 0))
    assert (description["blocks"], description["degrees of freedom"]) == (8, 48)


def test_the_choice_is_of_the_validation_rows() -> None:
    small_client, plenty = searching(0, 16, 16, 0.5), searching(0, 1, 200, 0.0)
    method = make("fedot", blocks="auto", lr=5e-3, tau=20.0, rounds=80)
    fooled = replace(plenty, val_y=(plenty.val_y + 1) % 4)  # only validation rows differ
    unheld = replace(small_client, val_x=small_client.val_x[:0], val_y=small_client.val_y[:0])
    _, local = after_rounds(method, pad_clients([plenty, fooled, small_client, unheld]), 20)
    assert local["leader"].tolist() == [1, 8, 8, 1]
    trained = [key for key in local if key.startswith("skew")]
    assert all(torch.equal(local[key][0], local[key][1]) for key in trained)


def test_after_the_race_only_the_leader_is_trained() -> None:
    cohort = pad_clients([searching(0, 16, 16, 0.5), searching(0, 1, 200, 0.0)])
    method = make("fedot", blocks="auto", lr=5e-3, tau=20.0, rounds=3)
    world = frozen(dim=32, classes=4)
    upload, local = after_rounds(method, cohort, 2)
    sent = stacked(method.init(world)[0], 2)
    upload, later = method.update_many(world, sent, local, cohort)
    assert torch.equal(later["leader"], local["leader"])
    assert later["age"].tolist() == [3, 3]
    for i, leader in enumerate(local["leader"].tolist()):
        for r in (1, 8):
            moved = not torch.equal(later[f"skew{r}"][i], local[f"skew{r}"][i])
            assert moved == (r == leader)
        lone = make("fedot", blocks=leader, lr=5e-3, tau=20.0)
        leader_local = {"skew": local[f"skew{leader}"][i : i + 1]}
        alone = pad_clients([pick(cohort, i)])
        expected, _ = lone.update_many(world, stacked(method.init(world)[0], 1), leader_local, alone)
        torch.testing.assert_close(upload["head"][i], expected["head"][0])
        x = cohort.val_x[i]
        torch.testing.assert_close(
            method.predict(world, {"head": upload["head"][i]}, tensors.select(later, i), x),
            lone.predict(world, {"head": upload["head"][i]}, {"skew": later[f"skew{leader}"][i]}, x),
            rtol=1e-4,
            atol=1e-4,
        )


def test_race_is_the_same_one_by_one_and_together() -> None:
    cohort = pad_clients([searching(0, 16, 16, 0.5), searching(0, 1, 200, 0.0)])
    method, world = make("fedot", blocks="auto", lr=1e-3, rounds=8), frozen(dim=32, classes=4)
    sent, local = (stacked(part, 2) for part in method.init(world))
    plain, fast = (sent, local), (sent, local)
    for _ in range(3):
        plain = one_by_one(method, world, *plain, cohort)
        fast = method.update_many(world, *fast, cohort)
    assert torch.equal(plain[1]["leader"], fast[1]["leader"])
    assert tensors.max_relative_difference(fast[0], plain[0]) < 1e-5
    assert tensors.max_relative_difference(fast[1], plain[1]) < 1e-5


def test_auto_starts_as_zero_shot_and_sends_only_the_head() -> None:
    world, x = frozen(dim=32, classes=4), unit(20, 32, seed=5)
    method = make("fedot", blocks="auto", tau=100.0)
    shared, local = method.init(world)
    assert set(shared) == {"head"}
    torch.testing.assert_close(method.predict(world, shared, local, x), make("zero-shot").predict(world, {}, {}, x))
    predictions = torch.vmap(lambda client_local: method.predict(world, shared, client_local, x))(stacked(local, 3))
    torch.testing.assert_close(predictions[1], method.predict(world, shared, local, x))


def test_the_map_of_fewest_freedoms_leads_that_is_clearly_worse_in_neither_loss_nor_misses() -> None:
    draw = torch.Generator().manual_seed(0)
    base, noise = torch.rand(40, generator=draw), torch.randn(40, generator=draw)
    chance = base + 0.01 + noise - noise.mean()  # worse by far less than the rows differ
    clear = base + 0.5
    none, few_misses = torch.zeros(40), (torch.arange(40) < 5).float()  # of misses
    cases = [  # three maps' losses, three maps' misses
        ([base, chance, chance], [none, none, none], 2),
        ([base, chance, clear], [none, none, none], 1),
        ([base, chance, chance], [none, none, few_misses], 1),  # as good a loss, but wrong more often
        ([base, clear, clear], [few_misses, none, none], 1),  # no map stands both tests
    ]
    losses = torch.stack([torch.stack(case[0]) for case in cases], 1)
    misses = torch.stack([torch.stack(case[1]) for case in cases], 1)
    real = torch.ones(4, 40, dtype=torch.bool)
    assert select_candidate(losses, misses, real).tolist() == [case[2] for case in cases]


def test_rows_that_are_not_there_and_maps_that_broke_have_no_say() -> None:
    losses = torch.tensor([[[1.0, 2.0, 9.0]], [[5.0, 6.0, 0.0]], [[torch.nan, 0.0, 0.0]]])
    misses = torch.tensor([[[0.0, 0.0, 1.0]], [[1.0, 1.0, 0.0]], [[0.0, 0.0, 0.0]]])
    real = torch.tensor([[True, True, False]])
    assert select_candidate(losses, misses, real).tolist() == [0]


def test_a_map_that_broke_does_not_lead() -> None:
    cohort = pad_clients([searching(0, 16, 16, 0.5)])
    method, world = make("fedot", blocks="auto", lr=1e-3, rounds=8), frozen(dim=32, classes=4)
    sent, local = (stacked(part, 1) for part in method.init(world))
    broken = {**local, "skew8": torch.full_like(local["skew8"], torch.nan)}
    zeros = replace(cohort, val_y=torch.zeros_like(cohort.val_y))  # where argmax of nan would point
    _, after = method.update_many(world, sent, broken, zeros)
    assert after["leader"].tolist() == [1]
