from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedvlm import parts, tensors
from fedvlm.core import Client, Frozen, Tensors, make
from fedvlm.errors import SettingsError
from fedvlm.maths import cayley, cayley_steps, conflict

torch.set_num_threads(1)
DIM, CLASSES = 64, 3
FAMILY = ["fedot", "fedlt", "fedadapter", "fedot-all-global", "fedot-all-local"]


def unit(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def frozen(dim: int = DIM, classes: int = CLASSES, seed: int = 0) -> Frozen:
    names = tuple(f"class {k}" for k in range(classes))
    return Frozen(names, dim, 100.0, unit(classes, dim, seed=seed))


def clients(
    world: Frozen, count: int = 3, rows: int = 40, batch: int = 8, steps: int = 10
) -> Client:
    """Stacked clients whose minibatches are full, short or missing."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(rows, (count, steps, batch), generator=generator)
    order[0, 3] = -1  # a step without rows in the middle
    order[-1, steps // 2 :] = -1  # a client with fewer steps
    order[:, 1, 2:] = -1  # a short minibatch, with K > B and K < B
    y = torch.randint(len(world.classes), (count, rows), generator=generator)
    x = unit(count, rows, world.dim, seed=2)
    return Client(x, y, order, x[:, :9], y[:, :9])


def pick(many: Client, index: int) -> Client:
    fields = (many.x, many.y, many.order, many.held_x, many.held_y)
    return Client(*(field[index] for field in fields))


def double(many: Client) -> Client:
    return replace(many, x=many.x.double(), held_x=many.held_x.double())


def stacked(tensors_of_one: Tensors, count: int) -> Tensors:
    return {key: value.expand(count, *value.shape) for key, value in tensors_of_one.items()}


def one_by_one(
    method: Any, world: Frozen, sent: Tensors, local: Tensors, many: Client
) -> tuple[Tensors, Tensors]:
    """The plain update, client after client."""
    done = [
        method.update(world, tensors.select(sent, i), tensors.select(local, i), pick(many, i))
        for i in range(len(many.y))
    ]
    return tensors.stack([up for up, _ in done]), tensors.stack([own for _, own in done])


@pytest.mark.parametrize("name", FAMILY)
def test_round_zero_is_zero_shot(name: str) -> None:
    world, x = frozen(), unit(20, DIM, seed=5)
    method = make(name)
    found = method.predict(world, *method.init(world), x)
    torch.testing.assert_close(found, make("zero-shot").predict(world, {}, {}, x))


@pytest.mark.parametrize("name", FAMILY)
def test_training_lowers_the_loss_and_moves_every_tensor(name: str) -> None:
    world, method = frozen(), make(name, rate=1e-4)
    client = pick(clients(world, steps=40), 1)
    sent, local = method.init(world)
    upload, own = method.update(world, sent, local, client)
    real = client.y >= 0
    before = parts.fit(method.predict(world, sent, local, client.x), client.y, real)
    after = parts.fit(method.predict(world, upload, own, client.x), client.y, real)
    assert after < before - 0.1
    for key, value in {**upload, **own}.items():
        assert not torch.equal(value, {**sent, **local}[key])


def test_only_the_head_leaves_a_client() -> None:
    world, many = frozen(), clients(frozen())
    for name in ("fedot", "fedlt", "fedadapter"):
        method = make(name)
        upload, _ = method.update(world, *method.init(world), pick(many, 0))
        assert list(upload) == ["head"]
        assert tensors.count_bytes(upload) == 4 * CLASSES * DIM


def test_all_global_uploads_the_skew_and_all_local_nothing() -> None:
    world, many = frozen(), clients(frozen())
    method = make("fedot-all-global")
    upload, own = method.update(world, *method.init(world), pick(many, 0))
    assert own == {}
    assert tensors.count_bytes(upload) == 4 * (CLASSES * DIM + DIM * DIM)
    method = make("fedot-all-local")
    upload, own = method.update(world, *method.init(world), pick(many, 0))
    assert upload == {}
    assert set(own) == {"head", "skew"}
    assert method.aggregate({}, [{}, {}], torch.tensor([1.0, 2.0]), ["a", "b"]) == {}


def test_heads_average_uniformly_whatever_the_rows() -> None:
    method = make("fedot")
    uploads = [{"head": torch.full((1, 2), value)} for value in (0.0, 2.0)]
    found = method.aggregate(uploads[0], uploads, torch.tensor([1.0, 9.0]), ["a", "b"])
    assert found["head"].tolist() == [[1.0, 1.0]]


def test_fedlt_and_fedadapter_start_as_the_identity() -> None:
    world = frozen()
    assert torch.equal(make("fedlt").init(world)[1]["map"], torch.eye(DIM))
    assert make("fedadapter").init(world)[1]["up"].abs().max() == 0


@pytest.mark.parametrize("name", ["fedot", "fedot-all-global", "fedot-all-local"])
@pytest.mark.parametrize(
    ("blocks", "classes", "settings"),
    [
        (1, 3, {}),  # the paper's pace: the inverse follows by low rank, K < B
        (1, 20, {}),  # K > B
        (1, 3, {"momentum": 0.0, "decay": 0.0}),
        (1, 3, {"momentum": 0.9, "decay": 0.05}),  # too much for low rank: one inverse per step
        (2, 3, {}),
        (16, 3, {"momentum": 0.9}),
        (64, 3, {}),
    ],
)
def test_fast_path_equals_the_plain_update(
    name: str, blocks: int, classes: int, settings: dict[str, float]
) -> None:
    world = frozen(classes=classes)
    many = clients(world, batch=6)
    method = make(name, blocks=blocks, rate=2e-4, **settings)
    sent, local = (stacked(part, len(many.y)) for part in method.init(world))
    plain = one_by_one(method, world, sent, local, many)
    fast = method.update_many(world, sent, local, many)
    for _ in range(2):  # further rounds, each side from its own results
        plain = one_by_one(method, world, *plain, many)
        fast = method.update_many(world, *fast, many)
    assert tensors.difference(fast[0], plain[0]) < 1e-5
    assert tensors.difference(fast[1], plain[1]) < 1e-5


def test_both_walks_are_tried_above() -> None:
    tiny = cayley_steps.Pace(2e-4, 5e-4, 5e-4, 100.0)
    assert cayley_steps.low_rank_pays(DIM, 3, 6, tiny)
    assert cayley_steps.low_rank_pays(DIM // 2, 3, 6, tiny)
    assert not cayley_steps.low_rank_pays(DIM // 16, 3, 6, tiny)
    assert not cayley_steps.low_rank_pays(DIM, 3, 6, replace(tiny, momentum=0.9))
    assert not cayley_steps.low_rank_pays(DIM, 3, 6, replace(tiny, decay=0.05))


def test_fast_path_stays_with_float64_autograd_for_200_steps() -> None:
    world, method = frozen(), make("fedot", rate=2e-4)
    many = clients(world, count=1, steps=400)
    assert (many.order >= 0).any(-1).sum() == 199
    sent, local = (stacked(part, 1) for part in method.init(world))
    fast = method.update_many(world, sent, local, many)
    exact = [{key: value.double() for key, value in part.items()} for part in (sent, local)]
    oracle = one_by_one(method, world, *exact, double(many))
    assert tensors.difference(fast[0], oracle[0]) < 1e-4
    assert tensors.difference(fast[1], oracle[1]) < 1e-4


def test_map_stays_orthogonal_and_follows_the_oracle_after_2000_steps() -> None:
    world, method = frozen(dim=32), make("fedot", rate=1e-4, momentum=0.0, decay=0.0)
    many = clients(world, count=1, steps=4000)
    sent, local = (stacked(part, 1) for part in method.init(world))
    assert cayley_steps.low_rank_pays(32, CLASSES, 8, cayley_steps.Pace(1e-4, 0, 0, 100))
    _, own = method.update_many(world, sent, local, many)
    assert cayley.orthogonality_error(cayley.orthogonal(own["skew"])) < 1e-5
    exact = [{key: value.double() for key, value in part.items()} for part in (sent, local)]
    _, oracle = method.update_many(world, *exact, double(many))
    assert tensors.difference(own, oracle) < 1e-3


@pytest.mark.parametrize("blocks", [1, 16])
def test_other_clients_and_padding_change_nothing(blocks: int) -> None:
    world, method = frozen(), make("fedot", blocks=blocks)
    many = clients(world)
    sent, local = (stacked(part, 3) for part in method.init(world))
    together = method.update_many(world, sent, local, many)
    steps, batch = many.order.shape[1:]
    wider = replace(
        many,
        x=torch.cat([many.x, torch.zeros_like(many.x)], 1),
        y=torch.cat([many.y, torch.full_like(many.y, -1)], 1),
        order=torch.nn.functional.pad(many.order, (0, batch, 0, steps), value=-1),
    )
    padded = method.update_many(world, sent, local, wider)
    for i in range(3):
        own = Client(*(field[None] for field in vars(pick(many, i)).values()))
        alone = method.update_many(
            world, stacked(method.init(world)[0], 1), local_of(local, i), own
        )
        for a, b, c in zip(together, alone, padded, strict=True):
            assert tensors.difference(tensors.select(a, i), tensors.select(b, 0)) < 1e-5
            assert tensors.difference(tensors.select(a, i), tensors.select(c, i)) < 1e-5


def test_arguments_are_not_mutated_and_no_rows_change_nothing() -> None:
    world, method = frozen(), make("fedot")
    many = clients(world)
    sent, local = (tensors.stack([part] * 3) for part in method.init(world))
    _, local = method.update_many(world, sent, local, many)
    kept_sent, kept_local = tensors.copy(sent), tensors.copy(local)
    method.update_many(world, sent, local, many)
    empty = replace(many, order=torch.full_like(many.order, -1))
    for settings in ({}, {"momentum": 0.9}):
        upload, own = make("fedot", **settings).update_many(world, sent, local, empty)
        for new, old, kept in ((upload, sent, kept_sent), (own, local, kept_local)):
            assert all(torch.equal(new[key], kept[key]) for key in kept)
            assert all(torch.equal(old[key], kept[key]) for key in kept)
            assert not any(value.is_inference() for value in new.values())


def test_maps_are_described_by_the_numbers_of_the_paper() -> None:
    world, many = frozen(), clients(frozen())
    for name, freedom in (("fedot", DIM * (DIM // 4 - 1) // 2), ("fedlt", DIM**2)):
        method = make(name, rate=1e-3, **({"blocks": 4} if name == "fedot" else {}))
        upload, own = method.update(world, *method.init(world), pick(many, 1))
        found = method.describe(world, upload, own)
        assert found["degrees of freedom"] == freedom
        assert (found["condition number"] < 1.00001) == (name == "fedot")
        assert (found["orthogonality error"] < 1e-5) == (name == "fedot")


def test_gradient_difference_stays_under_its_bound() -> None:
    world, many = frozen(), clients(frozen(), steps=5)
    method = make("fedot")
    sent, local = method.init(world)
    ends = [method.update(world, sent, local, pick(many, i))[0]["head"] for i in range(3)]
    steps = (many.order >= 0).any(-1).sum(1).tolist()
    found = conflict.largest_difference(sent["head"], ends, steps, method.rate)
    assert 0 < found < conflict.difference_bound(method.tau, [1.0, 1.0, 1.0])


def test_blocks_that_do_not_divide_are_refused_before_any_work() -> None:
    for name in ("fedot", "fedot-all-global", "fedot-all-local"):
        with pytest.raises(SettingsError, match=r"blocks = 5 .* choose one of 1, 2, 4, 8"):
            make(name, blocks=5).init(frozen())


def test_a_head_from_text_needs_text() -> None:
    with pytest.raises(SettingsError, match="head = 'random'"):
        make("fedot").init(replace(frozen(), text=None))


def searching(seed: int, truth: int, rows: int, wrong: float) -> Client:
    """A client whose rows are off by a map in `truth` blocks, with some training labels wrong."""
    generator = torch.Generator().manual_seed(seed)
    world, size = frozen(dim=32, classes=4), 32 // truth
    assert world.text is not None
    skew = (1.0 if truth > 1 else 0.2) * torch.randn(truth, size, size, generator=generator)
    y = torch.arange(rows + 200) % 4
    noise = torch.randn(len(y), 32, generator=generator) / 32**0.5
    straight = torch.nn.functional.normalize(world.text[y] + noise, dim=1)
    x = cayley.rotate(-skew, straight)
    guesses = torch.randint(4, (rows,), generator=generator)
    labels = torch.where(torch.rand(rows, generator=generator) < wrong, guesses, y[:rows])
    order = torch.randint(rows, (2, 8), generator=generator)
    return Client(x[:rows], labels, order, x[rows:], y[rows:])


def stack_clients(several: list[Client]) -> Client:
    """Clients of unequal length, padded as an engine pads them."""
    padded = []
    for name in ("x", "y", "order", "held_x", "held_y"):
        values = [getattr(client, name) for client in several]
        fill = 0.0 if name in ("x", "held_x") else -1
        padded.append(torch.nn.utils.rnn.pad_sequence(values, True, fill))
    return Client(*padded)


def after_rounds(method: Any, many: Client, rounds: int) -> tuple[Tensors, Tensors]:
    world = frozen(dim=32, classes=4)
    sent, local = (stacked(part, len(many.y)) for part in method.init(world))
    for _ in range(rounds):
        upload, local = method.update_many(world, sent, local, many)
    return upload, local


def test_clients_choose_few_freedoms_for_few_doubtful_rows_and_many_for_plenty() -> None:
    doubtful = [searching(seed, truth=16, rows=16, wrong=0.5) for seed in range(3)]
    plenty = [searching(seed, truth=1, rows=200, wrong=0.0) for seed in range(3)]
    method = make("fedot", blocks="auto", rate=5e-3, tau=20.0, rounds=80)
    _, local = after_rounds(method, stack_clients(doubtful + plenty), 20)
    assert local["leader"].tolist() == [16, 16, 16, 1, 1, 1]
    world = frozen(dim=32, classes=4)
    found = method.describe(world, *method.init(world)[:1], tensors.select(local, 0))
    assert (found["blocks"], found["degrees of freedom"]) == (16, 16)


def test_the_choice_is_of_the_validation_rows() -> None:
    few, plenty = searching(0, 16, 16, 0.5), searching(0, 1, 200, 0.0)
    method = make("fedot", blocks="auto", rate=5e-3, tau=20.0, rounds=80)
    fooled = replace(plenty, held_y=(plenty.held_y + 1) % 4)  # only validation rows differ
    unheld = replace(few, held_x=few.held_x[:0], held_y=few.held_y[:0])
    _, local = after_rounds(method, stack_clients([plenty, fooled, few, unheld]), 20)
    assert local["leader"].tolist() == [1, 16, 16, 1]
    trained = [key for key in local if key.startswith("skew")]
    assert all(torch.equal(local[key][0], local[key][1]) for key in trained)


def test_after_the_race_only_the_leader_is_trained() -> None:
    many = stack_clients([searching(0, 16, 16, 0.5), searching(0, 1, 200, 0.0)])
    method = make("fedot", blocks="auto", rate=5e-3, tau=20.0, rounds=8)
    world = frozen(dim=32, classes=4)
    upload, local = after_rounds(method, many, 2)
    sent = stacked(method.init(world)[0], 2)
    upload, later = method.update_many(world, sent, local, many)
    assert torch.equal(later["leader"], local["leader"])
    assert later["age"].tolist() == [3, 3]
    for i, leader in enumerate(local["leader"].tolist()):
        for r in (1, 4, 16):
            moved = not torch.equal(later[f"skew{r}"][i], local[f"skew{r}"][i])
            assert moved == (r == leader)
        lone = make("fedot", blocks=leader, rate=5e-3, tau=20.0)
        own = {"skew": local[f"skew{leader}"][i : i + 1]}
        alone = stack_clients([pick(many, i)])
        wanted, _ = lone.update_many(world, stacked(method.init(world)[0], 1), own, alone)
        torch.testing.assert_close(upload["head"][i], wanted["head"][0])
        x = many.held_x[i]
        torch.testing.assert_close(
            method.predict(world, {"head": upload["head"][i]}, tensors.select(later, i), x),
            lone.predict(
                world, {"head": upload["head"][i]}, {"skew": later[f"skew{leader}"][i]}, x
            ),
            rtol=1e-4,
            atol=1e-4,
        )


def test_race_is_the_same_one_by_one_and_together() -> None:
    many = stack_clients([searching(0, 16, 16, 0.5), searching(0, 1, 200, 0.0)])
    method, world = make("fedot", blocks="auto", rate=1e-3, rounds=8), frozen(dim=32, classes=4)
    sent, local = (stacked(part, 2) for part in method.init(world))
    plain, fast = (sent, local), (sent, local)
    for _ in range(3):
        plain = one_by_one(method, world, *plain, many)
        fast = method.update_many(world, *fast, many)
    assert torch.equal(plain[1]["leader"], fast[1]["leader"])
    assert tensors.difference(fast[0], plain[0]) < 1e-5
    assert tensors.difference(fast[1], plain[1]) < 1e-5


def test_auto_starts_as_zero_shot_and_sends_only_the_head() -> None:
    world, x = frozen(dim=32, classes=4), unit(20, 32, seed=5)
    method = make("fedot", blocks="auto", tau=100.0)
    shared, local = method.init(world)
    assert set(shared) == {"head"}
    torch.testing.assert_close(
        method.predict(world, shared, local, x), make("zero-shot").predict(world, {}, {}, x)
    )
    every = torch.vmap(lambda own: method.predict(world, shared, own, x))(stacked(local, 3))
    torch.testing.assert_close(every[1], method.predict(world, shared, local, x))
