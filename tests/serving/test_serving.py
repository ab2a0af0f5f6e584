"""`fedvlm serve`: what it answers is what the classifier predicts, and nothing a stranger sends ends in a 5xx."""

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedvlm.classifier.personalised import Personalised
from fedvlm.classifier.predict import predict
from fedvlm.serving import create_app, open_service
from tests.helpers.classifiers import export_classifier
from tests.helpers.live_server import running


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return export_classifier(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def url(place):
    with running(create_app(open_service(place[0]), None)) as address:
        yield address


def send(url, path, body, **options):
    return httpx.post(f"{url}{path}", json=body, timeout=60, **options)


def test_images_get_what_predict_gives(url, place):
    folder, images = place
    files = sorted((images / "site-0" / "red").iterdir())[:3]
    expected = predict(folder, files, coverage=0.9, reject=True).rows
    encoded = [b64encode(file.read_bytes()).decode() for file in files]
    batch = send(url, "/predict/batch", {"images": encoded, "coverage": 0.9}).json()["predictions"]
    single = [send(url, "/predict", {"image": image, "coverage": 0.9}).json() for image in encoded]
    for answer, row in [*zip(batch, expected, strict=True), *zip(single, expected, strict=True)]:
        assert answer["class"] == row.label and answer["rejected"] is row.rejected
        assert answer["prediction_set"] == list(row.prediction_set)
        assert answer["probabilities"] == pytest.approx(dict(row.probabilities), abs=1e-6)


def test_embeddings_get_calibrated_probabilities_and_strange_ones_are_rejected(url, place):
    classifier = Personalised.from_pretrained(place[0])
    x = np.random.default_rng(0).normal(size=(4, classifier.frozen.dim))
    answers = send(url, "/predict/batch", {"embeddings": x.tolist()}).json()["predictions"]
    for answer, row in zip(answers, classifier.predict_proba(x), strict=True):
        assert [answer["probabilities"][name] for name in classifier.classes_] == pytest.approx(row, abs=1e-6)
        assert answer["rejected"] is True and answer["prediction_set"] is None
    one = send(url, "/predict", {"embedding": x[0].tolist()}).json()
    assert one == answers[0]


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        ({}, 422, "either image or embedding"),
        ({"image": "AAAA", "embedding": [1]}, 422, "either image or embedding"),
        ({"image": 3}, 422, "list of strings"),
        ({"image": "?"}, 422, "image 0 is not base64"),
        ({"image": "AAAA"}, 422, "image 0: "),
        ({"embedding": [1, 2]}, 422, "a list of 128 numbers"),
        ({"embedding": [0] * 128}, 422, "no embedding: NaN, infinite or zero"),
        ({"embedding": ["1"] * 128}, 422, "a list of 128 numbers"),
        ({"embedding": [10**400] * 128}, 422, "too large"),
        ({"embedding": [1] * 128, "coverage": 0.999}, 422, "needs 999 calibration samples"),
        ({"embedding": [1] * 128, "coverage": True}, 422, "coverage must be above 0"),
        ({"embedding": [1] * 128, "heatmap": 1}, 422, "heatmap must be true or false"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(url, body, status, detail):
    answer = send(url, "/predict", body)
    assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text


def test_a_token_is_asked_for_and_limits_hold(place):
    with running(create_app(open_service(place[0]), "secret", max_bytes=5000)) as url:
        assert httpx.get(f"{url}/health").json() == {"up": True}
        assert httpx.get(f"{url}/").status_code == 200
        for path in ("/info", "/metrics"):
            assert httpx.get(url + path).status_code == 401
        assert send(url, "/predict", {"image": "AAAA"}).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{url}/info", headers=headers).json()["classes"] == ["blue", "red"]
        assert send(url, "/predict", {"image": "A" * 6000}, headers=headers).status_code == 413
        lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
        assert 'fedvlm_requests_total{status="401"} 3' in lines


def test_a_batch_that_is_too_large_is_refused(place):
    service = open_service(place[0])
    service.max_batch = 2
    with running(create_app(service, None)) as url:
        answer = send(url, "/predict/batch", {"embeddings": [[1.0] * 128] * 3})
        assert answer.status_code == 413 and "send at most 2" in answer.json()["detail"]


def test_metrics_count_images_by_class(url, place):
    image = b64encode(next((place[1] / "site-0" / "blue").iterdir()).read_bytes()).decode()

    def count():
        lines = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#")
        return int(lines.get('fedvlm_predictions_total{class="blue"}', 0))

    before = count()
    answer = send(url, "/predict", {"image": image}).json()
    assert count() == before + (not answer["rejected"])


def test_fedotp_draws_a_heat_map(tmp_path):
    folder, images = export_classifier(tmp_path, "fedotp", rounds=1, lr=0.01)
    image = b64encode(next((images / "site-0" / "red").iterdir()).read_bytes()).decode()
    with running(create_app(open_service(folder), None)) as url:
        answer = send(url, "/predict", {"image": image, "heatmap": True}).json()
        grid = np.array(answer["heatmap"]["local"])
        assert grid.ndim == 2 and np.isfinite(grid).all() and answer["heatmap"]["class"] == answer["class"]
        assert "heatmap" not in send(url, "/predict", {"image": image}).json()


def test_the_description_names_every_path(url):
    description = httpx.get(f"{url}/openapi.json").json()
    assert set(description["paths"]) == {"/", "/health", "/info", "/metrics", "/predict", "/predict/batch"}
    assert json.dumps(description).count('"minItems": 128') == 2


def test_schemathesis_finds_no_server_error(url, tmp_path):
    pytest.importorskip("schemathesis")
    checks = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"
    command = [Path(sys.executable).parent / "schemathesis", "run", f"{url}/openapi.json", "--checks", checks]
    command += ["--max-examples", "25", "--phases", "examples,coverage,fuzzing", "--seed", "1", "--no-color"]
    done = subprocess.run([*command, "--mode", "all"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "Tested: 6" in done.stdout, done.stdout[-1500:]
