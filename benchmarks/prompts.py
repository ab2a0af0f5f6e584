"""What a local step of FedOTP costs beside the plain way, and what a large patch cache takes.

Run with `python benchmarks/prompts.py [step | cache]`; both are processes of their own. The text
tower has the shape of CLIP ViT-B/16 and random weights. The plain way encodes all 77 positions of
every class and prompt, and scales its transport plans by dense diagonal matrices. Both run in turns
on one thread; the step of either gives the same gradient. The second part trains ten clients on
10,000 images of 196 patches (2 GB of float16, memory-mapped) and prints the most memory that all
processes held at once, a page that several of them map counted once.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter, process_time
from zlib import crc32

import numpy as np
import psutil
import torch
from figures import report
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm, linear, normalize
from transport import scaling

from fedvlm import tensors
from fedvlm.core import Client, Frozen, make
from fedvlm.encoders.lazy_rows import check_and_map
from fedvlm.engines.batched import Batched
from fedvlm.engines.client import ClientRows, World
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.state import Plan
from fedvlm.maths.text_tower import ACTIVATIONS, Affine, Layer, TextTower
from fedvlm.testing import make_test_client

WIDTH, LAYERS, LENGTH, PATCHES, BATCH = 512, 12, 77, 196, 32


def tower(classes: int, longest: int = 5) -> TextTower:
    """The shape of CLIP's text tower, with class names of 2 to `longest` tokens."""
    draw = torch.Generator().manual_seed(0)

    def affine(out: int, into: int) -> Affine:
        return Affine(torch.randn(out, into, generator=draw) * into**-0.5, torch.zeros(out))

    norm = Affine(torch.ones(WIDTH), torch.zeros(WIDTH))
    layers = tuple(
        Layer(
            norm,
            affine(3 * WIDTH, WIDTH),
            affine(WIDTH, WIDTH),
            norm,
            affine(4 * WIDTH, WIDTH),
            affine(WIDTH, 4 * WIDTH),
        )
        for _ in range(LAYERS)
    )
    return TextTower(
        start=0.02 * torch.randn(WIDTH, generator=draw),
        template="{}",
        prefix=torch.zeros(0, WIDTH),
        suffixes=0.02 * torch.randn(classes, longest, WIDTH, generator=draw),
        ends=1 + torch.arange(classes) % (longest - 1),
        positions=0.01 * torch.randn(LENGTH, WIDTH, generator=draw),
        layers=layers,
        final=norm,
        projection=torch.randn(WIDTH, WIDTH, generator=draw) * WIDTH**-0.5,
        heads=8,
        eps=1e-5,
        activation="quick_gelu",
    )


def plain_features(text: TextTower, prompts: Tensor) -> Tensor:
    """(prompts, classes, dim): every class with every prompt as a sequence of 77 positions."""
    count, vectors, _ = prompts.shape
    classes, longest, _ = text.suffixes.shape
    filler = text.suffixes.new_zeros(count, classes, LENGTH - 1 - vectors - longest, WIDTH)
    x = torch.cat(
        [
            text.start.expand(count, classes, 1, WIDTH),
            prompts[:, None].expand(count, classes, vectors, WIDTH),
            text.suffixes.expand(count, classes, longest, WIDTH),
            filler,
        ],
        dim=2,
    ).flatten(0, 1)
    x = x + text.positions
    for layer in text.layers:
        qkv = linear(layer_norm(x, (WIDTH,), *layer.norm1, text.eps), *layer.qkv)
        q, k, v = (tensor.unflatten(-1, (text.heads, -1)).transpose(1, 2) for tensor in qkv.chunk(3, dim=-1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(attended.transpose(1, 2).flatten(2), *layer.out)
        wide = linear(layer_norm(x, (WIDTH,), *layer.norm2, text.eps), *layer.up)
        x = x + linear(ACTIVATIONS[text.activation](wide), *layer.down)
    end_positions = (1 + vectors + text.ends).repeat(count)
    last = layer_norm(x[torch.arange(len(x)), end_positions], (WIDTH,), *text.final, text.eps)
    return normalize(linear(last, text.projection), dim=-1).unflatten(0, (count, classes))


def plain_step(frozen: Frozen, prompts: Tensor, client: Client) -> Tensor:
    """The gradient of one minibatch with respect to both prompts."""
    assert frozen.text_tower is not None
    prompts = prompts.clone().requires_grad_()
    text = plain_features(frozen.text_tower, prompts)
    patches = normalize(client.x[client.order[0]].float(), dim=-1)
    cosine = torch.einsum("nkd,bvd->bknv", text, patches)
    plan = scaling(cosine.detach(), 0.8, 0.1, diagonal=True)
    loss = cross_entropy(frozen.scale * (plan * cosine).sum(dim=(2, 3)), client.y[client.order[0]])
    return torch.autograd.grad(loss, prompts)[0]


def step(classes: int = 37, repeats: int = 3) -> None:
    frozen = Frozen(tuple(map(str, range(classes))), WIDTH, 100.0, None, text_tower=tower(classes))
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, PATCHES, WIDTH, generator=draw).half()
    y = torch.randint(classes, (BATCH,), generator=draw)
    client = make_test_client(x, y, torch.arange(BATCH)[None], x[:0], y[:0])
    clients = make_test_client(x[None], y[None], torch.arange(BATCH)[None, None], x[None, :0], y[None, :0])
    method = make("fedotp", lr=1.0, momentum=0.0, weight_decay=0.0)
    shared, local = method.init(frozen)
    stacked = ({key: value[None] for key, value in part.items()} for part in (shared, local))
    sent, stacked_local = stacked
    fast, slow = [], []
    for _ in range(repeats):
        start_time = process_time()
        upload, after = method.update_many(frozen, sent, stacked_local, clients)
        fast.append(process_time() - start_time)
        start_time = process_time()
        gradient = plain_step(frozen, torch.stack([shared["prompt"], local["own"]]), client)
        slow.append(process_time() - start_time)
    gradients = torch.stack([sent["prompt"] - upload["prompt"], stacked_local["own"] - after["own"]])[:, 0]
    gap = tensors.max_relative_difference({"": gradients}, {"": gradient})
    report(
        f"K={classes} batch {BATCH}: a step {median(slow):.2f} s plain, {median(fast):.2f} s ours, "
        f"ratio {median(slow) / median(fast):.1f} (gradients differ by {gap:.0e})",
        f"a step of FedOTP, {classes} classes, batch {BATCH}",
        **{"plain s": median(slow), "ours s": median(fast)},
        **{"ratio": median(slow) / median(fast), "differ by": gap},
    )


class Watch(Thread):
    """The most memory that this process and its children hold, looked at twenty times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over, self.most = Event(), 0

    def run(self) -> None:
        me = psutil.Process()
        while not self.over.wait(0.05):
            held = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    held += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.most = max(self.most, held)


def cache(images: int = 10_000, clients: int = 10, classes: int = 37) -> None:
    frozen = Frozen(tuple(map(str, range(classes))), WIDTH, 100.0, None, text_tower=tower(classes))
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patches.f16"
        block = draw.standard_normal((100, PATCHES, WIDTH), np.float32).astype(np.float16)
        with path.open("wb") as file:
            for _ in range(images // len(block)):
                block.tofile(file)
        size = path.stat().st_size
        sums = np.tile(np.array([crc32(row.tobytes()) for row in block], np.uint32), images // 100)
        patches = np.memmap(path, np.float16, mode="c", shape=(images, PATCHES, WIDTH))
        x = check_and_map(patches, sums, path.name)
        y = torch.from_numpy(draw.integers(classes, size=images))
        images_per_client = images // clients
        members = {}
        for number in range(clients):
            rows = np.arange(number * images_per_client, (number + 1) * images_per_client)
            members[f"client-{number}"] = ClientRows(
                *np.split(rows, [images_per_client * 3 // 5, images_per_client * 4 // 5])
            )
        method = make("fedotp", rounds=1, local_epochs=1, batch_size=150)  # four steps a client
        world = World(method, frozen, 0, x=x, y=y, members=members)
        engine, watch = Batched(world, workers=2), Watch()
        state, initial_local = initial_state(world)
        watch.start()
        start_time = perf_counter()
        run_rounds(world, engine, Plan(tuple(members), ()), state, initial_local, lambda state, line: None)
        engine.close()
        watch.over.set()
        watch.join()
    seconds = perf_counter() - start_time
    report(
        f"{images} images, {size / 1e9:.2f} GB of patches, {clients} clients, two workers: a round "
        f"in {seconds:.0f} s, at most {watch.most / 1e9:.2f} GB resident",
        f"a round of {clients} clients on {images} images' patches",
        **{"GB on disk": size / 1e9, "s": seconds, "GB at most": watch.most / 1e9},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        {"step": step, "cache": cache}[sys.argv[1]]()
    else:  # each in a process of its own: the plain step leaves gigabytes that are not the round's
        for part in ("step", "cache"):
            subprocess.run([sys.executable, __file__, part], check=True)
