"""Build the embedded demo: an emoji image set in four styles and a tiny CLIP pretrained on others.

    python tools/build_demo.py --out DIR                # everything: about an hour on one core
    python tools/build_demo.py --out DIR --art-only     # images and keywords: about a minute
    python tools/build_demo.py --out DIR --gate-only    # measure what is in DIR again

Needs torch, transformers, scikit-learn, pillow, resvg_py and the `npm` command. The encoder is
a plain transformers CLIPModel. It never sees a drawing of the four demo styles, so they are to
it what a new domain is to a large CLIP: recognisable from the words, but with room to adapt.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import re
import time
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from build_demo_art import (
    CLASSES,
    DOMAINS,
    SIZE,
    Concept,
    Packages,
    choose_demo,
    load_concepts,
    training_pairs,
    write_demo,
    write_keywords,
)
from PIL import Image
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

MEAN, STD = 1.0, 0.35  # white becomes zero, so empty patches carry their position only
DIM, WIDTH, PATCH = 128, 128, 8
PROMPT = "a picture of a {}"
TEMPLATES = (PROMPT, PROMPT, "{}", "a {}", "a {} emoji", "an icon of a {}", "a drawing of a {}")
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


def make_tokenizer(phrases: list[str], vocab_size: int = 4096) -> CLIPTokenizer:
    """Learn a byte-pair vocabulary in CLIP's form (`</w>` ends a word) from the captions."""
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2 * len(letters) - 2, end_of_word_suffix="</w>", min_frequency=1
    )
    learner.train_from_iterator([t.format(p) for p in phrases for t in ("{}", *TEMPLATES)], trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    # All byte symbols come first, so that any text can be encoded, also one never seen here.
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    tokens += [left + right for left, right in merges]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=32)


def make_model(tokenizer: CLIPTokenizer, sample: Tensor) -> CLIPModel:
    """A CLIP small enough for one core: patches of 8 on 48 pixels, width 128."""
    common = {"hidden_act": "gelu", "projection_dim": DIM, "num_attention_heads": 4}
    size = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            "max_position_embeddings": 32,
            "pad_token_id": tokenizer.pad_token_id,
            **special,
            **size,
            **common,
        },
        vision_config={
            "image_size": SIZE,
            "patch_size": PATCH,
            "num_hidden_layers": 3,
            **size,
            **common,
        },
        projection_dim=DIM,
    )
    model = CLIPModel(config)
    # Plain vision transformers learn slowly from little data, so two things that a trained one
    # would have are given from the start: decorrelated patches and positions on a grid.
    with torch.no_grad():
        embeddings, grid = model.vision_model.embeddings, SIZE // PATCH
        patches = F.unfold((sample.float() / 255 - MEAN) / STD, PATCH, stride=PATCH)
        patches = patches.transpose(1, 2).flatten(0, 1)
        patches = patches[patches.abs().sum(1) > 1]
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        values, vectors = values[-WIDTH:], vectors[:, -WIDTH:]
        whiten = (vectors / (values + 0.05).sqrt()).T
        embeddings.patch_embedding.weight.copy_(whiten.reshape(WIDTH, 3, PATCH, PATCH))
        steps = (torch.arange(grid) + 0.5)[:, None] * math.pi / grid
        waves = torch.cat([(steps * k).cos() for k in range(1, grid)], 1)
        both = torch.cat(
            [waves[:, None].expand(-1, grid, -1), waves[None].expand(grid, -1, -1)], -1
        ).flatten(0, 1)
        spread = torch.linalg.qr(torch.randn(WIDTH, both.shape[1]))[0].T
        embeddings.position_embedding.weight[1:] = 1.5 * both @ spread
    return model


def augment(images: Tensor, strong: float) -> Tensor:
    """Random geometry for all, a change of style for the share `strong`. White is zero here."""
    count = len(images)
    angle = (torch.rand(count) - 0.5) * 0.5
    zoom = torch.empty(count).uniform_(0.85, 1.25)
    flip = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 0, 1] = flip * zoom * angle.cos(), -zoom * angle.sin()
    theta[:, 1, 0], theta[:, 1, 1] = flip * zoom * angle.sin(), zoom * angle.cos()
    theta[:, :, 2] = (torch.rand(count, 2) - 0.5) * 0.25
    grid = F.affine_grid(theta, [count, 3, SIZE, SIZE], align_corners=False)
    images = F.grid_sample(images, grid, align_corners=False)  # outside is zero, that is white
    kind = torch.bucketize(
        torch.rand(count) / strong, torch.tensor([0.3, 0.5, 0.7, 0.85, 0.95, 1.0])
    )
    for number in range(6):
        rows = (kind == number).nonzero()[:, 0]
        if not len(rows):
            continue
        chosen = images[rows]
        ink = chosen.mean(1, keepdim=True).expand_as(chosen)
        level = torch.empty(len(rows), 1, 1, 1).uniform_(0.15, 0.6)
        if number == 0:  # other colours
            mix = torch.eye(3) + 0.35 * torch.randn(len(rows), 3, 3)
            images[rows] = torch.einsum("nij,njhw->nihw", mix, chosen).clamp(-1, 0)
        elif number == 1:  # grey
            images[rows] = ink
        elif number == 2:  # outlines
            down = F.pad(ink[:, :, 1:] - ink[:, :, :-1], (0, 0, 0, 1)).abs()
            across = F.pad(ink[..., 1:] - ink[..., :-1], (0, 1)).abs()
            images[rows] = -(2 * (down + across)).clamp(0, 1)
        elif number == 3:  # black where dark
            images[rows] = -((-ink - level) * 12).sigmoid()
        elif number == 4:  # black where light, as in a stencil
            images[rows] = -((ink + level) * 12).sigmoid() * (ink < -0.02)
        else:  # negative
            images[rows] = -1 - chosen
    return images


def image_features(model: CLIPModel, pixels: Tensor, keep: int | None = None) -> Tensor:
    """Unit image embeddings; with `keep`, from that many random patches only (faster training)."""
    vision = model.vision_model
    hidden = vision.embeddings(pixels)
    if keep is not None:
        chosen = torch.rand(hidden.shape[0], hidden.shape[1] - 1).topk(keep, 1).indices + 1
        chosen = torch.cat([torch.zeros(len(chosen), 1, dtype=torch.long), chosen], 1)
        hidden = hidden.gather(1, chosen[..., None].expand(-1, -1, hidden.shape[2]))
    hidden = vision.encoder(inputs_embeds=vision.pre_layrnorm(hidden)).last_hidden_state
    return F.normalize(model.visual_projection(vision.post_layernorm(hidden[:, 0])), dim=-1)


def text_features(model: CLIPModel, tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
    return F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)


def phrases_of(concept: Concept) -> list[str]:
    """What may be said of a concept; the name most often, the class word no more than another."""
    name = re.sub(r"^(an?|the) ", "", concept.name)
    words = [k for k in concept.keywords if len(k) > 1 and not k.isdigit()][:12]
    extra = [w for w in (concept.label, concept.group) if w]
    return list(dict.fromkeys([name, *extra, *words]))


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, for the square-ish matrices of the layers.

    In single precision: the usual half-precision form is slow on processors without it.
    """

    def __init__(self, params: list[nn.Parameter], rate: float, decay: float) -> None:
        super().__init__(params, {"lr": rate, "decay": decay})
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p in params:
            shapes[tuple(p.shape)].append(p)
        self.stacks = list(shapes.values())
        self.momenta = [torch.zeros(len(s), *s[0].shape) for s in self.stacks]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rate, decay = (self.param_groups[0][key] for key in ("lr", "decay"))
        for params, momentum in zip(self.stacks, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in params])
            momentum.mul_(0.95).add_(gradient)
            update = gradient + 0.95 * momentum
            tall = update.shape[1] > update.shape[2]
            x = update.transpose(1, 2) if tall else update
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-9)
            for _ in range(5):  # Newton-Schulz towards the nearest orthogonal matrix
                gram = x @ x.transpose(1, 2)
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.transpose(1, 2) if tall else x
            scale = max(1.0, x.shape[1] / x.shape[2]) ** 0.5
            for p, change in zip(params, x, strict=True):
                p.mul_(1 - rate * decay).add_(change, alpha=-rate * scale)


class Captions:
    """Which drawings show which concept, what may be said of it, and what is true of others."""

    def __init__(self, owners: np.ndarray, concepts: list[Concept]) -> None:
        self.concepts = concepts
        self.drawings: dict[int, list[int]] = defaultdict(list)
        for row, owner in enumerate(owners):
            self.drawings[int(owner)].append(row)
        self.drawn = sorted(self.drawings)
        self.said = [phrases_of(concepts[owner]) for owner in self.drawn]
        self.natural = [  # without the words for class and subgroup that are no CLDR keywords
            [p for p in said if p in (said[0], *concepts[owner].keywords)]
            for owner, said in zip(self.drawn, self.said, strict=True)
        ]
        everything = dict.fromkeys(phrase for said in self.said for phrase in said)
        self.phrase_ids = {phrase: index for index, phrase in enumerate(everything)}
        # A caption that is also true of another picture of the batch must not push it away.
        self.truth = torch.zeros(len(self.drawn), len(self.phrase_ids), dtype=torch.bool)
        for position, said in enumerate(self.said):
            self.truth[position, [self.phrase_ids[phrase] for phrase in said]] = True
        # Emoji concepts have several drawings and the better captions: seen more often.
        odds = np.array([1.0 if concepts[owner].code else 0.04 for owner in self.drawn])
        odds *= np.array([1.6 if concepts[owner].label else 1.0 for owner in self.drawn])
        self.odds = odds / odds.sum()

    def say(self, position: int) -> tuple[str, int]:
        """A caption for a concept and the number of the phrase in it; the name most often."""
        said = self.said[position]
        phrase = said[0] if random.random() < 0.35 else random.choice(said)
        return random.choice(TEMPLATES).format(phrase), self.phrase_ids[phrase]


def soft_cross_entropy(logits: Tensor, positives: Tensor) -> Tensor:
    """Cross-entropy against the uniform distribution over the positives of each row."""
    target = positives.float()
    target = target / target.sum(1, keepdim=True).clamp_min(1)
    return -(target * logits.log_softmax(1)).sum(1).mean()


def pretrain(images: np.ndarray, captions: Captions, demo: Demo, args: argparse.Namespace) -> None:
    """Contrastive pretraining on two drawings and one caption for each concept of a batch."""
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    if args.tokenizer:
        tokenizer = CLIPTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = make_tokenizer(list(captions.phrase_ids) + list(CLASSES))
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    model = make_model(tokenizer, pixels[::8])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998)
    )
    # Learnt stand-ins for the concepts: every picture is told apart from all of them at each
    # step, not only from those in the batch. They are thrown away afterwards.
    proxies = nn.Parameter(torch.randn(len(captions.drawn), DIM) * 0.1)
    drawn, concepts = captions.drawn, captions.concepts
    kinds = {g: i for i, g in enumerate(sorted({c.group for c in concepts if c.group}))}
    kind_of = torch.tensor([kinds.get(concepts[owner].group, -100) for owner in drawn])
    kind_proxies = nn.Parameter(torch.randn(len(kinds), DIM) * 0.1)
    weights = [*model.parameters(), proxies, kind_proxies]
    inner = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    known = {id(p) for p in inner}
    rest = [p for p in weights if id(p) not in known]
    optimizers = [
        Muon(inner, rate=0.02, decay=0.02),
        torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.05},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=args.rate,
            betas=(0.9, 0.98),
            fused=True,
        ),
    ]
    chooser = np.random.default_rng(args.seed)
    start, full_from = time.time(), int(0.8 * args.steps)
    for step in range(1, args.steps + 1):
        progress = step / args.steps
        pace = min(1.0, step / 200) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        optimizers[0].param_groups[0]["lr"] = 0.02 * pace
        for group in optimizers[1].param_groups:
            group["lr"] = args.rate * pace
        batch = chooser.choice(len(drawn), args.batch, replace=False, p=captions.odds)
        rows: list[int] = []
        texts, phrases = [], []
        for position in batch:
            own = captions.drawings[drawn[position]]
            rows += random.sample(own, 2) if len(own) > 1 else [own[0], own[0]]
            text, phrase = captions.say(position)
            texts.append(text)
            phrases.append(phrase)
        inputs = augment(pixels[rows].float() / 255 - 1, strong=0.4)
        seen = image_features(
            model, (inputs + 1 - MEAN) / STD, keep=20 if step < full_from else None
        )
        read = text_features(model, tokenizer, texts)
        index = torch.from_numpy(batch).repeat_interleave(2)
        positives = captions.truth[index][:, phrases]
        logits = model.logit_scale.exp() * seen @ read.T
        loss = soft_cross_entropy(logits, positives) + soft_cross_entropy(logits.T, positives.T)
        itself = torch.eye(len(index), dtype=torch.bool)
        alike = (10 * seen @ seen.T).masked_fill(itself, -1e4)
        loss = loss / 2 + 0.3 * soft_cross_entropy(alike, (index[:, None] == index[None]) & ~itself)
        told = 16 * seen @ F.normalize(proxies, dim=-1).T
        loss = loss + 0.3 * F.cross_entropy(told, index, label_smoothing=0.1)
        kind = 12 * seen @ F.normalize(kind_proxies, dim=-1).T
        loss = loss + 0.4 * F.cross_entropy(kind, kind_of[index], label_smoothing=0.1)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.logit_scale.data.clamp_(max=math.log(100))
        average.update_parameters(model)
        if step % args.every == 0 or step in (args.steps, args.stop):
            save(average.module, tokenizer, args.out)
            scores = gate(demo, average.module, tokenizer, seeds=1)
            print(f"step {step} {time.time() - start:.0f}s loss {loss.item():.3f}", brief(scores))
        if step == args.stop:
            break


def tune_text(
    images: np.ndarray,
    captions: Captions,
    model: CLIPModel,
    tokenizer: CLIPTokenizer,
    args: argparse.Namespace,
) -> None:
    """Learn the text tower anew against the locked image tower, from embeddings computed once.

    Drawings are paired with names only. Other words are learnt as from a dictionary, by drawing
    the name of a concept to one of its keywords, and class words hardly more often than the
    keywords have them: so a class name means something, and yet leaves room for adaptation.
    """
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    chooser = np.random.default_rng(args.seed)
    fresh = CLIPModel(model.config)
    model.text_model.load_state_dict(fresh.text_model.state_dict())
    model.text_projection.load_state_dict(fresh.text_projection.state_dict())
    model.requires_grad_(False)
    views = []
    for chunk in torch.from_numpy(images).permute(0, 3, 1, 2).split(256):
        inputs = augment(chunk.float() / 255 - 1, strong=0.2)
        views.append(image_features(model, (inputs + 1 - MEAN) / STD))
    view = torch.cat(views)
    weights = [*model.text_model.parameters(), *model.text_projection.parameters()]
    weights.append(model.logit_scale)
    for p in weights:
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, weight_decay=0.05, fused=True)
    for step in range(1, args.text_steps + 1):
        pace = min(1.0, step / 30) * 0.5 * (1 + math.cos(math.pi * step / args.text_steps))
        optimizer.param_groups[0]["lr"] = args.rate * pace
        batch = chooser.choice(len(captions.drawn), 64, replace=False, p=captions.odds)
        rows = [random.choice(captions.drawings[captions.drawn[p]]) for p in batch]
        phrases = [captions.said[p][0] for p in batch]
        for p in batch:
            label = captions.concepts[captions.drawn[p]].label
            taught = label and random.random() < args.class_words
            phrases.append(label if taught else random.choice(captions.natural[p]))
        texts = [random.choice(TEMPLATES).format(phrase) for phrase in phrases]
        read = text_features(model, tokenizer, texts)
        numbers = [captions.phrase_ids[phrase] for phrase in phrases]
        true = captions.truth[torch.from_numpy(batch)][:, numbers]
        names, others = read.split(len(batch))
        true_names, true_others = true.split(len(batch), 1)
        logits = model.logit_scale.exp() * view[rows] @ names.T
        loss = soft_cross_entropy(logits, true_names) + soft_cross_entropy(logits.T, true_names.T)
        alike = 10 * names @ others.T
        loss = loss + soft_cross_entropy(alike, true_others)
        loss = loss + soft_cross_entropy(alike.T, true_names)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        model.logit_scale.data.clamp_(max=math.log(100))
        if step % args.every == 0:
            print(f"text step {step} loss {loss.item():.3f}")


def save(model: CLIPModel, tokenizer: CLIPTokenizer, out: Path) -> None:
    """Write the transformers folder; half precision on disk, single once loaded."""
    folder = out / "model"
    half = CLIPModel(model.config)
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    for tower in ("text_config", "vision_config"):
        config[tower]["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": SIZE},
        crop_size={"height": SIZE, "width": SIZE},
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    ).save_pretrained(folder)


class Demo:
    """The image set as the project reads it: pixels and labels for each domain."""

    def __init__(self, path: Path) -> None:
        self.classes = list(CLASSES)
        self.pixels: dict[str, Tensor] = {}
        self.labels: dict[str, np.ndarray] = {}
        with zipfile.ZipFile(path) as archive:
            for domain in DOMAINS:
                members = [n for n in archive.namelist() if n.startswith(domain + "/")]
                arrays = [
                    np.asarray(Image.open(io.BytesIO(archive.read(n))).convert("RGB"))
                    for n in members
                ]
                stack = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
                self.pixels[domain] = (stack.float() / 255 - MEAN) / STD
                self.labels[domain] = np.array(
                    [self.classes.index(n.split("/")[1]) for n in members]
                )

    def split(self, domain: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """60/20/20 rows of each class, drawn for this domain alone."""
        generator = np.random.default_rng([seed, list(DOMAINS).index(domain)])
        parts: tuple[list[int], list[int], list[int]] = ([], [], [])
        for label in range(len(self.classes)):
            rows = generator.permutation(np.flatnonzero(self.labels[domain] == label))
            first, second = round(0.6 * len(rows)), round(0.8 * len(rows))
            for part, chunk in zip(parts, np.split(rows, [first, second]), strict=True):
                part.extend(chunk.tolist())
        return tuple(np.array(part) for part in parts)  # type: ignore[return-value]


@torch.no_grad()
def gate(demo: Demo, model: CLIPModel, tokenizer: CLIPTokenizer, seeds: int) -> dict[str, object]:
    """Zero-shot, probe on own rows, head from the other three domains, and words, in percent."""
    model.eval()
    prompts = text_features(model, tokenizer, [PROMPT.format(name) for name in demo.classes])
    features = {d: image_features(model, demo.pixels[d]) for d in DOMAINS}
    zero, probe, transfer, pooled = ({d: [] for d in DOMAINS} for _ in range(4))
    everything = {
        d: 100 * float(((features[d] @ prompts.T).argmax(1).numpy() == demo.labels[d]).mean())
        for d in DOMAINS
    }
    for seed in range(seeds):
        splits = {d: demo.split(d, seed) for d in DOMAINS}

        def head(domains: list[str], splits: dict = splits) -> LogisticRegression:
            x = np.concatenate([features[d].numpy()[splits[d][0]] for d in domains])
            y = np.concatenate([demo.labels[d][splits[d][0]] for d in domains])
            return LogisticRegression(C=10, max_iter=300).fit(x, y)

        shared = head(list(DOMAINS))
        for domain in DOMAINS:
            train, val, test = splits[domain]
            x, y = features[domain].numpy(), demo.labels[domain]
            guess = (x[test] @ prompts.numpy().T).argmax(1)
            zero[domain].append(100 * (guess == y[test]).mean())
            heads = [
                LogisticRegression(C=c, max_iter=300).fit(x[train], y[train])
                for c in (3, 10, 30, 100)
            ]
            best = max(heads, key=lambda head: head.score(x[val], y[val]))
            probe[domain].append(100 * best.score(x[test], y[test]))
            others = head([d for d in DOMAINS if d != domain])
            transfer[domain].append(100 * others.score(x[test], y[test]))
            pooled[domain].append(100 * shared.score(x[test], y[test]))
    named = text_features(model, tokenizer, [PROMPT.format(word) for word in WORDS])
    near = [demo.classes[i] for i in (named @ prompts.T).argmax(1)]
    missed = {w: n for (w, c), n in zip(WORDS.items(), near, strict=True) if c != n}
    model.train()
    return {
        "zero-shot, all rows": everything,
        "zero-shot": {d: float(np.mean(v)) for d, v in zero.items()},
        "probe": {d: float(np.mean(v)) for d, v in probe.items()},
        "head of the other three": {d: float(np.mean(v)) for d, v in transfer.items()},
        "head of all four": {d: float(np.mean(v)) for d, v in pooled.items()},
        "words": f"{len(WORDS) - len(missed)}/{len(WORDS)}",
        "missed": missed,
    }


def brief(scores: dict[str, object]) -> str:
    rows = []
    for name, value in scores.items():
        if isinstance(value, dict) and name != "missed":
            numbers = [float(v) for v in value.values()]
            cells = " ".join(f"{v:.0f}" for v in numbers)
            rows.append(f"{name} {cells} ({np.mean(numbers):.1f})")
    return " | ".join(rows) + f" | words {scores['words']}"


def near_copies(images: np.ndarray, demo: Demo, limit: float = 0.006) -> np.ndarray:
    """Rows of the pretraining images that nearly repeat a demo image (mean squared difference).

    Compared at 16 pixels in colour, and only the nearest demo image counts.
    """
    small = F.avg_pool2d(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255, 3).flatten(1)
    theirs = torch.cat([F.avg_pool2d(p * STD + MEAN, 3).flatten(1) for p in demo.pixels.values()])
    nearest = torch.cat([torch.cdist(c, theirs).amin(1) for c in small.split(1024)])
    return (nearest**2 / small.shape[1] < limit).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--cache", type=Path, default=Path("demo-packages"))
    parser.add_argument("--art-only", action="store_true", help="images and keywords, no encoder")
    parser.add_argument("--gate-only", action="store_true", help="measure the files in --out")
    # The learner of the vocabulary breaks ties at random; an exact rerun needs the old one.
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to use again")
    parser.add_argument("--text-only", action="store_true", help="keep the image tower in --out")
    parser.add_argument("--text-steps", type=int, default=400)
    parser.add_argument("--class-words", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--stop", type=int, help="leave the schedule of --steps at this step")
    parser.add_argument("--batch", type=int, default=48, help="concepts per step, two images each")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # one thread gives the same sums on any machine
    if not args.gate_only:
        packages = Packages(args.cache)
        concepts, aliases = load_concepts(packages)
        write_demo(args.out, concepts, choose_demo(packages, concepts))
        write_keywords(packages, args.out, concepts)
    demo = Demo(args.out / "emoji.zip")
    if args.art_only:
        return
    if not args.gate_only:
        images, owners = training_pairs(packages, concepts, aliases)
        copies = near_copies(images, demo)
        print(f"{len(images)} drawings, {copies.sum()} dropped as near-copies of a demo image")
        images, captions = images[~copies], Captions(owners[~copies], concepts)
        if not args.text_only:
            pretrain(images, captions, demo, args)
        model = CLIPModel.from_pretrained(args.out / "model")
        tokenizer = CLIPTokenizer.from_pretrained(args.out / "model")
        tune_text(images, captions, model, tokenizer, args)
        save(model, tokenizer, args.out)
    model = CLIPModel.from_pretrained(args.out / "model")
    tokenizer = CLIPTokenizer.from_pretrained(args.out / "model")
    print(json.dumps(gate(demo, model, tokenizer, seeds=5), indent=1))


if __name__ == "__main__":
    main()
