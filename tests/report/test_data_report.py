"""`fedvlm data-report` counts, compares and suppresses on three drawn hospitals."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.errors import DataError
from fedvlm.report.data_report import data_report, distances_to_rest, headline, write_report
from fedvlm.runner.settings import build

COUNTS = {"north": (40, 40), "south": (30, 50), "west": (60, 5)}


def silent(activity, done, total):
    pass


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    place, draw = tmp_path_factory.mktemp("hospitals"), np.random.default_rng(0)
    for site, counts in COUNTS.items():
        for name, count in zip(("healthy", "ill"), counts, strict=True):
            (place / site / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 90, (20, 24, 3), dtype=np.uint8)
                pixels[..., 0 if name == "ill" else 2] += 150
                pixels[: 10 if site == "west" else 0] //= 3
                Image.fromarray(pixels).save(place / site / name / f"{number}.png")
    shutil.copy(place / "north" / "ill" / "0.png", place / "north" / "ill" / "copy.png")
    return place


def settings(data):
    return build({"method": "ridge", "protocol": "own-test", "data": str(data)})


@pytest.fixture(scope="module")
def report(images):
    return data_report(settings(images), 16, silent)


def test_counts_duplicates_and_images_are_right(report):
    sites = {site.site: site for site in report.sites}
    assert report.classes == ["healthy", "ill"]
    assert sites["north"].counts == [40, 41] and sites["south"].counts == [30, 50]
    assert sites["south"].duplicates == 0 and sites["north"].duplicates is None  # one, below the minimum
    assert sites["south"].images["width"] == 24 and sites["south"].images["n_sizes"] == 1
    assert sites["west"].images["mean"] < sites["south"].images["mean"]
    assert sites["south"].samples == 80 and not sites["south"].has_groups


def test_a_small_count_and_the_sum_that_would_reveal_it_are_suppressed(report, tmp_path):
    west = next(site for site in report.sites if site.site == "west")
    assert west.counts == [60, None] and report.total == [130, None]
    assert west.samples is None and west.gain["samples"] is None and west.images["measured"] is None
    text = write_report(report, tmp_path / "page.html").read_text()
    table = re.search(r'(?s)<table id="samples">.*?</table>', text).group()
    assert "&lt;16" in table and not {">5<", ">65<", ">96<"} & set(re.findall(r">\d+<", table))
    assert dict(headline(report))["Suppressed counts"] == "1"


def test_nothing_is_suppressed_without_a_minimum(images):
    described = data_report(settings(images), 1, silent)
    assert described.total == [130, 96] and described.n_suppressed == 0


def test_distances_come_from_sums_and_say_which_site_differs(report):
    generator = torch.Generator().manual_seed(0)
    x = {
        id: torch.nn.functional.normalize(torch.randn(n, 8, generator=generator) + shift, dim=1).double()
        for id, n, shift in (("a", 200, 0.0), ("b", 300, 0.0), ("c", 100, 2.0))
    }
    counts = {"a": np.array([100, 100]), "b": np.array([150, 150]), "c": np.array([0, 100])}
    sums, sizes = {id: rows.sum(0) for id, rows in x.items()}, {id: len(rows) for id, rows in x.items()}
    found = distances_to_rest("c", counts, sums, sizes)
    rest = torch.cat([x["a"], x["b"]])
    assert found.embeddings == pytest.approx(float((x["c"].mean(0) - rest.mean(0)).norm()))
    expected = (x["c"].var(0, correction=0).sum() / 100 + rest.var(0, correction=0).sum() / 500).sqrt()
    assert found.by_chance == pytest.approx(float(expected), rel=1e-6)
    assert found.classes == pytest.approx(0.5) and found.embeddings > 3 * found.by_chance
    del x["c"], counts["c"], sums["c"], sizes["c"]
    alike = distances_to_rest("a", counts, sums, sizes)
    assert alike.embeddings < 2 * alike.by_chance and alike.classes == 0
    assert "west" in dict(headline(report))["Sites that differ from the others"]


def test_gains_are_accuracies_of_validation_samples(report):
    for site in report.sites:
        gain = site.gain
        assert gain["difference"] == pytest.approx(gain["federated"] - gain["alone"])
        assert gain["helps"] in ("likely", "unlikely", "unclear") and 0 <= gain["alone"] <= 1


def test_the_command_writes_an_offline_page_and_json(images, tmp_path):
    out = tmp_path / "data.html"
    done = CliRunner().invoke(app, ["data-report", str(images), "--min-count", "16", "-o", str(out)])
    assert done.exit_code == 0 and f"report: {out}" in done.output
    text = out.read_text()
    assert "Content-Security-Policy" in text and not re.search(r'(?:src|href)="https?:', text)
    done = CliRunner().invoke(app, ["data-report", str(images), "--json", "-o", str(out)])
    assert json.loads(done.stdout)["total"] == [130, 96]


def test_a_single_site_is_refused(images, tmp_path):
    shutil.copytree(images / "north", tmp_path / "north")
    with pytest.raises(DataError, match="has one site, 'north'; a federation needs at least two"):
        data_report(settings(tmp_path), 1, silent)
