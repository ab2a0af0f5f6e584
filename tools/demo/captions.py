"""What may be said of a drawing, and of which others it is true."""

import random
import re
from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray

from .concepts import Concept

PROMPT = "a picture of a {}"
TEMPLATES = (PROMPT, PROMPT, "{}", "a {}", "a {} emoji", "an icon of a {}", "a drawing of a {}")


def sentence(phrase: str) -> str:
    """In one of the templates, with a full stop half of the time: prompts end in either way."""
    return random.choice(TEMPLATES).format(phrase) + random.choice(("", "."))


def phrases_of(concept: Concept) -> list[str]:
    """What may be said of a concept; the name most often, the class word no more than another."""
    name = re.sub(r"^(an?|the) ", "", concept.name)
    words = [k for k in concept.keywords if len(k) > 1 and not k.isdigit()][:12]
    extra = [w for w in (concept.label, concept.group) if w]
    return list(dict.fromkeys([name, *extra, *words]))


class Captions:
    """Which drawings show which concept, what may be said of it, and what is true of others."""

    def __init__(self, owners: NDArray[np.int64], concepts: list[Concept]) -> None:
        self.concepts = concepts
        self.drawings: dict[int, list[int]] = defaultdict(list)
        for row, owner in enumerate(owners):
            self.drawings[int(owner)].append(row)
        self.drawn = sorted(self.drawings)
        self.phrases = [phrases_of(concepts[owner]) for owner in self.drawn]
        self.natural = [  # without the words for class and subgroup that are no CLDR keywords
            [p for p in phrases if p in (phrases[0], *concepts[owner].keywords)]
            for owner, phrases in zip(self.drawn, self.phrases, strict=True)
        ]
        everything = dict.fromkeys(phrase for phrases in self.phrases for phrase in phrases)
        self.phrase_ids = {phrase: index for index, phrase in enumerate(everything)}
        # A caption that is also true of another picture of the batch must not push it away.
        self.truth = torch.zeros(len(self.drawn), len(self.phrase_ids), dtype=torch.bool)
        for position, phrases in enumerate(self.phrases):
            self.truth[position, [self.phrase_ids[phrase] for phrase in phrases]] = True
        # Emoji concepts have several drawings and the better captions: seen more often.
        odds = np.array([1.0 if concepts[owner].code else 0.04 for owner in self.drawn])
        odds *= np.array([1.6 if concepts[owner].label else 1.0 for owner in self.drawn])
        self.odds = odds / odds.sum()

    def draw_caption(self, position: int) -> tuple[str, int]:
        """A caption for a concept and the number of the phrase in it; the name most often."""
        phrases = self.phrases[position]
        phrase = phrases[0] if random.random() < 0.35 else random.choice(phrases)
        return sentence(phrase), self.phrase_ids[phrase]
