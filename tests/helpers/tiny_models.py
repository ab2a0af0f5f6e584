"""Very small random models, saved as the real ones are."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

WORDS = [
    "a",
    "photo",
    "of",
    "image",
    "cat",
    "dog",
    "guitar",
    "alarm",
    "clock",
    "very",
    "long",
    "name",
    ".",
]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PICTURE = {"image_size": 16, "patch_size": 4}


def tokens(directory: Path, start: bool) -> None:
    words = ["<unk>", *WORDS, "<s>", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>" if start else "$A </s>",
        special_tokens=[("<s>", len(words) - 2), ("</s>", len(words) - 1)],
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(directory)


def clip(directory: Path, seed: int = 0, eos: int | None = None, activation: str = "quick_gelu"):
    torch.manual_seed(seed)
    text = {
        **SMALL,
        "vocab_size": len(WORDS) + 3,
        "max_position_embeddings": 24,
        "eos_token_id": len(WORDS) + 2 if eos is None else eos,
        "hidden_act": activation,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config={**SMALL, **PICTURE}, projection_dim=24)
    model = transformers.CLIPModel(config)
    with torch.no_grad():  # the usual start is so small that every sentence looks the same
        model.text_model.embeddings.token_embedding.weight.mul_(50)
        model.text_model.embeddings.position_embedding.weight.mul_(50)
    model.save_pretrained(directory)
    tokens(directory, start=True)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(directory)
    return directory


def siglip(directory: Path, image: int = 16):
    torch.manual_seed(0)
    text = {**SMALL, "vocab_size": len(WORDS) + 3, "max_position_embeddings": 12}
    vision = {**SMALL, "image_size": image, "patch_size": 4}
    config = transformers.SiglipConfig(text_config={**text, "projection_size": 32}, vision_config=vision)
    transformers.SiglipModel(config).save_pretrained(directory)
    tokens(directory, start=False)
    SiglipImageProcessorPil(size={"height": image, "width": image}).save_pretrained(directory)
    return directory


def vision(directory: Path, kind: str):
    torch.manual_seed(0)
    if kind in ("vit", "deit"):
        brand = {"vit": "ViT", "deit": "DeiT"}[kind]
        config = getattr(transformers, f"{brand}Config")(**SMALL, **PICTURE)
        processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    else:
        brand = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[kind]
        small = {key: SMALL[key] for key in SMALL if key != "intermediate_size"}
        config = getattr(transformers, f"{brand}Config")(**small, image_size=24, patch_size=4, mlp_ratio=2)
        processor = None
    model = getattr(transformers, f"{brand}Model")(config)
    model.save_pretrained(directory)
    if processor is not None:
        processor.save_pretrained(directory)
    else:
        (directory / "preprocessor_config.json").write_text(
            json.dumps(
                {
                    "image_processor_type": "BitImageProcessor",
                    "size": {"shortest_edge": 18},
                    "crop_size": {"height": 16, "width": 16},
                }
            )
        )
    return directory
