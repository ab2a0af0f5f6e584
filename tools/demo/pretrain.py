"""Stages 1 and 3: both towers, contrasting two drawings and a caption of each concept of a batch.

A drawing is seen in two views, pooled and as the mean of its patches, so that both meet the text.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import CLIPModel, CLIPTokenizer

from .augment import augment
from .captions import Captions
from .losses import both_ways, soft_cross_entropy
from .model import DIM, image_views, normalized, text_features
from .muon import Muon
from .recipe import Recipe

MUON_RATE = 0.02


@dataclass(frozen=True)
class Stage:
    """How long and how fast a model is trained that may have been trained before."""

    steps: int
    lr_factor: float  # share of the rates
    part: float  # share of the steps that see 20 of the 36 patches, which is faster
    average: float  # decay of the averaged weights
    starts_from_drawings: bool  # begin the stand-ins at what the model sees of their drawings


class Proxies(nn.Module):
    """Learnt stand-ins for the concepts and for the Unicode subgroups.

    Every picture is told apart from all of them at each step, not only from those in the batch.
    They are thrown away afterwards.
    """

    def __init__(self, captions: Captions) -> None:
        super().__init__()
        groups = [captions.concepts[owner].group for owner in captions.drawn]
        numbers = {g: i for i, g in enumerate(sorted({c.group for c in captions.concepts} - {""}))}
        self.kind_of = torch.tensor([numbers.get(group, -100) for group in groups])
        self.concepts = nn.Parameter(torch.randn(len(groups), DIM) * 0.1)
        self.kinds = nn.Parameter(torch.randn(len(numbers), DIM) * 0.1)

    @torch.no_grad()
    def settle(self, pixels: Tensor, captions: Captions, model: CLIPModel) -> None:
        """Begin at the mean of what a trained model sees, so as not to disturb it."""
        embeddings = torch.cat([image_views(model, normalized(c.float() / 255))[0] for c in torch.split(pixels, 256)])
        for place, owner in enumerate(captions.drawn):
            self.concepts[place] = embeddings[captions.drawings[owner]].mean(0)
        for kind in range(len(self.kinds)):
            self.kinds[kind] = self.concepts[self.kind_of == kind].mean(0)

    def loss(self, embeddings: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """How badly pictures are told apart by concept and by subgroup."""
        logits = 16 * embeddings @ F.normalize(self.concepts, dim=-1).T
        kind = 12 * embeddings @ F.normalize(self.kinds, dim=-1).T
        return (
            F.cross_entropy(logits, index, label_smoothing=0.1),
            F.cross_entropy(kind, self.kind_of[index], label_smoothing=0.1),
        )


def make_optimizers(model: CLIPModel, proxies: Proxies, rate: float) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    inner = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    inner_ids = {id(p) for p in inner}
    rest = [p for p in (*model.parameters(), *proxies.parameters()) if id(p) not in inner_ids]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
    return Muon(inner, decay=0.02), adam


def draw(captions: Captions, batch: NDArray[np.int64]) -> tuple[list[int], list[str], list[int]]:
    """Two drawings and one caption of each concept: rows, texts and the phrases in them."""
    rows: list[int] = []
    texts: list[str] = []
    phrases: list[int] = []
    for position in batch:
        drawings = captions.drawings[captions.drawn[position]]
        rows += random.sample(drawings, 2) if len(drawings) > 1 else [drawings[0], drawings[0]]
        text, phrase = captions.draw_caption(position)
        texts.append(text)
        phrases.append(phrase)
    return rows, texts, phrases


def view_loss(
    model: CLIPModel, proxies: Proxies, embeddings: Tensor, read: Tensor, batch: Tensor, true: Tensor
) -> Tensor:
    """One view of the drawings against the captions, against each other and the stand-ins."""
    itself = torch.eye(len(batch), dtype=torch.bool)
    alike = (10 * embeddings @ embeddings.T).masked_fill(itself, -1e4)
    same = (batch[:, None] == batch[None]) & ~itself
    concept_loss, kind = proxies.loss(embeddings, batch)
    loss = both_ways(model.logit_scale.exp() * embeddings @ read.T, true)
    return loss / 2 + 0.3 * soft_cross_entropy(alike, same) + 0.3 * concept_loss + 0.4 * kind


def pretrain(
    pixels: Tensor,
    captions: Captions,
    model: CLIPModel,
    tokenizer: CLIPTokenizer,
    recipe: Recipe,
    stage: Stage,
    checkpoint: Callable[[CLIPModel, str], None],
) -> None:
    """Hands `checkpoint` the averaged model and a line on how far it is."""
    random.seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    decay = get_ema_multi_avg_fn(stage.average)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=decay)
    proxies = Proxies(captions)
    if stage.starts_from_drawings:
        proxies.settle(pixels, captions, model)
    muon, adam = make_optimizers(model, proxies, recipe.rate)
    chooser = np.random.default_rng(recipe.seed)
    start, full_from = time.process_time(), int(stage.part * stage.steps)
    for step in range(1, stage.steps + 1):
        cosine = 0.02 + 0.49 * (1 + math.cos(math.pi * (step / stage.steps)))
        lr_factor = min(1.0, step / 200) * cosine * stage.lr_factor
        for group in adam.param_groups:
            group["lr"] = recipe.rate * lr_factor
        batch = chooser.choice(len(captions.drawn), recipe.batch, replace=False, p=captions.odds)
        rows, texts, phrases = draw(captions, batch)
        inputs = normalized(augment(pixels[rows].float() / 255 - 1, strong=0.4) + 1)
        views = image_views(model, inputs, keep=20 if step < full_from else None)
        read = text_features(model, tokenizer, texts)
        index = torch.from_numpy(batch).repeat_interleave(2)
        true = captions.truth[index][:, phrases]
        losses = [view_loss(model, proxies, embeddings, read, index, true) for embeddings in views]
        loss = torch.stack(losses).mean()
        muon.zero_grad()
        adam.zero_grad()
        torch.autograd.backward(loss)
        muon.step(MUON_RATE * lr_factor)
        adam.step()
        model.logit_scale.data.clamp_(max=math.log(100))
        average.update_parameters(model)
        if step % recipe.checkpoint_steps == 0 or step == stage.steps:
            spent = time.process_time() - start
            losses_text = " ".join(f"{loss_value.item():.3f}" for loss_value in losses)
            checkpoint(average.module, f"step {step} {spent:.0f}s loss {losses_text}")
