"""What the prompts of a run look at, as numbers and as pictures."""

import sys
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedvlm
from fedvlm import cli
from fedvlm.encoders.huggingface import demo
from fedvlm.errors import DataError, EncoderError, FedVLMError, SettingsError
from fedvlm.report.explain import explain, patch_grid, plane_positions, prompt_map
from fedvlm.report.page.model import build_model
from fedvlm.report.page.render import render_page
from fedvlm.report.plots import draw_explanation

CLASSES = ("bird", "fruit", "vehicle")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A few of the embedded pictures as folders of domain and class."""
    root = tmp_path_factory.mktemp("pictures")
    archive = Path(fedvlm.__file__).parent / "data" / "demo" / "emoji.zip"
    with ZipFile(archive) as box:
        for domain in ("noto", "twemoji"):
            for name in CLASSES:
                files = [file for file in box.namelist() if file.startswith(f"{domain}/{name}/")]
                assert len(files) >= 10, name
                for file in files[:10]:
                    place = root / "all" / file
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(box.read(file))
    return root


def run(folder: Path, method: str, **settings):
    return fedvlm.run(
        {"name": method, "rounds": 1, "local_epochs": 1, "n_ctx": 4, "lr": 0.1},
        data=f"folder:{folder / 'all'}",
        source={"layout": "domain/class"},
        encoder="demo",
        protocol="own-test",
        seeds=[0],
        out=folder / f"{method}-{len(settings)}",
        **settings,
    )


@pytest.fixture(scope="module")
def fedotp(folder):
    return run(folder, "fedotp")


@pytest.fixture(scope="module")
def image(folder) -> Path:
    return sorted((folder / "all" / "noto" / "bird").iterdir())[0]


def test_similarity_is_the_cosine_of_each_patch_and_the_class_behind_each_prompt(fedotp, image):
    explanation = explain(fedotp, image, name="fruit", client="noto")
    classifier = fedotp.personalised("noto")
    encoder = demo()
    pixels = encoder.preprocess(Image.open(image).convert("RGB"))
    patches = torch.from_numpy(encoder.embed([pixels], patches=True).patches).float()[0]
    unit = torch.nn.functional.normalize(patches, dim=1)
    for cosines, prompt in zip(
        explanation.similarity, (classifier.shared["prompt"], classifier.local["local prompt"]), strict=True
    ):
        text = classifier.frozen.text_tower(prompt)[classifier.frozen.classes.index("fruit")]
        np.testing.assert_allclose(cosines.ravel(), (unit @ text).numpy(), atol=1e-5)
    assert explanation.similarity.shape == (2, 6, 6)
    assert explanation.image.shape == (48, 48, 3)


def test_plans_take_their_share_of_the_image_and_no_patch_gives_more_than_it_has(fedotp, image):
    explanation = explain(fedotp, image, gammas=(0.3, 1.0, 0.3))
    assert list(explanation.plans) == [0.3, 1.0]
    for gamma, plan in explanation.plans.items():
        assert plan.min() >= 0
        assert plan.sum(0).max() <= 1 + 1e-3
        np.testing.assert_allclose(plan.mean((1, 2)), gamma / 2, rtol=1e-3)


def test_the_answer_and_its_chance_are_those_of_the_clients_classifier(fedotp, image):
    explanation = explain(fedotp, image, client="twemoji")
    assert explanation.client == "twemoji"
    assert explanation.name == explanation.likeliest
    assert explanation.probability >= 1 / 3
    rest = [explain(fedotp, image, client="twemoji", name=class_name).probability for class_name in CLASSES]
    assert sum(rest) == pytest.approx(1)
    assert max(rest) == pytest.approx(explanation.probability)


def test_the_picture_shown_is_the_one_the_encoder_sees(image):
    preprocess = demo().preprocess
    pixels = preprocess(Image.open(image).convert("RGB"))
    restored = preprocess.undo(pixels)
    again = (restored / 255 - np.array(preprocess.mean)) / np.array(preprocess.std)
    np.testing.assert_allclose(again.transpose(2, 0, 1), pixels, atol=1e-5)


def test_the_command_draws_both_images(fedotp, folder, image, tmp_path):
    out = tmp_path / "new" / "image.png"
    output = call("explain", fedotp.folder, "--image", image, "--class", "bird", "--output", out)
    assert "bird" in output and str(out) in output
    with Image.open(out) as drawn:
        assert drawn.format == "PNG" and drawn.width > 1000
    call("explain", fedotp.folder, "--image", image, "--gamma", 0.5, "--gamma", 0.9)
    assert (fedotp.folder / f"explain-{image.stem}.png").is_file()
    coop = run(folder, "coop", clients={"partition": "domain-dirichlet", "count": 2, "min_samples": 2})
    call("explain", coop.folder, "--prompts")
    assert (coop.folder / "prompts.png").is_file()
    prompts = prompt_map(coop)
    assert prompts.groups == ("noto", "noto", "twemoji", "twemoji")
    assert np.isfinite(prompts.places).all()
    model = build_model([coop])
    drawn = model["runs"][0]["prompts"]
    assert drawn["clients"] == list(prompts.clients)
    assert drawn["places"] == prompts.places.round(3).tolist()
    figure = render_page(model).partition("<figcaption>Local prompts of coop")[2].partition("</figure>")[0]
    assert figure.count("<circle") == 4


def test_fedotp_says_its_share_and_how_far_its_prompts_have_parted(fedotp):
    [training] = fedotp.trainings().values()
    for diagnostics in training["maps"].values():
        assert diagnostics["gamma"] == 0.8
        assert -1 <= diagnostics["cosine of the prompts"] < 1
    text = render_page(build_model([fedotp]))
    assert "γ, fraction of an image that prompts take" in text and "t-SNE" not in text


def call(*words):
    done = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_what_cannot_be_drawn_is_refused_by_name(fedotp, folder, image, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(image.read_bytes()[:200])
    plain = run(folder, "promptfl")
    cases = [
        (lambda: explain(fedotp, tmp_path / "none.png"), "none.png"),
        (lambda: explain(fedotp, tmp_path), "cannot be read"),
        (lambda: explain(fedotp, broken), "broken.png: the image is truncated"),
        (lambda: explain(fedotp, image, name="brid"), "did you mean 'bird'"),
        (lambda: explain(fedotp, image, client="nobody"), "noto, twemoji"),
        (lambda: explain(fedotp, image, gammas=(1.5,)), "1.5"),
        (lambda: explain(fedotp, image, seed=9), "no seed 9"),
        (lambda: explain(plain, image), "promptfl, which moves nothing"),
        (lambda: explain(tmp_path / "none", image), "run directory"),
        (lambda: prompt_map(plain), "promptfl, whose clients keep no prompt"),
        (lambda: prompt_map(fedotp), "2 local prompts, too few"),
    ]
    for attempt, words in cases:
        with pytest.raises(FedVLMError, match=words):
            attempt()


def test_the_command_wants_an_image_or_the_map(fedotp, image):
    for words in ([], ["--image", str(image), "--prompts"]):
        with pytest.raises(SettingsError, match="--image FILE, or --prompts"):
            CliRunner().invoke(cli.app, ["explain", str(fedotp.folder), *words], catch_exceptions=False)


def test_a_missing_matplotlib_is_named_with_its_extra(fedotp, image, tmp_path, monkeypatch):
    explanation = explain(fedotp, image)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingsError, match=r"fedvlm\[plot\]"):
        draw_explanation(explanation, tmp_path / "x.png")


def test_patches_form_a_grid_or_are_refused():
    assert patch_grid(196, 224, 224) == (14, 14)
    assert patch_grid(8, 32, 64) == (2, 4)
    with pytest.raises(EncoderError, match="37 patches"):
        patch_grid(37, 48, 48)


def test_a_place_that_cannot_be_written_is_an_error_of_the_disk(fedotp, image, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        draw_explanation(explain(fedotp, image), tmp_path / "file" / "x.png")


def clusters(count=3, size=12, dim=40):
    draw = np.random.default_rng(0)
    centres = 10 * draw.normal(size=(count, dim))
    label = np.repeat(np.arange(count), size)
    return torch.from_numpy(centres[label] + draw.normal(size=(len(label), dim))), label


@pytest.mark.parametrize(("count", "size"), [(2, 5), (3, 12), (6, 25)])
def test_separated_clusters_of_prompts_stay_separated(count, size):
    points, label = clusters(count, size)
    place = plane_positions(list(points))
    distance = np.linalg.norm(place[:, None] - place, axis=2)
    np.fill_diagonal(distance, np.inf)
    assert (label[distance.argmin(1)] == label).all()
    assert place.std() == pytest.approx(1.0)


def test_the_same_prompts_always_give_the_same_map_whatever_their_shape():
    points, _ = clusters()
    np.testing.assert_array_equal(plane_positions(list(points.reshape(-1, 8, 5))), plane_positions(list(points)))


@pytest.mark.parametrize("points", [torch.zeros(6, 9), torch.ones(5, 1), torch.eye(4)])
def test_equal_or_few_prompts_have_finite_positions(points):
    place = plane_positions(list(points))
    assert place.shape == (len(points), 2) and np.isfinite(place).all()
