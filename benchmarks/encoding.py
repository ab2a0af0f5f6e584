"""How much of the bare model's speed is left when pictures come from JPEG and go to the cache.

Run: python benchmarks/encoding.py [--transformers 500]
The model is a CLIP ViT-B/32 vision tower with random weights, the pictures are 640 x 480 JPEG.
Both sides run in this process, in turns, so that the ratio holds on a busy machine too.
With --transformers: so many JPEGs through a ViT-B/16 of random weights, beside plain transformers (Pillow, its image
processor and its model in inference mode, batches of 32), in turns of a hundred.
"""

import argparse
import sys
from collections.abc import Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from figures import report
from numpy.typing import NDArray
from PIL import Image

from fedvlm.data.table import Dataset
from fedvlm.encoders import BATCH, Vectors
from fedvlm.encoders.cache import lock_entry
from fedvlm.encoders.cache.embed import embed
from fedvlm.errors import EncoderError

PICTURES, TURNS = 192, 2
WANTED_RATIO, WANTED_MS = 0.85, 100


def preprocess(picture: Image.Image) -> NDArray[np.float32]:
    """Short side to 224, centre, mean and deviation: what CLIP does."""
    width, height = picture.size
    short = min(width, height)
    scaled = picture.resize((width * 224 // short, height * 224 // short), Image.Resampling.BICUBIC)
    left_edge, top = (scaled.width - 224) // 2, (scaled.height - 224) // 2
    pixels = np.asarray(scaled.crop((left_edge, top, left_edge + 224, top + 224)), dtype=np.float32) / 255
    return np.ascontiguousarray(((pixels - 0.45) / 0.27).transpose(2, 0, 1))


class Tower:
    name, dim, scale = "ViT-B/32 of random weights", 512, 100.0
    offers, identity = frozenset({"image"}), dict[str, str]()

    def __init__(self) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

        torch.manual_seed(0)
        config = CLIPVisionConfig(patch_size=32, projection_dim=self.dim)
        self.model = CLIPVisionModelWithProjection(config).eval()
        self.preprocess, self.seconds = preprocess, 0.0

    @torch.inference_mode()
    def embed(self, batch: Sequence[Any], patches: bool) -> Vectors:
        start = perf_counter()
        pixels = torch.from_numpy(np.stack(list(batch)))
        vectors = Vectors(self.model(pixel_values=pixels).image_embeds.numpy(), None)
        self.seconds += perf_counter() - start
        return vectors

    def embed_text(self, sentences: Sequence[str]) -> torch.Tensor:
        raise EncoderError("the benchmark encodes pictures only")


class Jpegs:
    """Smooth shapes with some noise: about as many bytes as a photograph has."""

    def __init__(self, first: int, count: int) -> None:
        self.data = [self.make(first + number) for number in range(count)]

    @staticmethod
    def make(number: int) -> bytes:
        rng, buffer = np.random.default_rng(number), BytesIO()
        coarse = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC), dtype=np.float32)
        noisy = smooth + rng.normal(0, 6, smooth.shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
        return buffer.getvalue()

    def __len__(self) -> int:
        return len(self.data)

    def name(self, row: int) -> str:
        return f"{row}.jpg"

    def read(self, row: int) -> bytes:
        return self.data[row]


def seconds(action: Any) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


def ratio(root: Path) -> float:
    """The bare model's time over the time from JPEG to unit vectors, start of workers included."""
    tower, bare, cached_seconds, inside = Tower(), 0.0, 0.0, 0.0
    tensors = [preprocess(Image.open(BytesIO(Jpegs.make(n))).convert("RGB")) for n in range(BATCH)]
    tower.embed(tensors, False)
    for turn in range(TURNS):
        source = Jpegs(turn * PICTURES, PICTURES)
        empty = np.array([""] * PICTURES)
        labels = np.zeros(PICTURES, dtype=np.int64)
        data = Dataset("jpegs", ("shape",), source, labels, empty, empty, empty)
        batches = PICTURES // BATCH
        bare += seconds(lambda n=batches: [tower.embed(tensors, False) for _ in range(n)])
        before = tower.seconds
        cached_seconds += seconds(lambda d=data: embed(d, tower, cache=root, workers=1))
        inside += tower.seconds - before
    rates = [TURNS * PICTURES / duration for duration in (bare, cached_seconds)]
    size = sum(map(len, source.data)) / len(source) / 1000
    print(f"{TURNS * PICTURES} JPEGs of 640 x 480, {size:.0f} kB each, 1 worker process")
    print(f"images per second: bare model {rates[0]:.2f}, with decoding and cache {rates[1]:.2f}")
    print(f"bare time {bare / cached_seconds:.1%}, time inside the model {inside / cached_seconds:.1%} of the whole")
    return min(bare, inside) / cached_seconds  # load that comes and goes can flatter either, hardly both


def loading(root: Path) -> float:
    """Milliseconds from digests to a tensor of 10,000 x 512, opening the cache included."""
    x = np.random.default_rng(0).normal(size=(10_000, 512)).astype(np.float32)
    digests = [sha256(row.tobytes()).digest() for row in x]

    def read() -> torch.Tensor:
        with lock_entry(root, "d" * 64, "none") as (entry, _):
            table = entry.ensure_table("pooled.float32", "float32", (512,))
            if not len(table):
                table.append(digests, x)
            return torch.from_numpy(table.read(digests))

    assert torch.equal(read(), torch.from_numpy(x))
    return 1000 * float(np.median([seconds(read) for _ in range(9)]))


def against_transformers(root: Path, count: int) -> None:
    """Seconds from JPEG to embeddings by plain transformers and by fedvlm, in turns, and the lowest cosine."""
    from transformers import ViTConfig, ViTModel
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    from fedvlm.encoders import open_encoder

    torch.manual_seed(0)
    ViTModel(ViTConfig(), add_pooling_layer=False).save_pretrained(root / "vit")
    ViTImageProcessorPil().save_pretrained(root / "vit")
    encoder = open_encoder(f"hf:{root / 'vit'}")
    model = ViTModel.from_pretrained(root / "vit", add_pooling_layer=False).eval()
    processor = ViTImageProcessorPil.from_pretrained(root / "vit")

    @torch.inference_mode()
    def plain(source: Jpegs) -> torch.Tensor:
        rows = []
        for first in range(0, len(source), BATCH):
            pictures = [Image.open(BytesIO(data)).convert("RGB") for data in source.data[first : first + BATCH]]
            rows.append(model(**processor(pictures, return_tensors="pt")).last_hidden_state[:, 0])
        return torch.nn.functional.normalize(torch.cat(rows), dim=1)

    def ours(source: Jpegs) -> torch.Tensor:
        empty, labels = np.array([""] * len(source)), np.zeros(len(source), dtype=np.int64)
        data = Dataset("jpegs", ("shape",), source, labels, empty, empty, empty)
        return embed(data, encoder, cache=root / "cache", workers=1).embedded.x

    walls, cpus, cosine = [0.0, 0.0], [0.0, 0.0], 1.0
    plain(Jpegs(count, 2)), ours(Jpegs(count, 2))
    for first in range(0, count, 100):
        source, results = Jpegs(first, min(100, count - first)), []
        for number, encode in enumerate((plain, ours)):
            cpu, wall = process_time(), perf_counter()
            results.append(encode(source))
            walls[number] += perf_counter() - wall
            cpus[number] += process_time() - cpu
        cosine = min(cosine, float((results[0] * results[1]).sum(1).min()))
    rates = [count / wall for wall in walls]
    report(
        f"ViT-B/16, {count} JPEGs, {torch.get_num_threads()} threads: transformers {rates[0]:.2f} images/s, ours "
        f"{rates[1]:.2f} ({walls[0] / walls[1]:.2f} times; processor time of this process {cpus[0] / cpus[1]:.2f} "
        f"times); lowest cosine {cosine:.7f}",
        f"{count} JPEGs through ViT-B/16, beside transformers",
        **{"images/s": rates[1], "ours: transformers": walls[0] / walls[1], "lowest cosine": cosine},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transformers", type=int, default=0, metavar="IMAGES")
    args = parser.parse_args()
    if args.transformers:
        with TemporaryDirectory() as root:
            against_transformers(Path(root), args.transformers)
        return 0
    with TemporaryDirectory() as root:
        took = loading(Path(root))
        report(
            f"loading 10,000 x 512: {took:.0f} ms (wanted: below {WANTED_MS})",
            "loading 10,000 x 512 from the cache",
            ms=took,
        )
        ratio_of_cache = ratio(Path(root))
        report(
            f"throughput kept: {ratio_of_cache:.1%} of the bare model (wanted: {WANTED_RATIO:.0%})",
            "from JPEG to the cache, beside the bare model",
            **{"% of its throughput": 100 * ratio_of_cache},
        )
    return int(ratio_of_cache < WANTED_RATIO or took > WANTED_MS)


if __name__ == "__main__":
    sys.exit(main())
