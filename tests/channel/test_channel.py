"""Clip, noise, rounding and the secure sum: each keeps its law, and off changes nothing."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedvlm import seeds, tensors
from fedvlm.channel import Channel, secure
from fedvlm.channel.clip import add_noise, change, clip, norm
from fedvlm.channel.quantise import LOSS, dequantise, quantise
from fedvlm.channel.settings import check_channel
from fedvlm.channel.uploads import arrive, leave, spend
from fedvlm.channel.validate import longest
from fedvlm.core import Traits, make, methods, sums
from fedvlm.engines.claims import sum_gap
from fedvlm.engines.loop import start, train
from fedvlm.engines.single import Single
from fedvlm.engines.state import Plan, pack, unpack
from fedvlm.errors import FederationError, SettingsError
from fedvlm.maths.accounting import epsilon
from fedvlm.maths.noise import secret, seeded, step
from fedvlm.methods.fedavg import FedAvg
from fedvlm.runner.settings import build
from fedvlm.storage.sealed import read_tensors, write_tensors
from fedvlm.testing import toy_world


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(channel, method="fedavg", engine=Single, begin=None, stop=None, **settings):
    """All rounds on the toy federation: the last state and the recorded lines."""
    world = replace(
        toy_world(make(method, **{"rounds": 3, "lr": 0.01, **settings})), channel=channel
    )
    plan = Plan(tuple(sorted(world.members)), ())
    state, fresh = start(world)
    lines = []
    kept = []

    def on_round(state, line):
        lines.append(line)
        kept.append(state)

    state = train(world, engine(world), plan, begin or state, fresh, on_round)
    return state, lines, kept


def test_a_channel_that_is_off_returns_the_very_tensors():
    upload, sent = {"head": numbers(4, 6)}, {"head": numbers(4, 6, seed=1)}
    travels, kept = leave(Channel(), upload, sent, {}, secret)
    assert travels["head"] is upload["head"]
    assert arrive(Channel(), travels, sent)["head"] is upload["head"]
    assert kept == {}


def test_a_run_with_a_channel_says_so_in_its_table_and_line(rows, tmp_path):
    import fedvlm

    method = {"name": "fedavg", "rounds": 1}
    through = {"clip": 0.5, "noise_multiplier": 2.0, "secure": True}
    result = fedvlm.run(method, embedded=rows, out=tmp_path / "a", channel=through)
    assert "channel.clip=0.5, channel.noise_multiplier=2.0, channel.secure=True" in result.table()
    assert result.manifest["identity"]["channel"]["noise_multiplier"] == 2.0
    assert result.rounds[0]["epsilon"] > 0
    plain = fedvlm.run(method, embedded=rows, out=tmp_path / "b")
    assert "channel" not in plain.table()
    assert not any(plain.manifest["identity"]["channel"][key] for key in ("clip", "secure"))


def test_a_channel_that_is_off_leaves_settings_and_records_as_they_were():
    plain = build({"method": "fedavg"})
    assert plain.identity() == build({"method": "fedavg", "channel": {"clip": 0.0}}).identity()
    state, lines, _ = run(Channel())
    assert state.channel == {}
    assert "epsilon" not in lines[0]
    assert lines[0]["clients"]["client-0"]["bytes_up"] == 4 * 16 * 4


@pytest.mark.parametrize("most", [1e-3, 0.5, 1e9])
def test_clipping_bounds_the_norm_and_keeps_the_direction(most):
    moved = {"a": numbers(50, 7), "b": 1e-4 * numbers(9, seed=2)}
    short = clip(moved, most)
    assert norm(short) <= most
    cosine = torch.nn.functional.cosine_similarity(tensors.flat(short), tensors.flat(moved), dim=0)
    assert cosine == pytest.approx(1, abs=1e-6)
    assert norm(short) == pytest.approx(min(most, norm(moved)), rel=1e-5)


def test_what_is_clipped_is_the_change_where_a_tensor_was_sent_and_else_the_whole():
    sent = {"head": 100 + numbers(4, 6)}
    upload = {"head": sent["head"] + 1e-3, "counts": torch.full((5,), 7.0)}
    assert norm(change(upload, sent)) == pytest.approx(math.sqrt(5 * 49), rel=1e-4)
    out, _ = leave(Channel(clip=1.0), upload, sent, {}, secret)
    assert norm(change(out, sent)) <= 1 + 1e-5
    assert (out["head"] - sent["head"]).abs().max() < 1e-4


def test_noise_has_the_deviation_asked_for_and_is_drawn_by_seed():
    moved = {"a": torch.zeros(200, 300), "b": torch.zeros(40_000)}
    noisy = add_noise(moved, 0.3, seeded(seeds.generator("test", 1)))
    whole = tensors.flat(noisy)
    assert whole.std() == pytest.approx(0.3, rel=0.01)  # 100,000 draws: three times the deviation
    assert abs(float(whole.mean())) < 4 * 0.3 / math.sqrt(len(whole))
    assert torch.equal((whole / step(0.3)).round() * step(0.3), whole)  # and on the grid
    again = add_noise(moved, 0.3, seeded(seeds.generator("test", 1)))
    assert torch.equal(noisy["a"], again["a"])


def test_whole_numbers_are_not_clipped_but_refused():
    upload = {"counts": torch.tensor([1, 2, 3])}
    with pytest.raises(FederationError, match="whole numbers in 'counts'"):
        leave(Channel(clip=1.0, noise_multiplier=1.0), upload, {}, {}, secret)


def test_rounding_moves_a_change_by_less_than_a_fifteenth_of_its_norm():
    for scale in (1.0, 1e-6, 1e6):
        moved = {"a": scale * numbers(700, 3) ** 3, "b": scale * numbers(5)}
        travels, over = quantise(moved, {})
        assert norm(over) <= LOSS * norm(moved)
        back = dequantise(travels, ["a", "b"])
        assert norm({k: back[k] + over[k] - moved[k] for k in back}) <= 1e-6 * norm(moved)


def test_rounding_of_zeros_and_of_no_numbers_is_exact():
    moved = {"zeros": torch.zeros(300), "none": torch.zeros(0, 4)}
    travels, over = quantise(moved, {})
    assert all(
        torch.equal(value, moved[key]) for key, value in dequantise(travels, list(moved)).items()
    )
    assert norm(over) == 0


def test_with_feedback_the_mean_of_many_rounds_is_exact_and_without_it_is_not():
    """A number far below its block's step is lost every time, unless what is left adds up."""
    moved = {"a": torch.cat([torch.tensor([1.0]), torch.full((255,), 1e-3)])}
    sums, plain, left = torch.zeros(256), torch.zeros(256), {}
    for _ in range(500):
        travels, left = quantise(moved, left)
        sums += dequantise(travels, ["a"])["a"]
        plain += dequantise(quantise(moved, {})[0], ["a"])["a"]
    step = 1.0 / 127
    assert (sums / 500 - moved["a"]).abs().max() < step / 500
    assert plain[1] == 0


def test_a_quantised_run_sends_a_quarter_and_ends_near_the_plain_one():
    plain, _, _ = run(Channel(), rounds=8, lr=0.1)
    small, lines, _ = run(Channel(quantise=True), rounds=8, lr=0.1)
    assert lines[0]["clients"]["client-0"]["bytes_up"] == 4 * 16 + 4
    first = start(toy_world(make("fedavg")))[0].shared
    moved = norm(change(plain.shared, first))
    assert norm(change(small.shared, plain.shared)) < 0.02 * moved


def test_what_rounding_leaves_over_is_in_the_checkpoint_and_resume_gives_the_same_bits(tmp_path):
    channel = Channel(clip=0.5, noise_multiplier=0.1, quantise=True)
    whole, lines, kept = run(channel, rounds=4)
    write_tensors(tmp_path / "c", *pack(kept[1]))
    back = unpack(*read_tensors(tmp_path / "c"))
    assert set(back.channel["client-0"]) == {"left/head", "spent"}
    again, later, _ = run(channel, rounds=4, begin=back)
    assert torch.equal(again.shared["head"], whole.shared["head"])
    assert [line["epsilon"] for line in later] == [line["epsilon"] for line in lines[2:]]


def test_engines_agree_behind_a_channel():
    from fedvlm.engines.batched import Batched

    channel = Channel(clip=0.05, noise_multiplier=0.2)
    one, _, _ = run(channel, "fedot")
    many, _, _ = run(channel, "fedot", lambda world: Batched(world, 1))
    assert tensors.difference(one.shared, many.shared) < 1e-4


def test_epsilon_grows_round_by_round_and_is_the_gaussian_mechanisms_own():
    _, lines, _ = run(Channel(clip=0.1, noise_multiplier=2.0, delta=1e-6))
    assert [line["epsilon"] for line in lines] == [
        pytest.approx(epsilon(2.0, k, delta=1e-6), rel=1e-9) for k in (1, 2, 3)
    ]


def test_a_secure_sum_hides_a_client_in_the_noise_of_all():
    """Uniform weights: n clients' noise against one client's change."""
    _, lines, _ = run(Channel(clip=0.1, noise_multiplier=2.0, secure=True), "fedot")
    assert lines[0]["epsilon"] == pytest.approx(epsilon(2.0 * math.sqrt(4), 1), rel=1e-9)
    costs = spend(Channel(clip=1.0, noise_multiplier=2.0, secure=True), {"a": 3.0, "b": 4.0})
    assert costs == {"a": 9 / 25 / 4, "b": 16 / 25 / 4}


def masked(count, shape=(9, 5)):
    ids = [f"client-{i:02}" for i in range(count)]
    plain = {id: {"w": numbers(*shape, seed=i).double()} for i, id in enumerate(ids)}
    return (
        ids,
        plain,
        {
            id: secure.mask(secure.fixed(one, count, id), ids, id, (1, 0))
            for id, one in plain.items()
        },
    )


@pytest.mark.parametrize("count", [1, 2, 3, 40, 100])
def test_the_masked_sum_is_the_plain_sum_to_fixed_point(count):
    ids, plain, hidden = masked(count)
    wanted = sum(plain[id]["w"] for id in ids)
    got = secure.total(hidden[id] for id in ids)["w"].double() / secure.FRACTION
    assert (got - wanted).abs().max() <= count / 2 / secure.FRACTION


def test_a_masked_upload_looks_random_and_a_missing_one_spoils_the_sum():
    ids, plain, hidden = masked(5, (100, 100))
    bits = hidden[ids[0]]["w"].numpy().view(np.uint8).reshape(-1, 8)
    for byte in range(8):  # every byte of the numbers is even over its 256 values
        counts = np.bincount(bits[:, byte], minlength=256)
        square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert 150 < square < 370  # χ² with 255 degrees of freedom, past its 1e-5 tails
    values = hidden[ids[0]]["w"].double().flatten()
    both = torch.stack([values, plain[ids[0]]["w"].flatten()])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.05
    got = secure.total(hidden[id] for id in ids[1:])["w"].double() / secure.FRACTION
    assert (got - sum(plain[id]["w"] for id in ids[1:])).abs().median() > 1e6


def test_numbers_a_masked_sum_would_garble_are_refused_by_name():
    for bad in (torch.nan, torch.inf, 9.0, -8.0):
        value = {"w": torch.tensor([0.0, 1, 2, 3, 4, bad], dtype=torch.float64)}
        with pytest.raises(FederationError, match="client b, round 3: 1 of 6 numbers of 'w'"):
            secure.guarded(value, secure.SECAGG, "client b, round 3")
    with pytest.raises(FederationError, match="'n' holds whole numbers"):
        secure.weighted({"n": torch.tensor([3])}, 40.0, "client b")
    with pytest.raises(FederationError, match="numbers of 'n'"):
        secure.fixed({"n": torch.tensor([2**61])}, 3, "client b")


def test_whole_numbers_are_summed_exactly():
    ids = ["a", "b", "c"]
    plain = {id: {"n": torch.tensor([2**55 + i, -i])} for i, id in enumerate(ids)}
    hidden = [secure.mask(secure.fixed(plain[id], 3, id), ids, id, (0,)) for id in ids]
    assert secure.total(hidden)["n"].tolist() == [3 * 2**55 + 3, -3]


@pytest.mark.parametrize("method", ["fedavg", "fedot"])
def test_a_secure_run_ends_where_a_plain_one_does(method):
    plain, _, _ = run(Channel(), method)
    hidden, lines, _ = run(Channel(secure=True), method)
    assert tensors.difference(hidden.shared, plain.shared) < 1e-6
    assert "cosine" not in lines[0]
    assert lines[0]["clients"]["client-0"]["bytes_up"] == (4 * 16 + 1) * 8


def test_every_method_either_takes_a_sum_or_refuses_a_secure_one_by_name():
    kinds = {name: sums(make(name)) for name in methods()}
    assert kinds["fedavg"] == "rows"
    assert kinds["fedot"] == "clients"
    assert kinds["tofa"] == "total"
    for name in ("promptfl-fedamp", "fens"):
        assert kinds[name] is None
    for name, kind in kinds.items():
        if kind is None:
            with pytest.raises(SettingsError, match=f"{name} aggregates single uploads"):
                check_channel(Channel(secure=True), make(name))


@dataclass(frozen=True)
class Liar(FedAvg):
    """Says that a mean will do, and takes the largest."""

    def aggregate(self, shared, uploads, weights, ids):
        return max(uploads, key=lambda one: float(one["head"].norm()))

    name = "liar"
    traits = Traits(needs=frozenset({"image", "text"}), sums="rows")


def test_a_method_that_wrongly_says_a_sum_will_do_is_found_out():
    assert sum_gap(toy_world(make("fedavg"))) < 1e-6
    assert sum_gap(toy_world(Liar(lr=0.1))) > 1e-3


@dataclass(frozen=True)
class Loner:
    """Aggregates by the single uploads."""

    name = "loner"
    traits = Traits()

    def aggregate(self, shared, uploads, weights, ids):
        return max(uploads, key=lambda one: one["head"].norm())


def test_a_method_that_aggregates_single_uploads_refuses_a_secure_sum():
    with pytest.raises(SettingsError, match="loner aggregates single uploads .* add `sums"):
        check_channel(Channel(secure=True), Loner())
    check_channel(Channel(), Loner())
    assert sums(make("fedavg")) == "rows"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clipp": 1.0}, "did you mean 'clip'"),
        ({"clip": -1.0}, "channel.clip must be at least 0, got -1.0"),
        ({"clip": math.nan}, "channel.clip must be finite and at least 0, got nan"),
        ({"noise_multiplier": 1.0}, "set channel.clip too"),
        ({"delta": 1.0}, "must be above 0 and below 1, got 1.0"),
        ({"quantise": "yes"}, "channel.quantise = 'yes' does not fit"),
        ({"quantise": True, "secure": True}, "do not go together"),
        ({"max_samples": 0}, "channel.max_samples must be at least 1, got 0"),
        ("on", "write a table"),
    ],
)
def test_settings_of_the_channel_are_checked(settings, says):
    with pytest.raises(SettingsError, match=says):
        build({"method": "fedavg", "channel": settings})


def test_honest_uploads_pass_the_norm_check_however_they_are_changed():
    sent = {"head": numbers(30, 40)}
    for channel in (
        Channel(clip=0.1),
        Channel(clip=0.1, noise_multiplier=3.0),
        Channel(clip=0.1, quantise=True),
        Channel(clip=0.1, noise_multiplier=0.01, quantise=True),
    ):
        kept = {}
        for number in range(20):
            upload = {"head": sent["head"] + 5 * numbers(30, 40, seed=number) ** 3}
            draw = seeded(seeds.generator("test", number))
            travels, kept = leave(channel, upload, sent, kept, draw)
            back = arrive(channel, travels, sent)
            assert norm(change(back, sent)) <= longest(channel, 1200)
