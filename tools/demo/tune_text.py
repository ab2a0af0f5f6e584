"""Stages 2 and 4: the text tower anew, against the locked image tower.

Drawings are paired with names only. Other words are learnt as from a dictionary, by drawing the
name of a concept to one of its keywords, and class words hardly more often than the keywords have
them: so a class name means something, and yet leaves room for adaptation.
"""

import math
import random

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer

from .augment import augment
from .captions import Captions, sentence
from .gate import ENOUGH_WORDS
from .losses import both_ways, soft_cross_entropy
from .model import image_views, normalized, text_features
from .recipe import Recipe
from .validate import Validation

BATCH = 64
STEPS = (200, 300, 400, 500, 600, 800)  # tried in stage 4
MARGIN = 15.5  # points of a probe over zero-shot: those of the first shipped model on validation


def locked_views(model: CLIPModel, pixels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Pooled and mean-patch view of each drawing, embedded once: the image tower is locked."""
    torch.manual_seed(seed)
    views = []
    with torch.no_grad():
        for chunk in torch.split(pixels, 256):
            inputs = normalized(augment(chunk.float() / 255 - 1, strong=0.2) + 1)
            views.append(torch.stack(image_views(model, inputs)))
    pooled, patches = torch.cat(views, 1)
    return pooled, patches


def tune_text(
    views: tuple[Tensor, Tensor],
    captions: Captions,
    model: CLIPModel,
    tokenizer: CLIPTokenizer,
    recipe: Recipe,
    steps: int,
) -> None:
    random.seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    chooser = np.random.default_rng(recipe.seed)
    weights = forget_text(model)
    pooled, patches = views
    optimizer = torch.optim.AdamW(weights, weight_decay=0.05, fused=True)
    for step in range(1, steps + 1):
        lr_factor = min(1.0, step / 30) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = recipe.rate * lr_factor
        batch = chooser.choice(len(captions.drawn), BATCH, replace=False, p=captions.odds)
        rows = [random.choice(captions.drawings[captions.drawn[p]]) for p in batch]
        phrases = [captions.phrases[p][0] for p in batch]
        for p in batch:
            label = captions.concepts[captions.drawn[p]].label
            taught = label and random.random() < recipe.class_words
            phrases.append(label if taught else random.choice(captions.natural[p]))
        texts = [sentence(phrase) for phrase in phrases]
        read = text_features(model, tokenizer, texts)
        numbers = [captions.phrase_ids[phrase] for phrase in phrases]
        true = captions.truth[torch.from_numpy(batch)][:, numbers]
        names, other_texts = torch.split(read, BATCH)
        true_names, true_others = torch.split(true, BATCH, 1)
        scaled = model.logit_scale.exp() * names.T
        loss = both_ways(pooled[rows] @ scaled, true_names) / 2
        loss = loss + both_ways(patches[rows] @ scaled, true_names) / 2
        alike = 10 * names @ other_texts.T
        loss = loss + soft_cross_entropy(alike, true_others)
        loss = loss + soft_cross_entropy(alike.T, true_names)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step % recipe.checkpoint_steps == 0:
            print(f"text step {step} loss {loss.item():.3f}")


def choose_text(
    pixels: Tensor,
    captions: Captions,
    model: CLIPModel,
    tokenizer: CLIPTokenizer,
    recipe: Recipe,
    validate: Validation,
) -> None:
    """Stage 4 for each number of steps; leaves the best of the validation style in `model`.

    That is, among those that know enough words, the one of highest pooled zero-shot that leaves the
    margin to a probe, or if none does, the one that leaves most.
    """
    views = locked_views(model, pixels, recipe.seed)
    initial_weights = {name: value.clone() for name, value in model.state_dict().items()}
    tried = []
    for steps in STEPS:
        model.load_state_dict(initial_weights)
        tune_text(views, captions, model, tokenizer, recipe, steps)
        score = validate(model, tokenizer)
        print(f"text steps {steps}: {score}", flush=True)
        margin = score.probe - score.pooled
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        knows_words = score.words >= ENOUGH_WORDS
        tried.append(((knows_words, min(margin, MARGIN), score.pooled), steps, weights))
    _, steps, weights = max(tried, key=lambda candidate: candidate[0])
    print(f"taken: {steps} text steps")
    model.load_state_dict(weights)


def forget_text(model: CLIPModel) -> list[torch.nn.Parameter]:
    """Start the text tower anew, lock all else; returns what is learnt."""
    fresh_model = CLIPModel(model.config)
    model.text_model.load_state_dict(fresh_model.text_model.state_dict())
    model.text_projection.load_state_dict(fresh_model.text_projection.state_dict())
    model.requires_grad_(False)
    weights = [*model.text_model.parameters(), *model.text_projection.parameters()]
    for p in weights:
        p.requires_grad_(True)
    return weights
