from dataclasses import replace

import pytest
import torch

from fedvlm import parts, tensors
from fedvlm.core import Client, make
from fedvlm.errors import SettingsError
from fedvlm.maths import client_drift, orthogonal
from tests.helpers.fedot_world import CLASSES, DIM, clients, double, frozen, one_by_one, pick, stacked, unit

FAMILY = ["fedot", "fedlt", "fedadapter", "fedot-all-global", "fedot-all-local"]


@pytest.mark.parametrize("name", FAMILY)
def test_round_zero_is_zero_shot(name: str) -> None:
    world, x = frozen(), unit(20, DIM, seed=5)
    method = make(name)
    actual = method.predict(world, *method.init(world), x)
    torch.testing.assert_close(actual, make("zero-shot").predict(world, {}, {}, x))


@pytest.mark.parametrize("name", FAMILY)
def test_training_lowers_the_loss_and_moves_every_tensor(name: str) -> None:
    world, method = frozen(), make(name, lr=1e-4)
    client = pick(clients(world, steps=40), 1)
    sent, local = method.init(world)
    upload, new_local = method.update(world, sent, local, client)
    real = client.y >= 0
    before = parts.masked_cross_entropy(method.predict(world, sent, local, client.x), client.y, real)
    after = parts.masked_cross_entropy(method.predict(world, upload, new_local, client.x), client.y, real)
    assert after < before - 0.1
    for key, value in {**upload, **new_local}.items():
        assert not torch.equal(value, {**sent, **local}[key])


def test_only_the_head_leaves_a_client() -> None:
    world, cohort = frozen(), clients(frozen())
    for name in ("fedot", "fedlt", "fedadapter"):
        method = make(name)
        upload, _ = method.update(world, *method.init(world), pick(cohort, 0))
        assert list(upload) == ["head"]
        assert tensors.count_bytes(upload) == 4 * CLASSES * DIM


def test_all_global_uploads_the_skew_and_all_local_nothing() -> None:
    world, cohort = frozen(), clients(frozen())
    method = make("fedot-all-global")
    upload, new_local = method.update(world, *method.init(world), pick(cohort, 0))
    assert new_local == {}
    assert tensors.count_bytes(upload) == 4 * (CLASSES * DIM + DIM * DIM)
    method = make("fedot-all-local")
    upload, new_local = method.update(world, *method.init(world), pick(cohort, 0))
    assert upload == {}
    assert set(new_local) == {"head", "skew"}
    assert method.aggregate({}, [{}, {}], torch.tensor([1.0, 2.0]), ["a", "b"]) == {}


def test_heads_average_uniformly_whatever_the_rows() -> None:
    method = make("fedot")
    uploads = [{"head": torch.full((1, 2), value)} for value in (0.0, 2.0)]
    actual = method.aggregate(uploads[0], uploads, torch.tensor([1.0, 9.0]), ["a", "b"])
    assert actual["head"].tolist() == [[1.0, 1.0]]


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
        (1, 3, {"momentum": 0.0, "weight_decay": 0.0}),
        (
            1,
            3,
            {"momentum": 0.9, "weight_decay": 0.05},
        ),  # too much for low rank: one inverse per step
        (2, 3, {}),
        (16, 3, {"momentum": 0.9}),
        (64, 3, {}),
    ],
)
def test_fast_path_equals_the_plain_update(name: str, blocks: int, classes: int, settings: dict[str, float]) -> None:
    world = frozen(classes=classes)
    cohort = clients(world, batch=6)
    method = make(name, blocks=blocks, lr=2e-4, **settings)
    sent, local = (stacked(part, len(cohort.y)) for part in method.init(world))
    plain = one_by_one(method, world, sent, local, cohort)
    fast = method.update_many(world, sent, local, cohort)
    for _ in range(2):  # further rounds, each side from its own results
        plain = one_by_one(method, world, *plain, cohort)
        fast = method.update_many(world, *fast, cohort)
    assert tensors.max_relative_difference(fast[0], plain[0]) < 1e-5
    assert tensors.max_relative_difference(fast[1], plain[1]) < 1e-5


@pytest.mark.parametrize("blocks", [1, 16])
def test_fast_path_takes_rows_of_half_precision(blocks: int) -> None:
    world, method = frozen(classes=3), make("fedot", blocks=blocks)
    cohort = clients(world, batch=6)
    cohort = replace(cohort, x=cohort.x.half(), reference=cohort.reference.half())
    sent, local = (stacked(part, len(cohort.y)) for part in method.init(world))
    plain = one_by_one(method, world, sent, local, cohort)
    fast = method.update_many(world, sent, local, cohort)
    assert tensors.max_relative_difference(fast[0], plain[0]) < 1e-5


def test_both_walks_are_tried_above() -> None:
    tiny = orthogonal.SgdStep(2e-4, 5e-4, 5e-4, 100.0)
    assert orthogonal.is_low_rank_faster(DIM, 3, 6, tiny)
    assert orthogonal.is_low_rank_faster(DIM // 2, 3, 6, tiny)
    assert not orthogonal.is_low_rank_faster(DIM // 16, 3, 6, tiny)
    assert not orthogonal.is_low_rank_faster(DIM, 3, 6, replace(tiny, momentum=0.9))
    assert not orthogonal.is_low_rank_faster(DIM, 3, 6, replace(tiny, weight_decay=0.05))


@pytest.mark.parametrize("classes", [3, 20])  # fewer and more than rows in a minibatch
def test_fast_path_stays_with_float64_autograd_for_200_steps(classes: int) -> None:
    world, method = frozen(classes=classes), make("fedot", lr=2e-4)
    cohort = clients(world, count=1, steps=400)
    assert (cohort.order >= 0).any(-1).sum() == 199
    sent, local = (stacked(part, 1) for part in method.init(world))
    fast = method.update_many(world, sent, local, cohort)
    exact = [{key: value.double() for key, value in part.items()} for part in (sent, local)]
    oracle = one_by_one(method, world, *exact, double(cohort))
    assert tensors.max_relative_difference(fast[0], oracle[0]) < 1e-4
    assert tensors.max_relative_difference(fast[1], oracle[1]) < 1e-4


def test_map_stays_orthogonal_and_follows_the_oracle_after_2000_steps() -> None:
    world, method = frozen(dim=32), make("fedot", lr=1e-4, momentum=0.0, weight_decay=0.0)
    cohort = clients(world, count=1, steps=4000)
    sent, local = (stacked(part, 1) for part in method.init(world))
    assert orthogonal.is_low_rank_faster(32, CLASSES, 8, orthogonal.SgdStep(1e-4, 0, 0, 100))
    _, new_local = method.update_many(world, sent, local, cohort)
    assert orthogonal.orthogonality_error(orthogonal.orthogonal(new_local["skew"])) < 1e-5
    exact = [{key: value.double() for key, value in part.items()} for part in (sent, local)]
    _, oracle = method.update_many(world, *exact, double(cohort))
    assert tensors.max_relative_difference(new_local, oracle) < 1e-3


@pytest.mark.parametrize("blocks", [1, 16])
def test_other_clients_and_padding_change_nothing(blocks: int) -> None:
    world, method = frozen(), make("fedot", blocks=blocks)
    cohort = clients(world)
    sent, local = (stacked(part, 3) for part in method.init(world))
    stacked_result = method.update_many(world, sent, local, cohort)
    steps, batch = cohort.order.shape[1:]
    wider = replace(
        cohort,
        x=torch.cat([cohort.x, torch.zeros_like(cohort.x)], 1),
        y=torch.cat([cohort.y, torch.full_like(cohort.y, -1)], 1),
        order=torch.nn.functional.pad(cohort.order, (0, batch, 0, steps), value=-1),
    )
    padded = method.update_many(world, sent, local, wider)
    for i in range(3):
        single = Client(*(field[None] for field in vars(pick(cohort, i)).values()))
        first = (stacked(part, 1) for part in method.init(world))
        alone = method.update_many(world, *first, single)
        for a, b, c in zip(stacked_result, alone, padded, strict=True):
            assert tensors.max_relative_difference(tensors.select(a, i), tensors.select(b, 0)) < 1e-5
            assert tensors.max_relative_difference(tensors.select(a, i), tensors.select(c, i)) < 1e-5


def test_arguments_are_not_mutated_and_no_rows_change_nothing() -> None:
    world, method = frozen(), make("fedot")
    cohort = clients(world)
    sent, local = (tensors.stack([part] * 3) for part in method.init(world))
    _, local = method.update_many(world, sent, local, cohort)
    kept_sent, kept_local = tensors.copy(sent), tensors.copy(local)
    method.update_many(world, sent, local, cohort)
    empty = replace(cohort, order=torch.full_like(cohort.order, -1))
    for settings in ({}, {"momentum": 0.9}):
        upload, new_local = make("fedot", **settings).update_many(world, sent, local, empty)
        for new, old, original in ((upload, sent, kept_sent), (new_local, local, kept_local)):
            assert all(torch.equal(new[key], original[key]) for key in original)
            assert all(torch.equal(old[key], original[key]) for key in original)
            assert not any(value.is_inference() for value in new.values())


def test_maps_are_described_by_the_numbers_of_the_paper() -> None:
    world, cohort = frozen(), clients(frozen())
    for name, freedom in (("fedot", DIM * (DIM // 4 - 1) // 2), ("fedlt", DIM**2)):
        method = make(name, lr=1e-3, **({"blocks": 4} if name == "fedot" else {}))
        upload, new_local = method.update(world, *method.init(world), pick(cohort, 1))
        description = method.describe(world, upload, new_local)
        assert description["degrees of freedom"] == freedom
        assert (description["condition number"] < 1.00001) == (name == "fedot")
        assert (description["orthogonality error"] < 1e-5) == (name == "fedot")


def test_gradient_difference_stays_under_its_bound() -> None:
    world, cohort = frozen(), clients(frozen(), steps=5)
    method = make("fedot")
    sent, local = method.init(world)
    ends = [method.update(world, sent, local, pick(cohort, i))[0]["head"] for i in range(3)]
    steps = (cohort.order >= 0).any(-1).sum(1).tolist()
    difference = client_drift.largest_gradient_difference(sent["head"], ends, steps, method.lr)
    assert 0 < difference < client_drift.gradient_difference_bound(method.tau, [1.0, 1.0, 1.0])


def test_blocks_that_do_not_divide_are_refused_before_any_work() -> None:
    for name in ("fedot", "fedot-all-global", "fedot-all-local"):
        with pytest.raises(SettingsError, match=r"blocks = 5 .* choose one of 1, 2, 4, 8"):
            make(name, blocks=5).init(frozen())


def test_a_head_from_text_needs_text() -> None:
    with pytest.raises(SettingsError, match="head = 'random'"):
        make("fedot").init(replace(frozen(), text=None))
