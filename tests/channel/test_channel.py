"""Clip, noise, rounding and the verified sum: each keeps its law, and off changes nothing."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedvlm import seeds, tensors
from fedvlm.channel import Channel, verified
from fedvlm.channel.pipeline import UploadPipeline
from fedvlm.channel.settings import check_channel
from fedvlm.channel.steps import (
    MAX_RELATIVE_ERROR,
    RESIDUAL_PREFIX,
    Clip,
    Noise,
    Quantise,
    change_norm,
    max_change_norm,
    upload_change,
)
from fedvlm.core import PrivacyTraits, Traits, make, methods, upload_sum
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan, pack_state, unpack_state
from fedvlm.errors import FederationError, SettingsError
from fedvlm.maths.privacy import epsilon, grid_step, secure_normal, seeded_normal
from fedvlm.methods.fedavg import FedAvg
from fedvlm.runner.settings import build
from fedvlm.storage.files import read_tensors, write_tensors
from fedvlm.testing import sum_gap, toy_world


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(channel, method="fedavg", engine=Sequential, initial=None, stop=None, **settings):
    """All rounds on the toy federation: the last state and the recorded lines."""
    world = replace(toy_world(make(method, **{"rounds": 3, "lr": 0.01, **settings})), channel=channel)
    plan = Plan(tuple(sorted(world.members)), ())
    state, initial_local = initial_state(world)
    lines = []
    states = []

    def on_round(state, line):
        lines.append(line)
        states.append(state)

    state = run_rounds(world, engine(world), plan, initial or state, initial_local, on_round)
    return state, lines, states


def test_a_channel_that_is_off_returns_the_very_tensors():
    upload, sent = {"head": numbers(4, 6)}, {"head": numbers(4, 6, seed=1)}
    travels, feedback = UploadPipeline(Channel()).encode(upload, sent, {}, secure_normal)
    assert travels["head"] is upload["head"]
    assert UploadPipeline(Channel()).decode(travels, sent)["head"] is upload["head"]
    assert feedback == {}


def test_a_run_with_a_channel_says_so_in_its_table_and_line(rows, tmp_path):
    import fedvlm

    method = {"name": "fedavg", "rounds": 1}
    through = {"clip": 0.5, "noise_multiplier": 2.0, "verified": True}
    result = fedvlm.run(method, embedded=rows, out=tmp_path / "a", channel=through, protocol="own-test")
    assert "channel.clip=0.5, channel.noise_multiplier=2.0, channel.verified=True" in result.table()
    assert result.manifest["identity"]["channel"]["noise_multiplier"] == 2.0
    assert result.rounds[0]["epsilon"] > 0
    plain = fedvlm.run(method, embedded=rows, out=tmp_path / "b")
    assert "channel" not in plain.table()
    assert not any(plain.manifest["identity"]["channel"][key] for key in ("clip", "verified"))


def test_a_channel_that_is_off_leaves_settings_and_records_as_they_were():
    plain = build({"method": "fedavg"})
    assert plain.identity() == build({"method": "fedavg", "channel": {"clip": 0.0}}).identity()
    state, lines, _ = run(Channel())
    assert state.channel == {}
    assert "epsilon" not in lines[0]
    assert lines[0]["clients"]["client-0"]["bytes_up"] == 4 * 16 * 4


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e9])
def test_clipping_bounds_the_norm_and_keeps_the_direction(max_norm):
    moved = {"a": numbers(50, 7), "b": 1e-4 * numbers(9, seed=2)}
    short, _ = Clip(max_norm).encode(moved, {}, secure_normal)
    assert change_norm(short) <= max_norm
    cosine = torch.nn.functional.cosine_similarity(tensors.flatten(short), tensors.flatten(moved), dim=0)
    assert cosine == pytest.approx(1, abs=1e-6)
    assert change_norm(short) == pytest.approx(min(max_norm, change_norm(moved)), rel=1e-5)


def test_what_is_clipped_is_the_change_where_a_tensor_was_sent_and_else_the_whole():
    sent = {"head": 100 + numbers(4, 6)}
    upload = {"head": sent["head"] + 1e-3, "counts": torch.full((5,), 7.0)}
    assert change_norm(upload_change(upload, sent)) == pytest.approx(math.sqrt(5 * 49), rel=1e-4)
    out, _ = UploadPipeline(Channel(clip=1.0)).encode(upload, sent, {}, secure_normal)
    assert change_norm(upload_change(out, sent)) <= 1 + 1e-5
    assert (out["head"] - sent["head"]).abs().max() < 1e-4


def test_noise_has_the_deviation_asked_for_and_is_drawn_by_seed():
    moved = {"a": torch.zeros(200, 300), "b": torch.zeros(40_000)}
    noisy, _ = Noise(0.15, 2.0).encode(moved, {}, seeded_normal(seeds.generator("test", 1)))
    flat_noise = tensors.flatten(noisy)
    assert flat_noise.std() == pytest.approx(0.3, rel=0.01)  # 100,000 draws: three times the deviation
    assert abs(float(flat_noise.mean())) < 4 * 0.3 / math.sqrt(len(flat_noise))
    assert torch.equal((flat_noise / grid_step(0.3)).round() * grid_step(0.3), flat_noise)  # and on the grid
    again, _ = Noise(0.15, 2.0).encode(moved, {}, seeded_normal(seeds.generator("test", 1)))
    assert torch.equal(noisy["a"], again["a"])


def test_whole_numbers_are_not_clipped_but_refused():
    upload = {"counts": torch.tensor([1, 2, 3])}
    with pytest.raises(FederationError, match="integers in 'counts'"):
        UploadPipeline(Channel(clip=1.0, noise_multiplier=1.0)).encode(upload, {}, {}, secure_normal)


def quantise(change, residuals):
    """The step with the rounding errors by the names of their tensors."""
    state = {RESIDUAL_PREFIX + key: value for key, value in residuals.items()}
    encoded, state = Quantise().encode(change, state, secure_normal)
    return encoded, {key.removeprefix(RESIDUAL_PREFIX): value for key, value in state.items()}


def test_rounding_moves_a_change_by_less_than_a_fifteenth_of_its_norm():
    for scale in (1.0, 1e-6, 1e6):
        moved = {"a": scale * numbers(700, 3) ** 3, "b": scale * numbers(5)}
        travels, over = quantise(moved, {})
        assert change_norm(over) <= MAX_RELATIVE_ERROR * change_norm(moved)
        back = Quantise().decode(travels)
        assert change_norm({k: back[k] + over[k] - moved[k] for k in back}) <= 1e-6 * change_norm(moved)


def test_rounding_of_zeros_and_of_no_numbers_is_exact():
    moved = {"zeros": torch.zeros(300), "none": torch.zeros(0, 4)}
    travels, over = quantise(moved, {})
    assert all(torch.equal(value, moved[key]) for key, value in Quantise().decode(travels).items())
    assert change_norm(over) == 0


def test_with_feedback_the_mean_of_many_rounds_is_exact_and_without_it_is_not():
    """A number far below its block's step is lost every time, unless what is left adds up."""
    moved = {"a": torch.cat([torch.tensor([1.0]), torch.full((255,), 1e-3)])}
    sums, plain, feedback = torch.zeros(256), torch.zeros(256), {}
    for _ in range(500):
        travels, feedback = quantise(moved, feedback)
        sums += Quantise().decode(travels)["a"]
        plain += Quantise().decode(quantise(moved, {})[0])["a"]
    step = 1.0 / 127
    assert (sums / 500 - moved["a"]).abs().max() < step / 500
    assert plain[1] == 0


def test_a_quantised_run_sends_a_quarter_and_ends_near_the_plain_one():
    plain, _, _ = run(Channel(), rounds=8, lr=0.1)
    small, lines, _ = run(Channel(quantise=True), rounds=8, lr=0.1)
    assert lines[0]["clients"]["client-0"]["bytes_up"] == 4 * 16 + 4
    first = initial_state(toy_world(make("fedavg")))[0].shared
    moved = change_norm(upload_change(plain.shared, first))
    assert change_norm(upload_change(small.shared, plain.shared)) < 0.02 * moved


def test_what_rounding_leaves_over_is_in_the_checkpoint_and_resume_gives_the_same_bits(tmp_path):
    channel = Channel(clip=0.5, noise_multiplier=0.1, quantise=True)
    uninterrupted, lines, states = run(channel, rounds=4)
    write_tensors(tmp_path / "c", *pack_state(states[1]))
    back = unpack_state(*read_tensors(tmp_path / "c"))
    assert set(back.channel["client-0"]) == {"left/head", "spent"}
    again, later, _ = run(channel, rounds=4, initial=back)
    assert torch.equal(again.shared["head"], uninterrupted.shared["head"])
    assert [line["epsilon"] for line in later] == [line["epsilon"] for line in lines[2:]]


def test_engines_agree_behind_a_channel():
    from fedvlm.engines.batched import Batched

    channel = Channel(clip=0.05, noise_multiplier=0.2)
    plain_state, _, _ = run(channel, "fedot")
    batched_state, _, _ = run(channel, "fedot", lambda world: Batched(world, 1))
    assert tensors.max_relative_difference(plain_state.shared, batched_state.shared) < 1e-4


def test_epsilon_grows_round_by_round_and_is_the_gaussian_mechanisms_own():
    _, lines, _ = run(Channel(clip=0.1, noise_multiplier=2.0, delta=1e-6))
    assert [line["epsilon"] for line in lines] == [
        pytest.approx(epsilon(2.0, k, delta=1e-6), rel=1e-9) for k in (1, 2, 3)
    ]


def test_in_a_verified_sum_a_client_counts_its_own_noise_alone():
    """Others may leave theirs out, and a client cannot see it."""
    _, lines, _ = run(Channel(clip=0.1, noise_multiplier=2.0, verified=True), "fedot")
    assert lines[0]["epsilon"] == pytest.approx(epsilon(2.0, 1), rel=1e-9)
    costs = UploadPipeline(Channel(clip=1.0, noise_multiplier=2.0, verified=True)).cost({"a": 3.0, "b": 4.0})
    assert costs == {"a": 1 / 4, "b": 1 / 4}


def masked(count, shape=(9, 5), bound=b"round 0"):
    """Uploads of members under masks of secrets that each pair shares."""
    ids = [f"client-{i:02}" for i in range(count)]
    plain = {id: {"w": numbers(*shape, seed=i).double()} for i, id in enumerate(ids)}
    hidden = {}
    for id, upload in plain.items():
        pairs = {peer: tuple(sorted([id, peer])) for peer in ids if peer != id}
        keys = {peer: verified.derive_key(str(pair).encode(), b"salt", bound) for peer, pair in pairs.items()}
        vector = verified.pack_integers(verified.to_fixed_point(upload, count, id))
        hidden[id] = verified.mask_vector(vector, id, keys)
    return ids, plain, hidden


def total(hidden, template):
    sums = verified.unpack_integers(verified.add_vectors(hidden), template)
    return sums["w"].double() / verified.FIXED_POINT_STEPS


@pytest.mark.parametrize("count", [1, 2, 3, 40, 100])
def test_the_masked_sum_is_the_plain_sum_to_fixed_point(count):
    ids, plain, hidden = masked(count)
    expected = sum(plain[id]["w"] for id in ids)
    got = total(hidden.values(), plain[ids[0]])
    assert (got - expected).abs().max() <= count / 2 / verified.FIXED_POINT_STEPS


def test_a_masked_upload_looks_random_and_a_missing_one_spoils_the_sum():
    ids, plain, hidden = masked(5, (100, 100))
    bits = hidden[ids[0]].view(np.uint8).reshape(-1, 8)
    for byte in range(8):  # every byte of the numbers is even over its 256 values
        counts = np.bincount(bits[:, byte], minlength=256)
        square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert 150 < square < 370  # χ² with 255 degrees of freedom, past its 1e-5 tails
    values = torch.from_numpy(hidden[ids[0]].view(np.int64)).double()
    stacked = torch.stack([values, plain[ids[0]]["w"].flatten()])
    assert abs(float(torch.corrcoef(stacked)[0, 1])) < 0.05
    got = total([hidden[id] for id in ids[1:]], plain[ids[0]])
    assert (got - sum(plain[id]["w"] for id in ids[1:])).abs().median() > 1e6


def test_masks_of_different_rounds_have_nothing_in_common():
    first, second = (masked(3, (50, 50), bound)[2]["client-00"] for bound in (b"round 0", b"round 1"))
    assert not (first == second).any()


def test_numbers_a_masked_sum_would_garble_are_refused_by_name():
    for bad in (torch.nan, torch.inf, 2.0**30 / 3, -(2.0**40)):
        value = {"w": torch.tensor([0.0, 1, 2, 3, 4, bad], dtype=torch.float64)}
        with pytest.raises(FederationError, match="client b, round 3: 1 of 6 numbers of 'w'"):
            verified.to_fixed_point(value, 3, "client b, round 3")
    with pytest.raises(FederationError, match="'n' holds integers"):
        verified.weight_upload({"n": torch.tensor([3])}, 40.0, "client b")
    with pytest.raises(FederationError, match="numbers of 'n'"):
        verified.to_fixed_point({"n": torch.tensor([2**61])}, 3, "client b")


def test_whole_numbers_are_summed_exactly():
    plain = [{"n": torch.tensor([2**55 + i, -i])} for i in range(3)]
    vectors = [verified.pack_integers(verified.to_fixed_point(upload, 3, "")) for upload in plain]
    sums = verified.unpack_integers(verified.add_vectors(vectors), plain[0])
    assert sums["n"].tolist() == [3 * 2**55 + 3, -3]


def test_a_sum_of_another_layout_is_refused():
    with pytest.raises(FederationError, match="must have 6 numbers, got 5"):
        verified.unpack_integers(np.zeros(5, np.uint64), {"w": torch.zeros(2, 3)})


def test_a_state_beyond_the_bounds_is_refused():
    """A wrong mask, or a member's upload that is not clipped."""
    before = {"head": torch.zeros(4, 4)}
    verified.check_state(Channel(clip=1.0), make("fedavg"), before, {"head": torch.full((4, 4), 0.25)}, 3)
    for wrong in (0.26, torch.nan, torch.inf):
        with pytest.raises(FederationError, match="but channel.clip and noise allow 1;"):
            verified.check_state(Channel(clip=1.0), make("fedavg"), before, {"head": torch.full((4, 4), wrong)}, 3)


@pytest.mark.parametrize("method", ["fedavg", "fedot"])
def test_a_verified_run_ends_where_a_plain_one_does(method):
    plain, _, _ = run(Channel(), method)
    hidden, lines, _ = run(Channel(clip=10.0, verified=True), method)
    assert tensors.max_relative_difference(hidden.shared, plain.shared) < 1e-6
    assert "cosine" not in lines[0]
    assert lines[0]["clients"]["client-0"]["bytes_up"] == (4 * 16 + 1) * 8


def test_every_method_either_takes_a_sum_or_refuses_a_verified_one_by_name():
    kinds = {name: upload_sum(make(name)) for name in methods()}
    assert kinds["fedavg"] == "samples"
    assert kinds["fedot"] == "clients"
    assert kinds["tofa"] == "total"
    for name in ("promptfl-fedamp", "fens"):
        assert kinds[name] is None
    for name, kind in kinds.items():
        if kind is None:
            with pytest.raises(SettingsError, match=f"{name} aggregates single uploads"):
                check_channel(Channel(verified=True), make(name))


@dataclass(frozen=True)
class Liar(FedAvg):
    """Says that a mean will do, and takes the largest."""

    def aggregate(self, shared, uploads, weights, ids):
        return max(uploads, key=lambda upload: float(upload["head"].norm()))

    name = "liar"
    traits = Traits(needs=frozenset({"image", "text"}), privacy=PrivacyTraits(upload_sum="samples"))


def test_a_method_that_wrongly_says_a_sum_will_do_is_found_out():
    assert sum_gap(toy_world(make("fedavg"))) < 1e-6
    assert sum_gap(toy_world(Liar(lr=0.1))) > 1e-3


@dataclass(frozen=True)
class Loner:
    """Aggregates by the single uploads."""

    name = "loner"
    traits = Traits()

    def aggregate(self, shared, uploads, weights, ids):
        return max(uploads, key=lambda upload: upload["head"].norm())


def test_a_method_that_aggregates_single_uploads_refuses_a_verified_sum():
    with pytest.raises(SettingsError, match="loner aggregates single uploads .*PrivacyTraits\\(upload_sum"):
        check_channel(Channel(verified=True), Loner())
    check_channel(Channel(), Loner())
    assert upload_sum(make("fedavg")) == "samples"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clipp": 1.0}, "did you mean 'clip'"),
        ({"clip": -1.0}, "channel.clip must be at least 0, got -1.0"),
        ({"clip": math.nan}, "channel.clip must be finite and at least 0, got nan"),
        ({"noise_multiplier": 1.0}, "set channel.clip too"),
        ({"delta": 1.0}, "must be above 0 and below 1, got 1.0"),
        ({"quantise": "yes"}, "channel.quantise must be true or false, got 'yes'"),
        ({"quantise": True, "verified": True}, "do not go together"),
        ({"max_samples": 0}, "channel.max_samples must be at least 1, got 0"),
        ("on", "write a table"),
    ],
)
def test_settings_of_the_channel_are_checked(settings, message):
    with pytest.raises(SettingsError, match=message):
        build({"method": "fedavg", "channel": settings})


def test_honest_uploads_pass_the_norm_check_however_they_are_changed():
    sent = {"head": numbers(30, 40)}
    for channel in (
        Channel(clip=0.1),
        Channel(clip=0.1, noise_multiplier=3.0),
        Channel(clip=0.1, quantise=True),
        Channel(clip=0.1, noise_multiplier=0.01, quantise=True),
    ):
        feedback = {}
        for number in range(20):
            upload = {"head": sent["head"] + 5 * numbers(30, 40, seed=number) ** 3}
            draw = seeded_normal(seeds.generator("test", number))
            travels, feedback = UploadPipeline(channel).encode(upload, sent, feedback, draw)
            back = UploadPipeline(channel).decode(travels, sent)
            assert change_norm(upload_change(back, sent)) <= max_change_norm(channel, 1200)
