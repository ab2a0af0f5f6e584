"""FAA-CLIP and the adapters beside it keep the laws of their papers."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from fedvlm import parts, tensors
from fedvlm.core import Batch, Client, Frozen, make
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.networks import apply_layers, reverse_gradient
from fedvlm.methods.faa_clip import DISCRIMINATOR
from fedvlm.testing import make_test_client, toy_world, train_toy

DIM = 512


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clip_sized(classes=65):
    return Frozen(tuple(map(str, range(classes))), DIM, 100.0, normalize(draw(classes, DIM, seed=9), dim=1))


@pytest.mark.parametrize("name", ["faa-clip", "fedclip"])
def test_round_zero_is_close_to_zero_shot(name):
    method, frozen = make(name), clip_sized()
    shared, local = method.init(frozen)
    x = normalize(draw(200, DIM), dim=1)
    if name == "faa-clip":
        masked, _ = method.features({**shared, **local}, x, None)
    else:
        masked = method.features(shared, x)
    assert (masked * x).sum(1).min() > 0.98


@pytest.mark.parametrize(
    ("name", "settings", "up"),
    [
        ("faa-clip", {}, 2_109_440),
        ("faa-clip", {"mask": "deeper"}, 4 * (790_016 + 2 * 1_024)),
        ("faa-clip", {"local_norm": True}, 2_109_440 - 4 * 4 * 512),
        ("faa-clip", {"shared_discriminator": True}, 2_109_440 + 4 * (527_873 + 2 * 1_024)),
        ("faa-clip", {"adaptation": False}, 2_109_440),
        ("faa-clip", {"persist": True}, 2_109_440),
        ("fedclip", {}, 2_101_248),
        ("fedakt", {}, 4 * 2 * 128 * 512),
    ],
)
def test_bytes_on_the_wire(name, settings, up):
    shared, _ = make(name, **settings).init(clip_sized())
    assert tensors.count_bytes(shared) == up


def test_fedgh_sends_prototypes_up_and_a_head_down():
    method, frozen = make("fedgh", min_class_samples=1), clip_sized(7)
    shared, local = method.init(frozen)
    sent = method.send(shared, "a")
    x, y = normalize(draw(20, DIM), dim=1), torch.arange(20) % 5  # two classes have no row
    upload, _ = method.update(frozen, sent, local, make_test_client(x, y, y[None], x[:0], y[:0]))
    assert tensors.count_bytes(upload) == 4 * 7 * 512
    assert tensors.count_bytes(sent) == 4 * 7 * 513
    assert torch.allclose(upload["prototypes"][3], x[y == 3].mean(0), atol=1e-6)
    assert not upload["prototypes"][5:].any()


def test_fedgh_trains_the_head_at_the_server_and_only_from_classes_that_are_there():
    world = toy_world(make("fedgh", rounds=8, min_class_samples=1))
    outcome = train_toy(world)
    first = world.method.init(world.frozen)[0]["head"]
    assert (outcome.shared["head"] - first).norm() > 0.05
    no_rows = {"prototypes": torch.zeros(4, 16)}
    shared, _ = world.method.init(world.frozen)
    same = world.method.aggregate(shared, [no_rows], torch.ones(1), ["a"])
    assert torch.equal(same["head"], shared["head"])


def test_a_fedgh_client_is_measured_with_its_own_head_and_an_unseen_one_with_the_servers():
    world = toy_world(make("fedgh", rounds=2, lr=1e-2, min_class_samples=1))
    outcome = train_toy(world)
    assert all(local["head change"].norm() > 0 for local in outcome.local.values())
    assert set(outcome.local) == {"client-0", "client-1", "client-2"}


def shifted(judge_steps, turned):
    """The judge's loss on a mean shift after some steps, its features trained along or not."""
    from unittest.mock import patch

    method = replace(make("faa-clip", passes="joint", lr=1e-2, weight_decay=0.0), adaptation_weight=1.0)
    frozen = Frozen(("ant", "bee"), 16, 10.0, normalize(draw(2, 16, seed=1), dim=1))
    steps = torch.arange(64 * judge_steps).reshape(judge_steps, 64) % 256
    client_rows, theirs = draw(256, 16), draw(256, 16, seed=2) + 2
    toy_client = Client(
        normalize(client_rows, dim=1),
        torch.arange(256) % 2,
        steps,
        client_rows[:0],
        torch.zeros(0).long(),
        normalize(theirs, dim=1),
        steps,
        torch.zeros(2, 0, 16),
        torch.zeros(judge_steps, 0),
    )
    shared, local = method.init(frozen)
    with patch("fedvlm.maths.networks.reverse_gradient", turned):
        shared, local = parts.adam(method, frozen, shared, local, toy_client)
    samples = torch.cat([toy_client.x, toy_client.reference])
    real = torch.ones(512, dtype=torch.bool)
    masked, _ = method.features({**shared, **local}, samples, real)
    domain_logits = apply_layers(DISCRIMINATOR, "judge", local, masked, real)[0][:, 0]
    origin = torch.cat([torch.ones(256), torch.zeros(256)])
    return torch.nn.functional.binary_cross_entropy_with_logits(domain_logits, origin).item()


def test_the_judge_tells_a_mean_shift_apart_and_without_reversal_the_mask_does_not_hide_it():
    assert shifted(60, lambda x: x) < 0.1  # the mask helps the judge
    assert shifted(60, lambda x: x.detach()) < 0.1  # the mask looks away
    assert shifted(60, reverse_gradient) > 0.2  # the mask hides it


def test_the_reversed_gradient_is_the_opposite_of_the_judges():
    """The mask gets contrastive less λ times the judge's slope, the judge λ times its own."""
    method = make("faa-clip", passes="joint")
    world = toy_world(method)
    shared, local = method.init(world.frozen)
    batch = parts.minibatch(make_client(world, "client-0", 0), 0)

    def gradients_at(weight):
        parameters = {key: tensor.clone().requires_grad_() for key, tensor in {**shared, **local}.items()}
        loss, _ = replace(method, adaptation_weight=weight).loss(
            world.frozen, {k: parameters[k] for k in shared}, {k: parameters[k] for k in local}, batch, shared
        )
        names = ["mask3.weight", "judge3.weight"]
        return torch.autograd.grad(loss, [parameters[key] for key in names], materialize_grads=True)

    none, half_gradients, full_gradients = gradients_at(0.0), gradients_at(0.5), gradients_at(1.0)
    assert torch.allclose(full_gradients[0] - none[0], 2 * (half_gradients[0] - none[0]), atol=1e-6)
    assert torch.allclose(full_gradients[1], 2 * half_gradients[1], atol=1e-7)
    assert not none[1].any()

    parameters = {key: tensor.clone().requires_grad_() for key, tensor in {**shared, **local}.items()}
    samples = torch.cat([batch.x, batch.reference])
    real = torch.ones(len(samples), dtype=torch.bool)
    masked, _ = method.features(parameters, samples, real)
    domain_logits = apply_layers(DISCRIMINATOR, "judge", parameters, masked, real)[0][:, 0]
    origin = (torch.arange(len(samples)) < len(batch.x)).float()
    plain = torch.nn.functional.binary_cross_entropy_with_logits(domain_logits, origin)
    expected = torch.autograd.grad(plain, [parameters["mask3.weight"], parameters["judge3.weight"]])
    assert torch.allclose(none[0] - full_gradients[0], expected[0], atol=1e-6)
    assert torch.allclose(full_gradients[1], expected[1], atol=1e-6)


def test_nothing_of_the_judge_is_in_an_upload_and_only_running_statistics_are_not_trained():
    world = toy_world(make("faa-clip"))
    shared, local = world.method.init(world.frozen)
    upload, new_local = world.method.update(world.frozen, shared, local, make_client(world, "client-0", 0))
    assert not [key for key in upload if key.startswith("judge")]
    assert not torch.equal(upload["mask1.mean"], shared["mask1.mean"])
    assert not torch.equal(new_local["judge0.weight"], local["judge0.weight"])


def test_statistics_are_averaged_over_clients_all_weighing_the_same():
    method = make("faa-clip")
    shared, _ = method.init(clip_sized(4))
    uploads = [{key: torch.full_like(tensor, n) for key, tensor in shared.items()} for n in (1.0, 4.0)]
    actual = method.aggregate(shared, uploads, torch.tensor([1.0, 99.0]), ["a", "b"])
    assert actual["mask1.variance"][0] == actual["mask0.weight"][0, 0] == 2.5


def test_a_minibatch_of_one_row_and_a_missing_class_give_no_nan():
    world = toy_world(make("faa-clip", batch_size=8, rounds=2), sizes=(9, 17, 3, 20))
    small_world = replace(world, y=world.y.clamp(max=2))  # nobody has the last class
    for method in (world.method, replace(world.method, adaptation=False)):
        outcome = train_toy(replace(small_world, method=method))
        assert all(tensor.isfinite().all() for tensor in outcome.shared.values())


def test_kept_moments_change_the_second_round_and_not_the_first():
    first_round, two = (
        {p: train_toy(toy_world(make("faa-clip", persist=p, rounds=r))) for p in (False, True)} for r in (1, 2)
    )
    same = tensors.max_relative_difference(first_round[False].shared, first_round[True].shared)
    difference = tensors.max_relative_difference(two[False].shared, two[True].shared)
    assert same < 1e-6 < 1e-4 < difference


@pytest.mark.parametrize("name", ["faa-clip", "fedclip", "fedakt", "fedgh"])
def test_training_lowers_the_loss_on_rows_held_back(name):
    settings = {"min_class_samples": 1} if name == "fedgh" else {"lr": 3e-3, "weight_decay": 0.0}
    settings = {} if name == "fedakt" else settings
    outcomes = [train_toy(toy_world(method)) for method in (make("zero-shot"), make(name, rounds=15, **settings))]
    zero, trained_loss = (sum(outcome.scores[id]["loss"] for id in outcome.local) for outcome in outcomes)
    assert trained_loss < 0.9 * zero


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(SettingsError, match="'no norm'"):
        make("faa-clip", mask="wide")
    with pytest.raises(SettingsError, match="betas"):
        make("faa-clip", betas=[0.9])
    with pytest.raises(SettingsError, match="betas"):
        make("faa-clip", betas=[0.9, "b"])
    assert make("faa-clip", betas=[0.9, 0.99]).betas == (0.9, 0.99)


def test_a_batch_holds_as_many_reference_rows_as_rows():
    world = toy_world(make("faa-clip"))
    batch = parts.minibatch(make_client(world, "client-1", 0), 0)
    assert isinstance(batch, Batch)
    assert batch.reference.shape == batch.x.shape


def module_name(key):
    """The name that torch's modules have for one of our tensors."""
    key = key.replace(".mean", ".running_mean").replace(".variance", ".running_var")
    return key.replace("mask", "mask.").replace("judge", "judge.")


class PublicPasses(torch.nn.Module):
    """FAA-CLIP's mask and discriminator out of torch's own modules, passed as its public code does."""

    def __init__(self, parameters):
        super().__init__()
        linear, norm = (lambda: torch.nn.Linear(16, 16)), (lambda: torch.nn.BatchNorm1d(16))
        self.mask = torch.nn.Sequential(linear(), norm(), torch.nn.LeakyReLU(), linear())
        layers = (linear(), norm(), torch.nn.ReLU(), linear(), norm(), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.judge = torch.nn.Sequential(*layers)
        self.double()
        self.load_state_dict({module_name(key): value for key, value in parameters.items()}, strict=False)

    def forward(self, source, target, text, y, scale, weight):
        masked, other = (normalize(self.mask(10 * x).softmax(1) * x, dim=1) for x in (source, target))
        logits = scale * masked @ text[y].T
        pairs = torch.arange(len(y))
        cross_entropy = torch.nn.functional.cross_entropy
        fit = (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2
        bce = torch.nn.functional.binary_cross_entropy_with_logits
        source_logits, target_logits = self.judge(reverse_gradient(masked)), self.judge(other.detach())
        domain = bce(source_logits, torch.ones_like(source_logits)) + bce(
            target_logits, torch.zeros_like(target_logits)
        )
        return fit + weight * domain / 2


def test_passes_apart_are_those_of_the_public_code_in_float64():
    method, frozen = make("faa-clip", passes="apart"), toy_world(make("faa-clip")).frozen
    shared, local = ({k: v.double() for k, v in part.items()} for part in method.init(frozen))
    frozen = replace(frozen, text=frozen.text.double())
    x, reference = (normalize(draw(12, 16, seed=seed).double() + 0.3 * seed, dim=1) for seed in (1, 2))
    y, real = torch.arange(12) % 4, torch.ones(12, dtype=torch.bool)
    trained = {k: v.requires_grad_() for k, v in {**shared, **local}.items() if k not in method.traits.training.memory}
    loss, new = method.loss(frozen, {**shared, **trained}, {**local, **trained}, Batch(x, y, real, reference), {})
    loss.backward()
    public = PublicPasses({k: v.detach() for k, v in {**shared, **local}.items()})
    expected = public(x, reference, frozen.text, y, frozen.scale, method.adaptation_weight)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    grads = {name: value.grad for name, value in public.named_parameters()}
    for key, value in trained.items():
        gradient = torch.zeros_like(value) if value.grad is None else value.grad  # of a bias before a BatchNorm: zero
        assert torch.allclose(gradient, grads[module_name(key)], atol=1e-9), key
    buffers = dict(public.named_buffers())
    assert new and all(torch.allclose(value, buffers[module_name(key)], atol=1e-9) for key, value in new.items())


def test_passes_apart_send_no_gradient_through_the_reference_samples():
    frozen = toy_world(make("faa-clip")).frozen
    x, y, real = normalize(draw(12, 16, seed=1), dim=1), torch.arange(12) % 4, torch.ones(12, dtype=torch.bool)
    for passes, has_gradient in (("joint", True), ("apart", False)):
        method = make("faa-clip", passes=passes)
        shared, local = method.init(frozen)
        reference = normalize(draw(12, 16, seed=2), dim=1).requires_grad_()
        x.requires_grad_()
        method.loss(frozen, shared, local, Batch(x, y, real, reference), {})[0].backward()
        assert (reference.grad is not None and bool(reference.grad.any())) == has_gradient
