"""The card beside a saved classifier: what a reader must know before using it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedvlm.channel.settings import Channel
from fedvlm.classifier.personalised import Personalised
from fedvlm.maths.calibration import largest_coverage
from fedvlm.storage.files import write_file

ONNX_FILE = "classifier.onnx"


@dataclass(frozen=True)
class ClassifierOrigin:
    """Where a classifier comes from, and what was measured of it."""

    about: Mapping[str, Any]  # data, rows, channel, versions, commit, dirty: as a manifest has them
    training: str
    rows: int  # that it was tested on
    n_correct: int


def model_card(classifier: Personalised, story: ClassifierOrigin, name: str, onnx: bool = False) -> str:
    source, frozen = story.about, classifier.frozen
    settings = "\n".join(f"| `{key}` | {json.dumps(value)} |" for key, value in asdict(classifier.method).items())
    channel = source["identity"]["channel"]
    facts = {
        "method": f"`{classifier.method.name}`",
        "client": f"`{classifier.client}`",
        "encoder": f"`{classifier.encoder}` (name and fingerprint)",
        "data": f"`{source['data']}`, rows `{source['rows'][:16]}`",
        "training": f"`{story.training}`, seed {frozen.seed}",
        "channel": f"`{json.dumps(channel)}`" if channel != asdict(Channel()) else "off",
        "fedvlm": f"{source['versions']['fedvlm']}, commit {source['commit'] or 'unknown'}"
        + (", changed since" if source["dirty"] else ""),
    }
    about = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    private = (
        "It holds tensors that were fitted to this client's rows and had not left the client: "
        "treat the\nfolder as you treat the rows."
        if classifier.local
        else "It holds no tensor of this client's own: all clients of the run have the same."
    )
    head = (
        f"\n`{ONNX_FILE}` takes embeddings (rows, {frozen.dim}) of that encoder, of any length, and "
        "gives `logits` and `probabilities`.\n"
        if onnx
        else ""
    )
    return f"""# {classifier.method.name} for {classifier.client}

A classifier over {len(frozen.classes)} classes on top of a frozen encoder, personalised for one
client of a federation. It is of use with that encoder only: another fingerprint is refused.

| | |
|---|---|
{about}

On {story.rows} test rows of this client it was right {story.n_correct} times
({story.n_correct / max(1, story.rows):.1%}). Nothing is known of rows from elsewhere.

{_calibration_text(classifier)}

{private}

## Use
```
fedvlm predict {name} {"IMAGES" if "@" in classifier.encoder else "TABLE  # of embeddings"}
```
```python
from fedvlm import Personalised
classifier = Personalised.from_pretrained("{name}")
classifier.predict(embeddings)  # (rows, {frozen.dim}) from the encoder above
```
{head}
## Classes
{", ".join(frozen.classes)}

## Settings
| setting | value |
|---|---|
{settings}
"""


def _calibration_text(classifier: Personalised) -> str:
    """What its probabilities and sets are worth."""
    calibration = classifier.calibration
    if calibration is None or not calibration.rows:
        return "Its probabilities are not calibrated: no validation rows were at hand."
    text = f"Its probabilities are as warm as {calibration.rows} validation rows have shown."
    count = len(calibration.scores)
    if count < 2:
        return f"{text} No rows were set\naside, so it promises no coverage."
    return (
        f"{text} {count} rows that nothing\nelse has read were set aside: `--coverage` may be up "
        f"to {largest_coverage(count):g}, for images like this client's."
    )


def save_with_card(classifier: Personalised, story: ClassifierOrigin, folder: Path) -> None:
    """A classifier and its card."""
    classifier.save_pretrained(folder)
    write_file(folder / "README.md", model_card(classifier, story, folder.name).encode())
