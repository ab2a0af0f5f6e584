"""What an encoder answers wrongly stops the run and costs no finished batch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvlm.encoders import Vectors
from fedvlm.encoders import cache as cache
from fedvlm.errors import EncoderError
from tests.helpers.counting import (
    Counting,
    numbered,
    run,
)


class Spoilt(Counting):
    """Answers wrongly about one image."""

    spoil: Any = None

    def embed(self, batch: Sequence[Any], patches: bool) -> Vectors:
        numbers = [int(x[0]) for x in batch]
        answer = super().embed(batch, patches)
        return self.spoil(answer, numbers.index(50)) if 50 in numbers else answer


def with_value(value: float) -> Any:
    def spoil(answer: Vectors, at: int) -> Vectors:
        answer.pooled[at, slice(None) if value == 0 else 2] = value
        return answer

    return spoil


def with_bad_patch(answer: Vectors, at: int) -> Vectors:
    assert answer.patches is not None
    answer.patches[at, 1, 1] = np.inf
    return answer


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (with_value(np.nan), "NaN or inf for image-50.png"),
        (with_value(-np.inf), "NaN or inf for image-50.png"),
        (with_value(0), "zeros for image-50.png"),
        (lambda answer, _: replace(answer, pooled=answer.pooled[:, :-1]), r"\(32, 15\)"),
        (lambda answer, _: replace(answer, pooled=answer.pooled[1:]), r"\(31, 16\)"),
        (lambda answer, _: replace(answer, pooled=answer.pooled[0]), r"shape \(16,\)"),
        (lambda answer, _: replace(answer, patches=None), r"shape \(\)"),
        (lambda answer, _: replace(answer, patches=answer.patches[:, :, 1:]), r"\(32, 15\)"),
        (with_bad_patch, "in a patch for image-50.png"),
    ],
)
def test_unsound_answer_stops_and_keeps_what_was_done(tmp_path: Path, spoil: Any, words: str) -> None:
    encoder = Spoilt()
    encoder.spoil = spoil
    with pytest.raises(EncoderError, match=words):
        run(numbered(70), encoder, tmp_path, patches=True)
    mended = Counting()
    run(numbered(70), mended, tmp_path, patches=True)
    assert sorted(mended.images) == list(range(32, 70))


def test_encoder_error_keeps_what_was_done(tmp_path: Path) -> None:
    def spoil(answer: Vectors, at: int) -> Vectors:
        raise EncoderError("the network is down")

    encoder = Spoilt()
    encoder.spoil = spoil
    with pytest.raises(EncoderError, match="network"):
        run(numbered(70), encoder, tmp_path)
    assert cache.list_entries(tmp_path)[0].rows == 32


def test_vector_too_long_for_float16_is_refused(tmp_path: Path) -> None:
    encoder = Spoilt()
    encoder.spoil = with_value(1e6)
    with pytest.raises(EncoderError, match=r"NaN or inf for image-50.png"):
        run(numbered(70), encoder, tmp_path, precision="float16")
