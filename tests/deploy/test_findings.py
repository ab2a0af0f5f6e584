"""Several findings per image at deployed sites, of patients with several images, from manifest to classifiers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedvlm
from fedvlm.channel.verified import count_classes
from fedvlm.cli import app
from fedvlm.core import make
from fedvlm.deploy.kits import create_kits, read_server, read_site, write_site
from fedvlm.deploy.operations.events import EventLog, read_events
from fedvlm.deploy.server.evaluation import evaluate_at_sites
from fedvlm.deploy.server.run import DeployedRun, check_deployable, describe_sites, join_late
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.policy import Policy
from fedvlm.deploy.site.service import Site
from fedvlm.deploy.site.snapshot import choose_samples, keep_samples
from fedvlm.deploy.transcript import find_transcripts, verify_transcript
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError
from fedvlm.maths.gaussian_classes import SENSITIVITY, class_sums
from fedvlm.parts.findings import finding_client, per_finding
from fedvlm.record import Record
from fedvlm.result import Result
from fedvlm.runner.load import load
from fedvlm.runner.settings import build

SITES = ["east", "north", "west"]
FINDINGS = ["edema", "mass"]


def write_films(folder, seed, patients=60, images=1):
    """A manifest of drawn films: edema is bright, mass is a square; a few labels are unknown."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    lines = ["path,group,edema,mass,sex"]
    for patient in range(patients):
        edema, mass = draw.integers(0, 2, 2)
        for image in range(images):
            pixels = draw.integers(0, 60, (24, 24)) + 120 * edema
            if mass:
                pixels[6:14, 6:14] = 250
            name = f"{patient}-{image}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
            cells = ["" if draw.random() < 0.05 else str(value) for value in (edema, mass)]
            lines.append(f"{name},{seed}-{patient},{','.join(cells)},{'fm'[patient % 2]}")
    (folder / "films.csv").write_text("\n".join(lines) + "\n")
    return folder / "films.csv"


class Clinics:
    """Kits of three sites with films of their own, served in this process."""

    def __init__(self, folder, plain=True, **films):
        self.folder = folder
        create_kits(folder / "kits", SITES, "127.0.0.1", 8443, deadline=60.0, wait=0.0, plain=plain)
        self.kit = read_server(folder / "kits" / "server")
        for seed, name in enumerate(SITES):
            manifest = write_films(folder / name, seed, **films)
            kit = read_site(self.site(name))
            write_site(replace(kit, data=str(manifest), encoder="demo"))
            text = (self.site(name) / "policy.toml").read_text()
            (self.site(name) / "policy.toml").write_text(text.replace('"auto"', '"auto", "ridge"'))
        self.start()

    def start(self):
        self.sites = {name: Site(read_site(self.site(name))) for name in SITES}

    def site(self, name):
        return self.folder / "kits" / f"site-{name}"

    def run(self, method="ridge", out="run", **overrides):
        statement = {"purpose": "a test", "contact": "tests@example.org"}
        settings = build(
            {"method": method, "protocol": "own-test", "source": {"classes": FINDINGS}, **statement, **overrides}
        )
        check_deployable(self.kit, settings)
        record = Record(self.folder / out)
        grid = local_grid(self.sites)
        DeployedRun(
            grid, self.kit, settings, record, lambda *words: None, log_event=EventLog(self.kit.folder)
        ).run_all()
        return Result(record.folder)

    def classifier(self, name):
        [folder] = (self.site(name) / "classifiers").iterdir()
        return fedvlm.Personalised.from_pretrained(folder)


@pytest.fixture
def clinics(tmp_path):
    return Clinics(tmp_path)


def shared_of(result):
    return result.outcome("all")[0]


@pytest.mark.parametrize("method", ["auto", {"name": "fedavg", "rounds": 2, "lr": 0.1}], ids=str)
def test_sites_train_on_findings_and_keep_classifiers_of_them(clinics, method):
    result = clinics.run(method)
    assert result.manifest["multi_label"] is True and result.manifest["classes"] == FINDINGS
    scores = result.trainings()["all"]["scores"]
    assert set(scores) == set(SITES) and all(scores[name]["AUC"] > 0.6 for name in SITES)
    assert "AUC" in result.table(columns=["AUC"])
    [folder] = (clinics.site("north") / "classifiers").iterdir()
    done = CliRunner().invoke(app, ["score", str(folder), str(clinics.folder / "north" / "films.csv"), "--json"])
    assert done.exit_code == 0 and '"AUC"' in done.output
    out = [line for line in Ledger(clinics.site("north")).read().lines if line["direction"] == "out"]
    assert any(line.get("costs") == "upload" and line["fields"] for line in out)


@pytest.mark.parametrize("method", ["auto", "tofa"])
def test_a_verified_sum_of_findings_verifies(tmp_path, method):
    clinics = Clinics(tmp_path)
    result = clinics.run(method, channel={"verified": True})
    [transcript] = find_transcripts(result.folder)
    assert "masked uploads are signed" in "\n".join(verify_transcript(transcript, {}))
    assert all(clinics.classifier(name).frozen.multi_label for name in SITES)
    uploads = [line for line in Ledger(clinics.site("west")).read().lines if line.get("costs") == "upload"]
    assert uploads and all(list(line["fields"]) == ["masked"] for line in uploads)


def test_a_patient_with_many_images_counts_once_at_a_site(tmp_path):
    clinics = Clinics(tmp_path, patients=12, images=6)  # 72 images, but fewer than 16 patients
    with pytest.raises(FederationError, match="fewer than 16 training samples"):
        clinics.run()
    for name in SITES:
        path = clinics.site(name) / "policy.toml"
        path.write_text(path.read_text().replace("min_samples = 16", "min_samples = 4"))
    result = clinics.run()
    assert not any(value.any() for key, value in shared_of(result).items() if "counts" in key or "sums" in key)
    log = " ".join(event.get("text", "") for event in read_events(clinics.site("west")))
    assert "too few samples, so nothing of them is uploaded: edema, mass" in log


def test_a_site_with_one_class_per_image_is_left_out_and_told_why(clinics):
    folder = clinics.folder / "west"
    lines = [line.split(",") for line in (folder / "films.csv").read_text().splitlines()[1:]]
    single = [f"{path},{group},{'mass' if mass == '1' else 'edema'}" for path, group, _, mass, _ in lines]
    (folder / "films.csv").write_text("\n".join(["path,group,label", *single]) + "\n")
    clinics.start()
    clinics.kit = replace(clinics.kit, quorum=0.5)
    result = clinics.run()
    assert "do not have the same kind of labels (one class, or several findings" in result.rounds[0]["missing"]["west"]


def test_a_late_site_gets_a_classifier_of_findings(clinics):
    late = clinics.sites.pop("west")
    clinics.kit = replace(clinics.kit, quorum=0.5)
    clinics.run("tofa", "kits/server/runs/one")
    clinics.sites["west"] = late
    folder = clinics.kit.folder
    scores = join_late(local_grid(clinics.sites), clinics.kit, folder / "runs" / "one", "west", EventLog(folder))
    assert scores["0-all"]["AUC"] > 0.7 and clinics.classifier("west").frozen.multi_label


def test_few_new_positives_of_a_finding_are_not_shown_by_a_second_run(clinics):
    clinics.run(out="first")
    path = clinics.folder / "north" / "films.csv"
    lines = path.read_text().splitlines()
    few = [number for number, line in enumerate(lines) if line.split(",")[2] == "0"][:4]
    for number in few:
        name, group, _, mass, sex = lines[number].split(",")
        lines[number] = f"{name},{group},1,{mass},{sex}"
    path.write_text("\n".join(lines) + "\n")
    clinics.start()
    again = clinics.run(out="second")
    assert any("north uses the samples that it had" in note for note in again.manifest["notes"])
    log = " ".join(event.get("text", "") for event in read_events(clinics.site("north")))
    assert "edema, no edema changed by fewer than 16" in log


def test_a_removed_image_comes_back_from_the_file_with_its_findings(clinics):
    path = clinics.folder / "north" / "films.csv"
    settings = build({"method": "ridge", "data": str(path), "encoder": "demo"})
    embedded = load(settings, lambda *words: None)[0]
    keep_samples(clinics.folder / "state", embedded)
    fewer = embedded.select(np.arange(3, len(embedded.labels)))
    chosen = choose_samples(clinics.folder / "state", fewer, False, False, 16)
    assert chosen.status == "kept"
    assert (chosen.rows.findings[chosen.rows.labels] == embedded.findings[embedded.labels]).all()


def test_a_policy_finds_findings_that_too_few_patients_have_or_lack():
    labels = np.array([[1, 0, 1]] * 20 + [[0, 0, -1]] * 20 + [[1, 1, -1]] * 3)
    assert Policy().small_classes(labels) == [1]
    groups = np.arange(43) // 4  # fewer than 16 patients in all
    assert Policy().small_classes(labels, groups) == [0, 1, 2]


def test_what_a_sum_counts_of_findings_is_by_finding():
    method = per_finding(make("ridge", min_class_samples=2))
    counted = count_classes(torch.tensor([[1, 0], [1, -1], [0, 0]]), 2, method)
    assert counted["counts"].tolist() == [[0, 2, 0], [2, 0, 0]]
    assert counted["samples"].tolist() == [3, 2]


def test_noise_of_a_method_covers_a_sample_in_all_findings():
    """One sample may change the statistics of every finding, so the noise of each is larger by the root."""
    method = make("tofa", noise_multiplier=2.0, min_class_samples=1)
    wrapped = per_finding(method)
    frozen = fedvlm.core.Frozen(("a", "b", "c", "d"), 6, 100.0, None, multi_label=True)
    assert wrapped.noise(frozen) == 4 * method.noise(replace(frozen, classes=("no a", "a"), multi_label=False))
    client = toy_client(frozen, wrapped)
    noise = torch.cat([finding_client(client, finding).noise for finding in range(4)], dim=1)
    assert torch.equal(noise, 2.0 * client.noise)
    x, y = client.x.double(), client.y
    other = y.clone()
    other[0] = 1 - other[0]
    change = [
        torch.cat([part.flatten() for part in class_sums(x, y[:, k], 2)])
        - torch.cat([part.flatten() for part in class_sums(x, other[:, k], 2)])
        for k in range(4)
    ]
    assert torch.cat(change).norm() <= 4**0.5 * SENSITIVITY
    assert torch.cat(change).norm() > SENSITIVITY / 2**0.5  # more than one finding changes


def toy_client(frozen, method, samples=30):
    draw = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(samples, frozen.dim, generator=draw), dim=1)
    y = (torch.rand(samples, len(frozen.classes), generator=draw) < 0.5).long()
    return fedvlm.core.Client(
        x,
        y,
        torch.arange(samples)[None],
        x[:2],
        y[:2],
        x[:0],
        torch.zeros(1, 0, dtype=torch.long),
        torch.zeros(len(frozen.classes), 0, frozen.dim),
        torch.randn(1, method.noise(frozen), generator=draw),
    )


def test_a_stricter_policy_reaches_every_finding():
    method = per_finding(make("ridge", min_class_samples=16))
    stricter = Policy(min_class_samples=40).with_min_class_samples(method)
    assert stricter.single.min_class_samples == stricter.traits.classes.min_class_samples == 40


def test_a_classifier_of_findings_is_measured_without_training_and_its_data_are_not_described(tmp_path):
    clinics = Clinics(tmp_path)
    result = clinics.run("fedavg", channel={"clip": 1.0})
    log_event, grid = EventLog(clinics.kit.folder), local_grid(clinics.sites)
    done = evaluate_at_sites(grid, clinics.kit, {"evaluates": [str(result.folder), "zero-shot"]}, log_event)
    for name, final in result.trainings()["all"]["scores"].items():
        shared, zero_shot = done["sites"][name]["scores"]
        assert (shared["test_rows"], shared["test_hits"]) == (final["test_rows"], final["test_hits"])
        assert zero_shot["test_rows"] == final["test_rows"] > done["sites"][name]["units"] > 0
        assert shared["AUC"] == pytest.approx(final["AUC"])
    clinics.run("ridge", "data", channel={"verified": True}, allow_small=True)
    with pytest.raises(FederationError, match="several findings each, which only `fedvlm data-report` describes"):
        describe_sites(grid, clinics.kit, clinics.folder / "data", log_event)
