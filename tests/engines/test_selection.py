"""Choosing a round compares what would be reported: a state after its adaptation."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedvlm import parts
from fedvlm.core import TrainingTraits, Traits, make
from fedvlm.engines.batched import Batched
from fedvlm.engines.flower.engine import InProcessEngine
from fedvlm.engines.loop import finish_training, initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.evaluate.metrics import mean_accuracy
from fedvlm.testing import toy_world


@dataclass(frozen=True)
class Contrary:
    """Its rounds turn the text head away from the classes; its adaptation turns it back.

    After n rounds it is wrong by n turns before `adapt` and, if n is `good`, right after it.
    """

    rounds: int = 4
    good: int = 3

    def init(self, frozen):
        return {"turn": torch.zeros(1)}, {"back": torch.zeros(1)}

    def update(self, frozen, sent, local, client):
        return {"turn": sent["turn"] + 1}, local

    def adapt(self, frozen, sent, local, client):
        return {"back": torch.where(sent["turn"] == self.good, -sent["turn"], -1 - sent["turn"])}

    def predict(self, frozen, sent, local, x):
        wrong = ((sent["turn"] + local["back"]) != 0).float()
        sign = 1 - 2 * wrong  # the least likely class of a wrong state is its answer
        return sign * frozen.scale * x @ frozen.text.mT

    name = "contrary"
    traits = Traits(needs=frozenset({"image"}), training=TrainingTraits(memory=frozenset({"turn", "back"})))
    send, aggregate = parts.send_all, parts.uniform_mean


ENGINES = {"single": Sequential, "batched": Batched, "messages": InProcessEngine}


def learn(world, engine="single", lines=None, **plan):
    ids = sorted(world.members)
    full_plan = Plan(tuple(ids[:-1]), (ids[-1],), **plan)
    state, initial_local = initial_state(world)
    keep = [] if lines is None else lines
    runner = ENGINES[engine](world)
    try:
        state = run_rounds(world, runner, full_plan, state, initial_local, lambda state, line: keep.append(line))
        outcome = finish_training(world, runner, full_plan, state, initial_local)
    finally:
        runner.close()
    return outcome, mean_accuracy(outcome.scores, ids[:-1], "validation")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("selection", ["validation", "oracle"])
def test_the_round_whose_adaptation_is_best_is_kept(engine, selection):
    world = toy_world(Contrary())
    outcome, score = learn(world, engine, selection=selection)
    assert outcome.round == 3
    assert score > 0.8
    assert all(local["back"].item() == -3 for local in outcome.local.values())


WITH_ADAPT = ("fedgh", "promptfl-ft", "promptfl-fedamp", "pfedprompt", "tofa", "clip-gda")


@pytest.mark.parametrize("name", WITH_ADAPT)
def test_what_is_reported_of_the_chosen_round_is_no_worse_than_of_the_last(name):
    method = make(name)
    small = {"rounds": min(method.rounds, 4)}
    small |= {key: 1 for key in ("local_epochs", "min_class_samples") if hasattr(method, key)}
    world = toy_world(replace(method, **small))
    assert learn(world, selection="validation")[1] >= learn(world, selection="last")[1]


def test_a_method_of_one_exchange_keeps_it_whatever_the_selection():
    world = toy_world(Contrary(rounds=1, good=0))  # better without: but then nothing was exchanged
    for selection in ("last", "validation", "oracle"):
        outcome, _ = learn(world, selection=selection)
        assert outcome.round == 1
        assert outcome.shared["turn"].item() == 1


def test_an_adaptation_to_choose_by_leaves_the_training_as_it_was():
    world = toy_world(make("promptfl-ft", rounds=3, local_epochs=1))
    lines = {"validation": [], "last": []}
    for selection, selected in lines.items():
        learn(world, "messages", selected, selection=selection)
        for line in selected:
            del line["seconds"]
    assert lines["validation"] == lines["last"]
