"""The settings of the training stages; the defaults are those of the shipped model."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recipe:
    steps: int = field(default=5000, metadata={"help": "of stage 1, both towers"})
    align_steps: int = field(default=2000, metadata={"help": "of stage 3, both towers again"})
    align_pace: float = field(default=0.3, metadata={"help": "share of the rates in stage 3"})
    batch: int = field(default=48, metadata={"help": "concepts per step, two images each"})
    rate: float = field(default=1.5e-3, metadata={"help": "of AdamW, in all stages"})
    text_steps: int = field(default=400, metadata={"help": "of stage 2, the text tower alone"})
    class_words: float = field(
        default=0.0, metadata={"help": "share of class words among the other words of text stages"}
    )
    checkpoint_steps: int = field(default=200, metadata={"help": "steps between checkpoints"})
    seed: int = field(default=0, metadata={"help": "of all that is drawn at random"})
