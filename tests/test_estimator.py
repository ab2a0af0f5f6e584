"""FederatedClassifier is a scikit-learn classifier, and fits what `fedvlm.run` trains."""

import copy

import numpy as np
import pytest

import fedvlm

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

EXCEPTIONS = {
    "check_estimators_dtypes": "its integer features have a row of zeros, and an embedding of zeros has no direction",
    "check_fit2d_1feature": "with 10 samples the method asks for validation samples; it does not mind one feature",
}


def blobs(n_samples=480, dim=16, n_classes=3, seed=0):
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(n_classes, dim))
    y = generator.integers(n_classes, size=n_samples)
    x = centres[y] + 0.7 * generator.normal(size=(n_samples, dim))
    return x, np.array(["ant", "bee", "cat", "dog"])[y], np.array(["north", "south", "west"])[np.arange(n_samples) % 3]


@pytest.mark.parametrize("method", ["ridge", "auto"])
def test_the_checks_of_scikit_learn_pass(method):
    estimator = fedvlm.FederatedClassifier(method)
    results = check_estimator(estimator, on_fail=None, on_skip=None, expected_failed_checks=EXCEPTIONS)
    failed = {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"}
    assert not failed
    expected = {result["check_name"] for result in results if result["status"] == "xfail"}
    assert expected == EXCEPTIONS.keys(), "an exception that passes now must be taken out of the list"
    assert sum(result["status"] == "passed" for result in results) >= 50


def test_fit_equals_a_run():
    x, y, clients = blobs()
    estimator = fedvlm.FederatedClassifier("ridge").fit(x, y, clients=clients)
    pairs = {id: (x[clients == id], y[clients == id]) for id in ("north", "south", "west")}
    result = fedvlm.run("ridge", clients=pairs, ratios=[0.75, 0.25, 0], seeds=[0])
    for id in pairs:
        expected = result.personalised(id).predict_proba(x[:20])
        np.testing.assert_allclose(estimator.predict_proba(x[:20], [id] * 20), expected, atol=1e-6)
    np.testing.assert_allclose(estimator.predict_proba(x[:20]), result.unseen().predict_proba(x[:20]), atol=1e-6)
    assert result.unseen().classes_.tolist() == estimator.classes_.tolist() == ["ant", "bee", "cat"]
    assert estimator.score(x, y) > 0.9


def test_it_works_in_a_pipeline_in_cross_validation_and_with_calibration():
    x, y, clients = blobs()
    pipeline = make_pipeline(FunctionTransformer(), fedvlm.FederatedClassifier("ridge"))
    pipeline.fit(x, y, federatedclassifier__clients=clients)
    assert pipeline[-1].clients_.tolist() == ["north", "south", "west"]
    estimator = fedvlm.FederatedClassifier("ridge")
    scores = cross_val_score(estimator, x, y, cv=3, params={"clients": clients})
    assert scores.min() > 0.8
    calibrated = CalibratedClassifierCV(estimator, cv=3).fit(x, y, clients=clients)
    np.testing.assert_allclose(calibrated.predict_proba(x).sum(axis=1), 1, atol=1e-6)
    assert calibrated.score(x, y) > 0.9


def test_it_is_cloned_and_copied_and_takes_data_frames():
    pandas = pytest.importorskip("pandas")
    x, y, clients = blobs()
    frame = pandas.DataFrame(x, columns=[f"f{place}" for place in range(x.shape[1])])
    estimator = clone(fedvlm.FederatedClassifier("ridge", settings={"min_class_samples": 20}))
    estimator.fit(frame, pandas.Series(y), clients=pandas.Series(clients))
    assert estimator.feature_names_in_.tolist() == list(frame.columns)
    again = copy.deepcopy(estimator)
    np.testing.assert_array_equal(again.predict(frame, clients), estimator.predict(frame, clients))


def test_wrong_clients_and_settings_are_refused_with_the_remedy():
    x, y, _ = blobs()
    with pytest.raises(ValueError, match="one client per sample, 480 in all; got shape \\(3,\\)"):
        fedvlm.FederatedClassifier().fit(x, y, clients=["a", "b", "c"])
    with pytest.raises(fedvlm.errors.SettingsError, match="did you mean 'rounds'"):
        fedvlm.FederatedClassifier("fedavg", settings={"roundz": 3, "head": "random"}).fit(x, y)
