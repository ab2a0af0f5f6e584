"""The page draws who was far from the rest, and in which round."""

import re

import pytest

import fedvlm
from fedvlm.report.page.model import build_model, outlier_history
from fedvlm.report.page.render import render_page
from fedvlm.report.page.svg import MAX_OUTLIER_CLIENTS, draw_outliers

CLIENTS = {"partition": "dirichlet", "count": 6, "alpha": 100.0, "min_samples": 1}


@pytest.fixture(scope="module")
def results(rows_like, tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart")
    common = {"embedded": rows_like(), "clients": CLIENTS, "protocol": "own-test"}
    method = {"name": "fedavg", "rounds": 3, "lr": 0.01}
    attack = {"attack": "sign-flip", "attacker_fraction": 0.1, "attack_strength": 20.0}
    return [
        fedvlm.run(method, out=folder / "a", **common, **attack),
        fedvlm.run(method, out=folder / "b", **common, channel={"clip": 1.0, "verified": True}),
    ]


def test_the_page_draws_each_round_and_fills_those_in_which_a_client_was_far(results):
    model = build_model(results)
    [about] = model["runs"][0]["outliers"]
    n_outliers = sum(numbers[0] for by_round in about["clients"].values() for numbers in by_round.values())
    lines = results[0].rounds
    assert n_outliers == sum(numbers["far"] for line in lines for numbers in line["clients"].values()) >= 3
    text = render_page(model)
    assert "Outliers among the clients" in text and results[0].outlier_warnings[0].split(" of ")[0] in text
    drawing = str(draw_outliers(about))
    assert drawing in text
    assert drawing.count('class="bubble"') == n_outliers and drawing.count("<rect") == 6 * 3


def test_a_run_in_which_nobody_can_be_compared_has_no_drawing(results):
    assert build_model(results)["runs"][1]["outliers"] == []
    assert "Outliers among the clients" not in render_page(build_model(results[1:]))


def test_a_drawing_has_those_first_that_were_far_most_often_and_escapes_their_names():
    client_line = {"norm": 9.0, "alike": 8.0, "cosine": -0.5}
    lines = [
        {
            "training": "0-all",
            "round": number,
            "clients": {
                **{f"c{i:02}": {**client_line, "far": False} for i in range(60)},
                "<b>bad</b>": {**client_line, "far": True},
            },
        }
        for number in range(300)
    ]
    [about] = outlier_history(lines)
    text = str(draw_outliers(about))
    assert "<b>" not in text and re.findall(r'class="tick end">([^<]*)<', text)[0].startswith("&lt;")
    assert text.count("300 rounds") == 1 and text.count("<rect") == MAX_OUTLIER_CLIENTS * 300
    assert "9 times the median norm, 8 times the norm of similar updates, -0.5 cosine" in text


def test_lines_of_older_records_without_likeness_are_drawn():
    line = {"training": "t", "round": 0, "clients": {"a": {"norm": 9.0, "cosine": 0.1, "far": True}}}
    assert "9 times the median norm, 0.1 cosine" in str(draw_outliers(outlier_history([line])[0]))
