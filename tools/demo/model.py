"""The tiny CLIP: a plain transformers CLIPModel, its features and its files."""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from .sets import SIZE

MEAN, STD = 1.0, 0.35  # white becomes zero, so empty patches carry their position only
DIM, WIDTH, PATCH = 128, 128, 8


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
        embeddings = model.vision_model.embeddings
        embeddings.patch_embedding.weight.copy_(whitening(sample))
        embeddings.position_embedding.weight[1:] = grid_positions()
    return model


def whitening(sample: Tensor) -> Tensor:
    """(WIDTH, 3, PATCH, PATCH) filters that decorrelate the patches of the sample."""
    patches = F.unfold(normalized(sample.float() / 255), PATCH, stride=PATCH)
    patches = patches.transpose(1, 2).flatten(0, 1)
    patches = patches[patches.abs().sum(1) > 1]
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    values, vectors = values[-WIDTH:], vectors[:, -WIDTH:]
    filters: Tensor = (vectors / (values + 0.05).sqrt()).T
    return filters.reshape(WIDTH, 3, PATCH, PATCH)


def grid_positions() -> Tensor:
    """(patches, WIDTH) waves along both sides of the picture, in random directions."""
    grid = SIZE // PATCH
    steps = (torch.arange(grid) + 0.5)[:, None] * math.pi / grid
    waves = torch.cat([(steps * k).cos() for k in range(1, grid)], 1)
    coordinates = torch.cat([waves[:, None].expand(-1, grid, -1), waves[None].expand(grid, -1, -1)], -1).flatten(0, 1)
    spread = torch.linalg.qr(torch.randn(WIDTH, coordinates.shape[1]))[0].T
    positions: Tensor = 1.5 * coordinates @ spread
    return positions


def normalized(pictures: Tensor) -> Tensor:
    """Pictures in [0, 1] as the encoder takes them."""
    return (pictures - MEAN) / STD


def image_views(model: CLIPModel, pixels: Tensor, keep: int | None = None) -> tuple[Tensor, Tensor]:
    """Unit embeddings of the picture, pooled and as the mean over its unit patch embeddings.

    With `keep`, from that many random patches only (faster training).
    """
    vision = model.vision_model
    hidden = vision.embeddings(pixels)
    if keep is not None:
        chosen = torch.rand(hidden.shape[0], hidden.shape[1] - 1).topk(keep, 1).indices + 1
        chosen = torch.cat([torch.zeros(len(chosen), 1, dtype=torch.long), chosen], 1)
        hidden = hidden.gather(1, chosen[..., None].expand(-1, -1, hidden.shape[2]))
    hidden = vision.encoder(inputs_embeds=vision.pre_layrnorm(hidden)).last_hidden_state
    tokens = F.normalize(model.visual_projection(vision.post_layernorm(hidden)), dim=-1)
    return tokens[:, 0], F.normalize(tokens[:, 1:].mean(1), dim=-1)


def text_features(model: CLIPModel, tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
    return F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)


def save(model: CLIPModel, tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Write the transformers folder; half precision on disk, single once loaded."""
    half_model = CLIPModel(model.config)
    half_model.load_state_dict(model.state_dict())
    half_model.half().save_pretrained(folder)
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
