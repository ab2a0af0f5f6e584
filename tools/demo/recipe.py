"""The settings of both training stages; the defaults are those of the shipped model."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recipe:
    steps: int = field(default=5000, metadata={"help": "of stage 1, both towers"})
    stop: int | None = field(
        default=None, metadata={"help": "leave the schedule of --steps at this step"}
    )
    batch: int = field(default=48, metadata={"help": "concepts per step, two images each"})
    rate: float = field(default=1.5e-3, metadata={"help": "of AdamW, in both stages"})
    text_steps: int = field(default=400, metadata={"help": "of stage 2, the text tower alone"})
    class_words: float = field(
        default=0.0, metadata={"help": "share of class words among the other words of stage 2"}
    )
    every: int = field(default=500, metadata={"help": "steps between checkpoints"})
    seed: int = field(default=0, metadata={"help": "of all that is drawn at random"})
