"""Build the embedded demo: an emoji image set in four styles and a tiny CLIP pretrained on others.

    python tools/build_demo.py --out DIR                  # everything: about an hour on one core
    python tools/build_demo.py --out DIR --art-only       # images and keywords: about a minute
    python tools/build_demo.py --gate-only MODEL_DIR      # measure a model: some seconds

Needs torch, transformers and scikit-learn; but for --gate-only also resvg_py and the `npm` command.
The encoder is a plain transformers CLIPModel. It never sees a drawing of the four demo styles, so
they are to it what a new domain is to a large CLIP: recognisable from the words, but with room to
adapt.

The shipped model was made with the defaults and a vocabulary learnt by the tokenizers library,
which breaks ties at random. The one learnt here is the same each time but differs from that, so
`--tokenizer src/fedvlm/encoders/demo_model` is needed to repeat the shipped model.
"""

import argparse
from dataclasses import fields
from pathlib import Path

import torch
from demo.captions import Captions
from demo.gate import gate
from demo.images import Demo, near_copies
from demo.model import save
from demo.pretrain import pretrain
from demo.recipe import Recipe
from demo.sets import CLASSES
from demo.tokenizer import make_tokenizer
from demo.tune_text import tune_text
from transformers import CLIPModel, CLIPTokenizer

SHIPPED = Path(__file__).parents[1] / "src/fedvlm/data/demo/emoji.zip"


def measure(images: Path, folder: Path) -> None:
    model, tokenizer = load(folder)
    print(f"{folder} on {images}, mean of five splits, per cent")
    print(gate(Demo(images), model, tokenizer, seeds=5).table())


def load(folder: Path) -> tuple[CLIPModel, CLIPTokenizer]:
    return CLIPModel.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)


def build(args: argparse.Namespace, recipe: Recipe) -> None:
    # resvg_py is needed here only, not to measure a model
    from demo.art import choose_demo, training_pairs, write_demo, write_keywords
    from demo.concepts import Packages, load_concepts

    packages = Packages(args.cache)
    concepts, aliases = load_concepts(packages)
    write_demo(args.out, concepts, choose_demo(packages, concepts))
    write_keywords(packages, args.out, concepts)
    if args.art_only:
        return
    demo, folder = Demo(args.out / "emoji.zip"), args.out / "model"
    images, owners = training_pairs(packages, concepts, aliases)
    copies = near_copies(images, demo)
    print(f"{len(images)} drawings, {copies.sum()} dropped as near-copies of a demo image")
    pixels = torch.from_numpy(images[~copies]).permute(0, 3, 1, 2).contiguous()
    captions = Captions(owners[~copies], concepts)

    def checkpoint(model: CLIPModel, tokenizer: CLIPTokenizer, progress: str) -> None:
        save(model, tokenizer, folder)
        print(progress, gate(demo, model, tokenizer, seeds=1).brief())

    if not args.text_only:
        if args.tokenizer:
            tokenizer = CLIPTokenizer.from_pretrained(args.tokenizer)
        else:
            tokenizer = make_tokenizer([*captions.phrase_ids, *CLASSES])
        pretrain(pixels, captions, tokenizer, recipe, checkpoint)
    model, tokenizer = load(folder)
    tune_text(pixels, captions, model, tokenizer, recipe)
    save(model, tokenizer, folder)
    measure(args.out / "emoji.zip", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--cache", type=Path, default=Path("demo-packages"))
    parser.add_argument("--art-only", action="store_true", help="images and keywords, no encoder")
    parser.add_argument("--text-only", action="store_true", help="keep the image tower in --out")
    parser.add_argument(
        "--gate-only",
        type=Path,
        metavar="MODEL_DIR",
        help="measure this model on the emoji.zip beside its folder, or else on the shipped one",
    )
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to use again")
    for one in fields(Recipe):
        kind = float if isinstance(one.default, float) else int
        flag, told = "--" + one.name.replace("_", "-"), f"{one.metadata['help']} ({one.default})"
        parser.add_argument(flag, type=kind, default=one.default, help=told)
    args = parser.parse_args()
    torch.set_num_threads(1)  # one thread gives the same sums on any machine
    if args.gate_only:
        beside = args.gate_only.parent / "emoji.zip"
        measure(beside if beside.exists() else SHIPPED, args.gate_only)
    else:
        build(args, Recipe(**{one.name: getattr(args, one.name) for one in fields(Recipe)}))


if __name__ == "__main__":
    main()
