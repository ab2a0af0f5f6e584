"""The memory and the bytes it takes to train the image tower of a ViT-B/32 on ten clients.

    python benchmarks/finetune.py
    python benchmarks/finetune.py --batch 32 --methods moon-tower

The weights are random and the pictures made: neither changes what is held. Each method runs in a
process of its own, one client after the other, with a checkpoint after every round.
"""

import argparse
import resource
import sys
from hashlib import sha256
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
from figures import report
from PIL import Image

from fedvlm.core import Frozen, make
from fedvlm.encoders.images import Pixels
from fedvlm.encoders.lazy_rows import stream_images
from fedvlm.engines.batched import Batched
from fedvlm.engines.client import ClientRows, World
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.state import Plan, pack_state
from fedvlm.maths.image_tower import ImageTower
from fedvlm.runner import forecast as room
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import write_tensors

METHODS = ("fedavg-tower", "moon-tower", "fedavg-tower blocks=2", "lora", "vpt")
CLASSES, HELD = 7, 2


class Made:
    """Pictures of noise, drawn by their number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def name(self, row: int) -> str:
        return f"made-{row}"

    def read(self, row: int) -> bytes:
        noise = np.random.Generator(np.random.PCG64(row)).integers(0, 256, (64, 64, 3), np.uint8)
        data = BytesIO()
        Image.fromarray(noise).save(data, "PNG")
        return data.getvalue()


def vit_b_32() -> ImageTower:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    model = CLIPVisionModelWithProjection(CLIPVisionConfig()).eval().requires_grad_(False)
    return ImageTower(model, lambda pixels: model(pixel_values=pixels).image_embeds)


def federation(words: str, clients: int, batch: int, rounds: int) -> World:
    name, *odd = words.split()
    settings = {key: int(value) for key, value in (option.split("=") for option in odd)}
    method = make(name, batch_size=batch, rounds=rounds, **settings)
    text = torch.nn.functional.normalize(torch.randn(CLASSES, 512), dim=1)
    classes = tuple(f"class {i}" for i in range(CLASSES))
    frozen = Frozen(classes, 512, 100.0, text, image_tower=vit_b_32())
    rows_per_client = batch + 2 * HELD  # one step for everyone
    source = Made(clients * rows_per_client)
    content = [sha256(source.read(row)).hexdigest() for row in range(len(source))]
    x = stream_images(source, np.arange(len(source)), content, Pixels(size=224, crop=(224, 224)))
    members = {}
    for client in range(clients):
        rows = np.arange(client * rows_per_client, (client + 1) * rows_per_client)
        members[f"client-{client}"] = ClientRows(rows[:batch], rows[batch:-HELD], rows[-HELD:])
    y = torch.arange(len(source)) % CLASSES
    return World(method, frozen, 0, x=x, y=y, members=members)


def measure(words: str, clients: int, batch: int, rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = federation(words, clients, batch, rounds)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    settings = Settings(world.method, workers=1)
    guess = room.estimate(settings, world.frozen, world.x.shape[1:], clients)
    state, initial_local = initial_state(world)
    sent: list[tuple[int, int]] = []
    start_time = perf_counter()
    with TemporaryDirectory() as folder:

        def on_round(state: object, line: dict) -> None:
            clients = line["clients"].values()
            sent.append(
                (sum(client["bytes_up"] for client in clients), sum(client["bytes_down"] for client in clients))
            )
            write_tensors(Path(folder) / "state.safetensors", *pack_state(state))

        plan = Plan(tuple(world.members), ())
        run_rounds(world, Batched(world, workers=1), plan, state, initial_local, on_round)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    up, down = sent[0]
    seconds = (perf_counter() - start_time) / rounds
    report(
        f"{words:24} {guess.trained // 4:>12,} parameters {up / 1e6:>9.2f} MB up "
        f"{down / 1e6:>9.2f} MB down a round; peak {peak:5.2f} GB ({before:.2f} before), expected "
        f"{before + guess.total / 1e9:5.2f} GB; {seconds:.0f} s a round",
        words,
        **{"MB up": up / 1e6, "MB down": down / 1e6, "GB": peak, "s a round": seconds},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="also the training rows of a client")
    parser.add_argument("--rounds", type=int, default=2, help="MOON holds most in the second")
    args = parser.parse_args()
    print(f"{args.clients} clients, batch {args.batch}, {args.rounds} rounds")
    for words in args.methods:
        process = get_context("spawn").Process(target=measure, args=(words, args.clients, args.batch, args.rounds))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
