"""TOFA by the laws of its parts: how rows are split, ordered or missing changes nothing else."""

from dataclasses import replace

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import Frozen, make
from fedvlm.engines.client import make_client
from fedvlm.errors import FedVLMError
from fedvlm.maths import gaussian_classes
from fedvlm.testing import check_method, check_same, make_test_client, toy_world, train_toy

unit = torch.nn.functional.normalize
CLASSES, DIM = 5, 12


def tofa(**settings):
    """Without the rule on small classes, which has tests of its own."""
    return make("tofa", **{"min_class_samples": 1, **settings})


def setting(rows=80, texts=0, seed=0, classes=4, dim=DIM):
    """A frozen encoder, and rows of all its classes but the last."""
    draw = torch.Generator().manual_seed(seed)
    centres = unit(torch.randn(CLASSES, dim, generator=draw) + 1, dim=1)
    y = torch.arange(rows) % classes
    x = unit(centres[y] + 0.25 * torch.randn(rows, dim, generator=draw), dim=1)
    text = unit(centres + 0.1 * torch.randn(CLASSES, dim, generator=draw), dim=1)
    noise = torch.randn(CLASSES, texts, dim, generator=draw)
    descriptions = unit(centres[:, None] + 0.15 * noise, dim=-1) if texts else None
    names = tuple("abcde")
    return Frozen(names, dim, 20.0, text, descriptions=descriptions), x, y


def build_client(x, y, texts=None):
    order = torch.zeros(1, 1, dtype=torch.long)
    whole_client = make_test_client(x, y, order, x[:0], y[:0])
    none = torch.zeros(CLASSES, 0, x.shape[1])
    return replace(whole_client, texts=none if texts is None else texts)


def exchange(method, frozen, clients):
    """Shared tensors after all exchanges, and every client's adapted local tensors."""
    shared, initial_local = method.init(frozen)
    local = {id: initial_local for id in clients}
    for _ in range(method.rounds):
        done = {id: method.update(frozen, method.send(shared, id), local[id], client) for id, client in clients.items()}
        local = {id: new_local for id, (_, new_local) in done.items()}
        uploads = [upload for upload, _ in done.values()]
        shared = method.aggregate(shared, uploads, torch.ones(len(uploads)), list(clients))
    return shared, {
        id: method.adapt(frozen, method.send(shared, id), local[id], client) for id, client in clients.items()
    }


def split_clients(x, y, n_clients, seed=0):
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    parts = order.tensor_split(n_clients)
    return {f"{i}": build_client(x[part], y[part]) for i, part in enumerate(parts)}


VARIANTS = [
    {"text": False},
    {"visual": False},
    {"fusion": False},
    {"rounds": 2},
    {"alpha": 0.0},
    {"calibration": "held-out"},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_part_alone_keeps_the_contract(settings):
    check_method(tofa(**settings))


@pytest.mark.parametrize("rounds", [1, 2])
def test_engines_agree_with_descriptions_and_own_texts(rounds):
    method = tofa(rounds=rounds)
    world = toy_world(method)
    draw = torch.Generator().manual_seed(1)
    descriptions = unit(world.frozen.text[:, None] + 0.1 * torch.randn(4, 5, 16, generator=draw), dim=-1)
    descriptions[2, 3:] = 0
    client_texts = {f"client-{i}": descriptions[:, i : i + 2] * (i != 1) for i in range(4)} if rounds == 2 else {}
    world = replace(world, frozen=replace(world.frozen, descriptions=descriptions), texts=client_texts)
    reference = train_toy(world)
    check_same(train_toy(world, "single"), reference, 1e-5, "single and batched engines differ")
    check_same(train_toy(world, workers=2), reference, 0.0, "workers change the result")


@pytest.mark.parametrize("n_clients", [2, 9, 80])
def test_federated_statistics_are_pooled_ones_however_rows_are_split(n_clients):
    frozen, x, y = setting()
    method = tofa()
    pooled, _ = exchange(method, frozen, split_clients(x, y, 1))
    split, _ = exchange(method, frozen, split_clients(x, y, n_clients))
    visual = ("counts", "means", "scatter", "weight", "bias")
    gap = tensors.max_relative_difference({k: split[k] for k in visual}, {k: pooled[k] for k in visual})
    assert gap < 1e-5


def test_the_wires_fixed_point_predicts_what_float64_does():
    frozen, x, y = setting(400, dim=64)
    shared, _ = exchange(tofa(text=False), frozen, split_clients(x, y, 8))
    moments = gaussian_classes.moments_from_sums(*gaussian_classes.class_sums(x, y, CLASSES))
    rule = gaussian_classes.fit_discriminant(moments, gaussian_classes.ridge(moments, 1.0))
    new = setting(400, dim=64, seed=0)[1].flip(0)
    actual = new @ shared["weight"].mT + shared["bias"]
    exact = rule.logits(new.double())
    assert torch.equal(actual.argmax(1), exact.argmax(1))
    assert ((actual - exact)[:, :4].abs().max() / exact[:, :4].abs().max()) < 1e-4


def test_one_row_per_class_leaves_no_scatter_and_no_confidence():
    """Left out, a class's only row is a miss: the visual classifier is as good as a guess."""
    frozen, x, y = setting(5, classes=5, dim=256)
    clients = {str(i): build_client(x[i : i + 1], y[i : i + 1]) for i in range(5)}
    shared, local = exchange(tofa(), frozen, clients)
    assert (shared["scatter"] == 0).all()
    assert all(local_state["log temperatures"][0] > 4 for local_state in local.values())  # near chance


def test_the_order_of_clients_does_not_matter():
    frozen, x, y = setting(texts=3)
    clients = split_clients(x, y, 6)
    turned = dict(reversed(list(clients.items())))
    a, b = (exchange(tofa(), frozen, clients_in_order) for clients_in_order in (clients, turned))
    assert all(torch.equal(a[0][key], b[0][key]) for key in a[0])
    assert all(torch.equal(a[1]["3"][key], b[1]["3"][key]) for key in a[1]["3"])


def test_without_the_prior_one_client_is_local_discriminant_analysis():
    frozen, x, y = setting()
    method, gda = tofa(alpha=0.0, text=False), make("clip-gda", text=False)
    shared, local = exchange(method, frozen, {"a": build_client(x, y)})
    alone = gda.adapt(frozen, {}, gda.init(frozen)[1], build_client(x, y))
    a = method.predict(frozen, shared, local["a"], x)
    b = gda.predict(frozen, {}, alone, x)
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("n_clients", [1, 4, 20])
@pytest.mark.parametrize("shots", [1, 5])
def test_few_rows_missing_classes_and_clients_of_one_class_are_no_trouble(n_clients, shots):
    """The last class is nobody's; with 4 clients each has one class, with 20 few have any rows."""
    frozen, x, y = setting(4 * shots, texts=2)
    clients = {f"{i}": build_client(x[i::n_clients], y[i::n_clients]) for i in range(n_clients)}
    new, truth = setting(200)[1:]
    for settings in ({}, {"alpha": 0.0}, {"text": False}, {"alpha": 0.5, "fusion": False}):
        method = tofa(**settings)
        shared, local = exchange(method, frozen, clients)
        for local_state in (*local.values(), method.init(frozen)[1]):
            logits = method.predict(frozen, shared, local_state, new)
            assert logits.isfinite().all()
            if not method.text:
                assert not (logits.argmax(1) == 4).any()
        if method.alpha:  # the prior knows all four classes, so every client does
            logits = method.predict(frozen, shared, local["0"], new)
            assert (logits.argmax(1) == truth).float().mean() > 0.6


def test_a_client_that_adapts_beats_the_prior_on_its_own_shift():
    frozen, x, y = setting(400)
    shifts = 1.2 * unit(torch.randn(2, DIM, generator=torch.Generator().manual_seed(4)), dim=1)
    moved = [unit(x + shift * (y[:, None] % 2), dim=1) for shift in shifts]
    clients = {str(i): build_client(rows[:200], y[:200]) for i, rows in enumerate(moved)}
    method = tofa(text=False, alpha=0.3)
    shared, local = exchange(method, frozen, clients)
    initial_local = method.init(frozen)[1]

    def count_correct(local_state):
        logits = method.predict(frozen, shared, local_state, moved[0][200:])
        return (logits.argmax(1) == y[200:]).float().mean()

    assert count_correct(local["0"]) > count_correct(initial_local)


def test_no_descriptions_leave_the_templates_classifier():
    frozen, x, y = setting()
    method = tofa(visual=False)
    shared, local = exchange(method, frozen, split_clients(x, y, 3))
    zero_shot = make("zero-shot").predict(frozen, {}, {}, x)
    assert torch.equal(method.predict(frozen, shared, local["0"], x), zero_shot)


def test_descriptions_that_tell_help_and_misleading_ones_are_weighed_down():
    frozen, x, y = setting(texts=3)
    wrong = frozen.descriptions.clone()
    wrong[:, 2] = frozen.text.roll(1, 0)
    frozen = replace(frozen, descriptions=wrong)
    shared, _ = exchange(tofa(), frozen, split_clients(x, y, 3))
    held = shared["weights"][:4]
    assert (held[:, 3] < held[:, 1]).all()
    assert torch.allclose(shared["weights"].sum(1), torch.ones(CLASSES))
    assert torch.allclose(shared["weights"][4], torch.full((4,), 0.25))  # nobody has that class


def test_own_texts_take_two_exchanges_and_reach_everyone():
    frozen, x, y = setting()
    poor = replace(frozen, text=unit(frozen.text + 3 * torch.ones(DIM) / DIM**0.5, dim=1))
    clients = split_clients(x, y, 3)
    good = unit(gaussian_classes.moments_from_sums(*gaussian_classes.class_sums(x, y, CLASSES)).means.float(), dim=1)[
        :, None
    ]
    clients["1"] = replace(clients["1"], texts=good)
    method = tofa(visual=False, rounds=2)
    shared, _ = exchange(method, poor, clients)
    assert "texts" not in shared
    assert shared["client texts"].abs().sum() > 0
    logits = method.predict(poor, shared, {}, x)
    template = make("zero-shot").predict(poor, {}, {}, x)
    assert (logits.argmax(1) == y).sum() >= (template.argmax(1) == y).sum()
    first, _ = method.update(poor, method.init(poor)[0], {}, clients["1"])
    assert set(first) == {"texts"}
    with pytest.raises(FedVLMError, match="rounds = 2"):
        exchange(tofa(), poor, clients)


def test_an_upload_of_a_hundred_classes_is_below_0_8_megabytes():
    frozen = Frozen(
        tuple(map(str, range(100))), 512, 100.0, torch.ones(100, 512), 0,
        descriptions=torch.ones(100, 50, 512),
    )  # fmt: skip
    method = tofa()
    x = unit(torch.randn(4, 512), dim=1)
    client = replace(build_client(x, torch.arange(4)), texts=torch.zeros(100, 0, 512))
    upload, _ = method.update(frozen, *method.init(frozen), client)
    assert tensors.count_bytes(upload) == 4 * (100 + 51_200 + 131_328 + 5_000 + 100) <= 800_000
    assert all(value.dtype == torch.int32 for value in upload.values())


def test_more_rows_than_the_fixed_point_holds_are_refused():
    frozen, x, y = setting()
    with pytest.raises(FedVLMError, match="max_samples = 80"):
        exchange(tofa(max_samples=79), frozen, {"a": build_client(x, y)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"visual": False, "text": False}, "must not both be false"),
        ({"alpha": 1.5}, "tofa.alpha must be between 0 and 1, got 1.5"),
        ({"shrinkage": 0.0}, "shrinkage"),
        ({"rounds": 3}, "tofa.rounds must be 1, or 2 for clients' own texts, got 3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(FedVLMError, match=message):
        make("tofa", **settings)


def test_an_encoder_without_text_is_refused_with_the_remedy():
    frozen, _, _ = setting()
    for name in ("tofa", "clip-gda"):
        with pytest.raises(FedVLMError, match="set text = false"):
            make(name).init(replace(frozen, text=None))
        make(name, text=False).init(replace(frozen, text=None))


@pytest.mark.parametrize("name", ["clip-gda", "tip-adapter"])
def test_local_baselines_send_nothing_and_beat_zero_shot_at_home(name):
    world = toy_world(make(name))
    outcome = train_toy(world)
    zero_shot = train_toy(replace(world, method=make("zero-shot")))
    assert outcome.shared == {}
    client_ids = [id for id in outcome.local if id in outcome.scores]
    n_correct = [sum(result.scores[id]["test_hits"] for id in client_ids) for result in (outcome, zero_shot)]
    assert n_correct[0] >= n_correct[1]
    assert outcome.scores["client-3"] == zero_shot.scores["client-3"]  # unseen


def test_a_cache_without_validation_rows_keeps_the_papers_pair():
    frozen, x, y = setting()
    tip = make("tip-adapter")
    local_state = tip.adapt(frozen, {}, tip.init(frozen)[1], build_client(x, y))
    assert local_state["pair"].tolist() == [1.0, 5.5]
    assert tip.predict(frozen, {}, local_state, x).isfinite().all()


def test_temperatures_are_told_for_the_record():
    method = tofa()
    world = toy_world(method)
    outcome = train_toy(world)
    description = outcome.descriptions["client-0"]
    assert set(description) == {"visual temperature", "text temperature"}
    assert all(value > 0 for value in description.values())
    assert make_client(world, "client-0", 0).texts.shape[1] == 0


@pytest.mark.parametrize("multiplier", [1000.0, torch.inf, -1000.0, torch.nan])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_open_classes_are_a_mask_and_lift_no_limit(multiplier, noise):
    """A server that sends `open` = 1000 must not get a class of fewer than `min_class_samples`."""
    frozen, x, y = setting(rows=80)
    y = torch.where((y == 1) & (torch.arange(80) > 1), 0, y)  # one sample of class b
    method = tofa(min_class_samples=16, noise_multiplier=noise)
    shared, local = method.init(frozen)
    client = build_client(x, y)
    if noise:
        client = replace(client, noise=torch.zeros(1, method.noise(frozen)))
    mask = torch.ones(CLASSES, dtype=torch.float64)
    expected, _ = method.update(frozen, {**shared, "open": mask}, local, client)
    assert expected["counts"].tolist() == [39, 0, 20, 20, 0]
    actual, _ = method.update(frozen, {**shared, "open": multiplier * mask}, local, client)
    for key, value in actual.items():
        closed = multiplier < 0 or multiplier != multiplier
        assert torch.equal(value, torch.zeros_like(value) if closed else expected[key]), key


def test_open_classes_of_another_shape_are_refused():
    frozen, x, y = setting()
    method = tofa()
    shared, local = method.init(frozen)
    for shape in ((), (CLASSES + 1,), (1,), (CLASSES, CLASSES)):
        with pytest.raises(FedVLMError, match="'open' must have 5 numbers, one for each class"):
            method.update(frozen, {**shared, "open": torch.ones(shape)}, local, build_client(x, y))
