"""What the demo is judged by: accuracies of heads on frozen features, and a few words."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from transformers import CLIPModel, CLIPTokenizer

from .captions import PROMPT
from .images import Demo
from .model import image_features, text_features
from .sets import DOMAINS

EVERYTHING = "zero-shot, all rows"
# Words that are no class name, with the class they belong to: does the text tower know words?
WORDS = {
    word: label
    for label, words in {
        "mammal": "zebra elephant",
        "bird": "penguin owl",
        "sea animal": "shark octopus",
        "insect": "butterfly ant",
        "fruit": "banana cherries",
        "vegetable": "carrot broccoli",
        "meal": "pizza",
        "drink": "beer",
        "plant": "tree",
        "vehicle": "truck train",
        "building": "castle",
        "clothing": "shoe",
        "face": "grinning",
        "hand": "fist",
        "person": "teacher",
        "tool": "hammer",
    }.items()
    for word in words.split()
}


@dataclass(frozen=True)
class Scores:
    """Per cent for each measure and domain, and the words that are nearest a wrong class."""

    accuracy: dict[str, dict[str, float]]
    missed: dict[str, str]

    @property
    def words(self) -> str:
        return f"{len(WORDS) - len(self.missed)}/{len(WORDS)}"

    def brief(self) -> str:
        """One line, for a log."""
        cells = [
            f"{name} {' '.join(f'{v:.0f}' for v in row.values())} ({np.mean([*row.values()]):.1f})"
            for name, row in self.accuracy.items()
        ]
        return " | ".join([*cells, f"words {self.words}"])

    def table(self) -> str:
        """The numbers as the model card has them."""
        names = [name for name in self.accuracy if name != EVERYTHING]
        lines = [f"| domain | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
        for domain in DOMAINS:
            cells = [f"{self.accuracy[name][domain]:.1f}" for name in names]
            lines.append(f"| {domain} | {' | '.join(cells)} |")
        means = [f"{np.mean([*self.accuracy[name].values()]):.1f}" for name in names]
        lines.append(f"| mean | {' | '.join(means)} |")
        whole = " / ".join(f"{v:.1f}" for v in self.accuracy[EVERYTHING].values())
        missed = ", ".join(f"{word} (nearest {name})" for word, name in self.missed.items())
        return "\n".join(
            [*lines, f"{EVERYTHING}: {whole}", f"words: {self.words}; missed: {missed or 'none'}"]
        )


@torch.no_grad()
def gate(demo: Demo, model: CLIPModel, tokenizer: CLIPTokenizer, seeds: int) -> Scores:
    """Zero-shot, probe on own rows, heads of other and of all domains: means over the splits."""
    model.eval()
    prompts = text_features(model, tokenizer, [PROMPT.format(name) for name in demo.classes])
    named = text_features(model, tokenizer, [PROMPT.format(word) for word in WORDS])
    features = {d: image_features(model, demo.pixels[d]).numpy() for d in DOMAINS}
    model.train()
    guesses = {d: (features[d] @ prompts.numpy().T).argmax(1) for d in DOMAINS}
    accuracy = {EVERYTHING: {d: hits(guesses[d], demo.labels[d]) for d in DOMAINS}}
    splits = [{d: demo.split(d, seed) for d in DOMAINS} for seed in range(seeds)]
    results: dict[str, dict[str, list[float]]] = {}

    def note(name: str, domain: str, value: float) -> None:
        results.setdefault(name, {}).setdefault(domain, []).append(value)

    for split in splits:
        train = {d: (features[d][split[d][0]], demo.labels[d][split[d][0]]) for d in DOMAINS}
        shared = head([*train.values()])
        for domain in DOMAINS:
            _, val, test = split[domain]
            x, y = features[domain], demo.labels[domain]
            note("zero-shot", domain, hits(guesses[domain][test], y[test]))
            heads = [head([train[domain]], c) for c in (3, 10, 30, 100)]
            best = max(heads, key=lambda one: one.score(x[val], y[val]))
            note("probe", domain, hits(best.predict(x[test]), y[test]))
            others = head([rows for d, rows in train.items() if d != domain])
            note("head of the other three", domain, hits(others.predict(x[test]), y[test]))
            note("head of all four", domain, hits(shared.predict(x[test]), y[test]))
    for name, row in results.items():
        accuracy[name] = {domain: float(np.mean(values)) for domain, values in row.items()}
    near = [demo.classes[i] for i in (named @ prompts.T).argmax(1)]
    missed = {w: n for (w, c), n in zip(WORDS.items(), near, strict=True) if c != n}
    return Scores(accuracy, missed)


def head(
    rows: list[tuple[NDArray[np.float32], NDArray[np.int64]]], c: float = 10
) -> LogisticRegression:
    x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
    return LogisticRegression(C=c, max_iter=300).fit(x, y)


def hits(guess: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """Accuracy in per cent."""
    return 100 * float((guess == labels).mean())
