"""Samples without a label: what auto makes of them, and that nothing of them leaves a client."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.core import make
from fedvlm.data.arrays import from_arrays
from fedvlm.engines.chunks import stack_clients
from fedvlm.engines.client import ClientRows, make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.head_mixing import MixPrior, mix_client
from fedvlm.maths.logistic_regression import Head, split_head
from fedvlm.maths.unlabelled import Labelled, MixturePrior, mix_in
from fedvlm.report.runs import run_label
from fedvlm.runner.data_warnings import unlabelled_warnings
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build
from fedvlm.testing import toy_world, train_toy

N_LABELLED = 8


def few_labels(sizes=(120, 120, 120, 120)):
    """Return the toy federation with few labels; the other training samples have none."""
    world = toy_world(make("auto"), sizes)
    members = {
        id: ClientRows(rows.train[:N_LABELLED], rows.validation, rows.test, unlabelled=rows.train[N_LABELLED:])
        for id, rows in world.members.items()
    }
    return replace(world, members=members)


def gaussian_client(n_labelled=1, n_val=4, n_unlabelled=60, n_foreign=0, seed=0):
    """Return a start head without knowledge, a client of three separate classes, and test samples."""
    draw = torch.Generator().manual_seed(seed)
    means = 0.5 * torch.randn(6, 16, generator=draw).double()

    def sample(classes, n_samples):
        y = torch.arange(classes).repeat_interleave(n_samples)
        return means[y] + 0.8 * torch.randn(len(y), 16, generator=draw).double(), y

    (x, y), (val_x, val_y), (test_x, test_y) = sample(3, n_labelled), sample(3, n_val), sample(3, 200)
    unlabelled = sample(3, n_unlabelled)[0]
    foreign = means[3 + torch.arange(n_foreign) % 3] + 0.8 * torch.randn(n_foreign, 16, generator=draw).double()
    zero = split_head(torch.zeros(3, 17).double())
    return zero, Labelled(x, y, val_x, val_y), torch.cat([unlabelled, foreign]), (test_x, test_y)


def accuracy(head, samples):
    return float((head.logits(samples[0]).argmax(1) == samples[1]).double().mean())


@pytest.mark.parametrize("n_foreign", [0, 180])
def test_samples_without_a_label_help_and_foreign_ones_do_not_hurt(n_foreign):
    gains, prior = [], MixPrior(mixture=MixturePrior(steps=4, useless=0.5))
    for seed in range(8):
        zero, labelled, unlabelled, test = gaussian_client(n_foreign=n_foreign, seed=seed)
        without = mix_client(zero, zero, labelled, unlabelled[:0], MixPrior())
        more = mix_client(zero, zero, labelled, unlabelled, prior)
        gains.append(accuracy(more.head, test) - accuracy(without.head, test))
        assert without.weights[3] == 0
    assert sum(gains) / len(gains) > (0 if n_foreign else 0.02)


def test_their_weight_falls_to_zero_where_validation_samples_are_less_likely():
    x, y = torch.eye(2).double().repeat(30, 1), torch.tensor([0, 1] * 30)
    good, bad = (Head(sign * 4 * torch.eye(2).double(), torch.zeros(2).double()) for sign in (1, -1))
    assert mix_in(good, bad, x, y, MixturePrior())[1] < 1e-3
    assert mix_in(bad, good, x, y, MixturePrior())[1] > 0.9
    head, weight = mix_in(good, bad, x, torch.full_like(y, -1), MixturePrior())
    assert weight == 0 and torch.equal(head.weight, good.weight)


def test_the_parts_of_the_mix_add_up_to_the_head():
    zero, labelled, unlabelled, _ = gaussian_client()
    shared = Head(torch.randn(3, 16).double(), torch.randn(3).double())
    mix = mix_client(shared, zero, labelled, unlabelled, MixPrior())
    assert torch.allclose(mix.own + mix.weights[0] * shared.joined(), mix.head.joined())


def test_padding_does_not_count():
    zero, labelled, unlabelled, _ = gaussian_client()
    padded = torch.cat([unlabelled, torch.zeros(7, 16).double()])
    heads = [mix_client(zero, zero, labelled, rows, MixPrior()).head for rows in (unlabelled, padded)]
    assert torch.allclose(heads[0].weight, heads[1].weight)


def test_no_upload_depends_on_them():
    world = few_labels()
    method, frozen = world.method, world.frozen
    shared, local = method.init(frozen)
    for _ in range(method.rounds):
        sent = method.send(shared, "")
        uploads = []
        for id in world.members:
            client = make_client(world, id, 0)
            upload = method.update(frozen, sent, local, client)[0]
            other = method.update(frozen, sent, local, replace(client, unlabelled=-client.unlabelled))[0]
            assert all(torch.equal(value, other[key]) for key, value in upload.items())
            uploads.append(upload)
        shared = method.aggregate(shared, uploads, torch.ones(4), list(world.members))


def test_engines_agree_and_a_stack_of_clients_is_padded_with_zeros():
    world = few_labels((120, 40, 60, 80))
    batched, single = train_toy(world), train_toy(world, "single")
    for id, local in batched.local.items():
        assert all(torch.allclose(value, single.local[id][key], atol=1e-4) for key, value in local.items())
    stacked = stack_clients(world, ["client-0", "client-1"], 0).unlabelled
    assert stacked.shape[1] == 112 and not stacked[1, 32:].any() and stacked[1, :32].any(1).all()


def arrays(seed, n_unlabelled):
    draw = np.random.default_rng(seed)
    y = np.arange(60) % 3
    means = 3 * np.eye(3, 8)
    unlabelled = means[np.arange(n_unlabelled) % 3] + draw.normal(size=(n_unlabelled, 8))
    return means[y] + draw.normal(size=(60, 8)), y, unlabelled


def test_a_run_of_arrays_uses_them_and_its_manifest_counts_them():
    clients = {"a": arrays(0, 50), "b": arrays(1, 0)}
    result = fedvlm.run("auto", clients=clients)
    assert [result.manifest["clients"][id]["unlabelled"] for id in "ab"] == [50, 0]
    partition = prepare(build({"method": "alone", "clients": {"partition": "own"}}), from_arrays(clients), 0).partition
    assert "alone ignores the 50 samples without a label" in unlabelled_warnings(make("alone"), partition)[0]
    assert unlabelled_warnings(make("auto"), partition) == []


def test_test_samples_are_used_only_if_transductive_and_the_table_says_so():
    clients = {"a": arrays(0, 0)[:2], "b": arrays(1, 0)[:2]}
    plain, transductive = (fedvlm.run("auto", clients=clients, transductive=flag) for flag in (False, True))
    assert "TRANSDUCTIVE" in run_label(transductive) and "TRANSDUCTIVE" not in run_label(plain)
    assert "transductive" not in plain.manifest["identity"]
    with pytest.raises(SettingsError, match="alone does not learn from images without a label"):
        build({"method": "alone", "transductive": True})
