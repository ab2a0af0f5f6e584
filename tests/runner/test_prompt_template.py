"""A template's way through a run: manifest, personalised and exported classifiers, explanations."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import fedvlm
from fedvlm.classifier.export import export
from fedvlm.classifier.personalised import Personalised, client_classifier
from fedvlm.encoders.huggingface import demo
from fedvlm.errors import SettingsError
from fedvlm.record import Record
from fedvlm.report.explain import explain
from fedvlm.storage.files import write_json

TEMPLATE = "a drawing of a {} on white"
STILL = {"rounds": 1, "local_epochs": 1, "lr": 1e-12}  # nothing moves by more than rounding


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of two plain classes from two sites."""
    place = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for number in range(48):
        kind = number % 2
        path = place / f"site-{number // 2 % 2}" / ("red_bird", "blue")[kind] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 90, (48, 48, 3), dtype=np.uint8)
        pixels[..., 2 * kind] += 150
        Image.fromarray(pixels).save(path)
    return place


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    made = {}

    def get(name, *templates, **settings):
        key = (name, templates, *sorted(settings.items()))
        if key not in made:
            made[key] = fedvlm.run(
                {"name": name, **settings},
                data=str(folder),
                source={"templates": list(templates or (TEMPLATE,))},
                protocol="own-test",
                out=tmp_path_factory.mktemp("run") / "r",
            )
        return made[key]

    return get


def text(template):
    return demo().embed_text([template.format(name) for name in ("blue", "red bird")])


def test_a_still_prompt_from_the_template_scores_as_zero_shot(run):
    still, zero = run("promptfl", ctx_init="template", **STILL), run("zero-shot")
    [training], [zero_training] = still.trainings().values(), zero.trainings().values()
    n_correct = {id: score["test_hits"] for id, score in training["scores"].items()}
    assert n_correct == {id: score["test_hits"] for id, score in zero_training["scores"].items()}
    assert still.manifest["template"] == TEMPLATE
    assert "template" not in zero.manifest


def test_an_exported_prompt_is_read_back_with_its_template(run, tmp_path):
    export(run("promptfl", ctx_init="template", **STILL).folder, "site-1", tmp_path / "c")
    back = Personalised.from_pretrained(tmp_path / "c")
    assert back.frozen.text_tower.template == TEMPLATE
    text_embedding = back.frozen.text_tower(back.shared["prompt"])
    assert torch.allclose(text_embedding, text(TEMPLATE), atol=1e-5)
    assert (text(TEMPLATE) - text(TEMPLATE.split("}")[0] + "}.")).abs().max() > 1e-2


def test_of_several_templates_a_prompt_takes_the_first(run):
    result = run("coop", TEMPLATE, "one {}", ctx_init="template", **STILL)
    classifier = result.personalised("site-0")
    text_embedding = classifier.frozen.text_tower(classifier.local["prompt"])
    assert torch.allclose(text_embedding, text(TEMPLATE), atol=1e-5)
    assert (text_embedding - classifier.frozen.text).abs().max() > 1e-2  # the mean over both


def test_a_record_from_before_templates_is_read_with_a_full_stop(run):
    result = run("promptfl", "a {}", n_ctx=2, **STILL)
    file = result.folder / "manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest.pop("template") == "a {}"
    write_json(file, {key: value for key, value in manifest.items() if key != "checksum"})
    assert client_classifier(Record(result.folder), "site-0").frozen.text_tower.template == "{}."


def test_an_explanation_of_a_still_prompt_shows_the_templates_cosines(run, folder):
    image = sorted((folder / "site-0" / "blue").iterdir())[0]
    explanation = explain(run("fedotp", ctx_init="template", **STILL).folder, image, name="blue")
    encoder = demo()
    pixels = encoder.preprocess(Image.open(image).convert("RGB"))
    patches = torch.from_numpy(encoder.embed([pixels], patches=True).patches).float()[0]
    expected = (torch.nn.functional.normalize(patches, dim=1) @ text(TEMPLATE)[0]).numpy()
    for similarity in explanation.similarity:
        np.testing.assert_allclose(similarity.ravel(), expected, atol=1e-5)


def test_a_number_of_vectors_that_is_not_the_templates_is_refused_before_any_work(run):
    with pytest.raises(SettingsError, match="n_ctx = 9, but the template 'a drawing"):
        run("promptfl", ctx_init="template", n_ctx=9, **STILL)
