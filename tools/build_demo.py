"""Build the embedded demo: an emoji image set in four styles and a tiny CLIP pretrained on others.

    python tools/build_demo.py --out DIR                  # everything: about an hour on one core
    python tools/build_demo.py --out DIR --start MODEL    # stages 3 and 4 only: a quarter of that
    python tools/build_demo.py --out DIR --art-only       # images and keywords: about a minute
    python tools/build_demo.py --gate-only MODEL_DIR      # measure a model: some seconds

Needs torch, transformers and scikit-learn; but for --gate-only also resvg_py and the `npm` command.
The encoder is a plain transformers CLIPModel. It never sees a drawing of the four demo styles, so
they are to it what a new domain is to a large CLIP: recognisable from the words, but with room to
adapt.

Stages 1 (both towers) and 2 (text) of the shipped model were run before the mean patch and the full
stop were thought of; stages 3 (both towers) and 4 (text) began at its weights, by `--start`. Its
vocabulary was learnt by the tokenizers library, which breaks ties at random; the one learnt here is
the same each time but another. The model card says how to repeat the shipped model.
"""

import argparse
from dataclasses import fields
from pathlib import Path

import torch
from demo.captions import Captions
from demo.gate import measure_gate
from demo.images import Demo, near_copies
from demo.model import make_model, save
from demo.pretrain import Stage, pretrain
from demo.recipe import Recipe
from demo.sets import CLASSES
from demo.tokenizer import make_tokenizer
from demo.tune_text import choose_text, locked_views, tune_text
from demo.validate import Validation
from transformers import CLIPModel, CLIPTokenizer

SHIPPED = Path(__file__).parents[1] / "src/fedvlm/data/demo/emoji.zip"


def measure(images: Path, folder: Path) -> list[str]:
    model, tokenizer = load(folder)
    print(f"{folder} on {images}, per cent")
    scores = measure_gate(Demo(images), model, tokenizer, seeds=5)
    print(scores.table())
    failed = scores.failures()
    print(f"gate: {'; '.join(f'FAILED: {name}' for name in failed) or 'passed'}")
    return failed


def load(folder: Path) -> tuple[CLIPModel, CLIPTokenizer]:
    return CLIPModel.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)


def build(args: argparse.Namespace, recipe: Recipe) -> list[str]:
    # resvg_py is needed here only, not to measure a model
    from demo.art import (
        choose_demo,
        training_pairs,
        validation_drawings,
        write_demo,
        write_keywords,
    )
    from demo.concepts import Packages, load_concepts

    packages = Packages(args.cache)
    concepts, aliases = load_concepts(packages)
    write_demo(args.out, concepts, choose_demo(packages, concepts))
    write_keywords(packages, args.out, concepts)
    if args.art_only:
        return []
    validate = Validation(*validation_drawings(packages, concepts))
    images, owners = training_pairs(packages, concepts, aliases)
    copies = near_copies(images, Demo(args.out / "emoji.zip"))
    print(f"{len(images)} drawings, {copies.sum()} dropped as near-copies of a demo image")
    pixels = torch.from_numpy(images[~copies]).permute(0, 3, 1, 2).contiguous()
    captions, folder = Captions(owners[~copies], concepts), args.out / "model"
    if args.start:
        model, tokenizer = load(args.start)
    else:
        if args.tokenizer:
            tokenizer = CLIPTokenizer.from_pretrained(args.tokenizer)
        else:
            tokenizer = make_tokenizer([*captions.phrase_ids, *CLASSES])
        torch.manual_seed(recipe.seed)
        model = make_model(tokenizer, pixels[::8])

    def checkpoint(average: CLIPModel, progress: str) -> None:
        save(average, tokenizer, folder)
        print(progress, validate(average, tokenizer), flush=True)

    if not args.start:
        stage = Stage(recipe.steps, 1.0, 0.8, 0.998, starts_from_drawings=False)
        pretrain(pixels, captions, model, tokenizer, recipe, stage, checkpoint)
        model, _ = load(folder)
        views = locked_views(model, pixels, recipe.seed)
        tune_text(views, captions, model, tokenizer, recipe, recipe.text_steps)
        model.requires_grad_(True)
    stage = Stage(recipe.align_steps, recipe.align_pace, 0.5, 0.995, starts_from_drawings=True)
    pretrain(pixels, captions, model, tokenizer, recipe, stage, checkpoint)
    model, _ = load(folder)
    choose_text(pixels, captions, model, tokenizer, recipe, validate)
    save(model, tokenizer, folder)
    return measure(args.out / "emoji.zip", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--cache", type=Path, default=Path("demo-packages"))
    parser.add_argument("--art-only", action="store_true", help="images and keywords, no encoder")
    parser.add_argument("--start", type=Path, metavar="MODEL_DIR", help="in place of stages 1 and 2")
    parser.add_argument(
        "--gate-only",
        type=Path,
        metavar="MODEL_DIR",
        help="measure this model on the emoji.zip beside its folder, or else on the shipped one",
    )
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to use again")
    for setting in fields(Recipe):
        kind = float if isinstance(setting.default, float) else int
        flag, help_text = "--" + setting.name.replace("_", "-"), f"{setting.metadata['help']} ({setting.default})"
        parser.add_argument(flag, type=kind, default=setting.default, help=help_text)
    args = parser.parse_args()
    torch.set_num_threads(1)  # one thread gives the same sums on any machine
    if args.gate_only:
        archive = args.gate_only.parent / "emoji.zip"
        failed = measure(archive if archive.exists() else SHIPPED, args.gate_only)
    else:
        failed = build(args, Recipe(**{setting.name: getattr(args, setting.name) for setting in fields(Recipe)}))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
