"""Stage 2: the text tower anew, against the locked image tower.

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
from .captions import TEMPLATES, Captions
from .losses import both_ways, soft_cross_entropy
from .model import image_features, normalized, text_features
from .recipe import Recipe

BATCH = 64


def tune_text(
    pixels: Tensor,
    captions: Captions,
    model: CLIPModel,
    tokenizer: CLIPTokenizer,
    recipe: Recipe,
) -> None:
    random.seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    chooser = np.random.default_rng(recipe.seed)
    weights = forget_text(model)
    views = []  # embedded once: the image tower does not change
    with torch.no_grad():
        for chunk in torch.split(pixels, 256):
            inputs = normalized(augment(chunk.float() / 255 - 1, strong=0.2) + 1)
            views.append(image_features(model, inputs))
    view = torch.cat(views)
    optimizer = torch.optim.AdamW(weights, weight_decay=0.05, fused=True)
    for step in range(1, recipe.text_steps + 1):
        pace = min(1.0, step / 30) * 0.5 * (1 + math.cos(math.pi * step / recipe.text_steps))
        optimizer.param_groups[0]["lr"] = recipe.rate * pace
        batch = chooser.choice(len(captions.drawn), BATCH, replace=False, p=captions.odds)
        rows = [random.choice(captions.drawings[captions.drawn[p]]) for p in batch]
        phrases = [captions.said[p][0] for p in batch]
        for p in batch:
            label = captions.concepts[captions.drawn[p]].label
            taught = label and random.random() < recipe.class_words
            phrases.append(label if taught else random.choice(captions.natural[p]))
        texts = [random.choice(TEMPLATES).format(phrase) for phrase in phrases]
        read = text_features(model, tokenizer, texts)
        numbers = [captions.phrase_ids[phrase] for phrase in phrases]
        true = captions.truth[torch.from_numpy(batch)][:, numbers]
        names, others = torch.split(read, BATCH)
        true_names, true_others = torch.split(true, BATCH, 1)
        loss = both_ways(model.logit_scale.exp() * view[rows] @ names.T, true_names)
        alike = 10 * names @ others.T
        loss = loss + soft_cross_entropy(alike, true_others)
        loss = loss + soft_cross_entropy(alike.T, true_names)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        model.logit_scale.data.clamp_(max=math.log(100))
        if step % recipe.every == 0:
            print(f"text step {step} loss {loss.item():.3f}")


def forget_text(model: CLIPModel) -> list[torch.nn.Parameter]:
    """Start the text tower anew, lock all else but the logit scale; returns what is learnt."""
    fresh = CLIPModel(model.config)
    model.text_model.load_state_dict(fresh.text_model.state_dict())
    model.text_projection.load_state_dict(fresh.text_projection.state_dict())
    model.requires_grad_(False)
    weights = [*model.text_model.parameters(), *model.text_projection.parameters()]
    weights.append(model.logit_scale)
    for p in weights:
        p.requires_grad_(True)
    return weights
