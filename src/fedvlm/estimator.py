"""A scikit-learn estimator whose fit is a federated training on embeddings in memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.classifier.personalised import Personalised
from fedvlm.errors import DataError, SettingsError
from fedvlm.result import run

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise SettingsError("FederatedClassifier needs scikit-learn 1.6 or later; pip install 'fedvlm[sklearn]'") from error

SINGLE_CLIENT = "all"  # the name of the client if fit is given no clients


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Train one classifier per client and a shared one, on embeddings (samples, dim) in one process.

    Args:
        method: a method or its name.
        settings: further settings of `fedvlm.run`.
        text: (classes, dim) embeddings of the class names in the order of `classes_`.
        scale: their logit scale.
        validation_fraction: fraction of each client's samples to choose settings and to calibrate probabilities by.
        random_state: seed, or a generator of numpy.

    Example:
        >>> import fedvlm, numpy as np
        >>> x = np.random.default_rng(0).normal(size=(2, 60, 8))
        >>> y = np.tile([0, 1], 30)
        >>> model = fedvlm.FederatedClassifier("ridge").fit(x.reshape(120, 8), np.tile(y, 2), ["a"] * 60 + ["b"] * 60)
        >>> model.predict(x[0], clients=["a"] * 60).shape
        (60,)
    """

    def __init__(
        self,
        method: Any = "auto",
        *,
        settings: Mapping[str, Any] | None = None,
        text: Any = None,
        scale: float = 100.0,
        validation_fraction: float = 0.25,
        random_state: Any = 0,
    ) -> None:
        self.method = method
        self.settings = settings
        self.text = text
        self.scale = scale
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: Any, y: Any, clients: Any = None) -> "FederatedClassifier":
        """Train; `clients` (samples,) names the client of each sample, without it there is a single client."""
        X, y = validate_data(self, X, y, dtype="numeric")
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y has one class, {classes[0]!r}; a classifier needs at least two classes")
        names = _client_names(clients, len(X))
        ids = sorted(set(names.tolist()))
        ratios = (1 - self.validation_fraction, self.validation_fraction, 0.0)
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        try:
            samples: dict[str, Any] = {"clients": {id: (X[names == id], labels[names == id]) for id in ids}}
            samples |= {"classes": [str(name) for name in classes], "text": self.text, "scale": self.scale}
            result = run(self.method, **samples, ratios=ratios, seeds=[int(seed)], **(self.settings or {}))
        except DataError as error:
            raise ValueError(str(error)) from error  # what scikit-learn's tools expect of bad data
        self.classes_ = classes
        self.clients_ = np.array(ids)
        self.classifiers_ = {id: result.personalised(id) for id in ids}
        self.shared_ = result.unseen()
        return self

    def predict_proba(self, X: Any, clients: Any = None) -> NDArray[np.float64]:
        """Return probabilities (samples, classes) by the classifiers of the samples' clients.

        Without `clients`, and for a client that did not train, the shared classifier predicts; that of the only
        client, if there was one.
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype="numeric")
        only = len(self.clients_) == 1
        names = np.repeat(self.clients_, len(X)) if clients is None and only else _client_names(clients, len(X))
        out = np.zeros((len(X), len(self.classes_)))
        for id in sorted(set(names.tolist())):
            classifier: Personalised = self.classifiers_.get(id, self.shared_)
            members = names == id
            out[members] = classifier.log_probabilities(classifier.logits(X[members])).exp().numpy()
        return out

    def predict(self, X: Any, clients: Any = None) -> NDArray[Any]:
        """Return the most probable class of each sample; `clients` as in `predict_proba`."""
        probabilities = self.predict_proba(X, clients)
        predicted: NDArray[Any] = self.classes_[probabilities.argmax(axis=1)]
        return predicted


def _client_names(clients: Any, n_samples: int) -> NDArray[np.str_]:
    """Return the name of each sample's client; refuse a list of another length."""
    names = np.full(n_samples, SINGLE_CLIENT) if clients is None else np.asarray(clients).astype(str)
    if names.shape != (n_samples,):
        raise ValueError(f"clients must name one client per sample, {n_samples} in all; got shape {names.shape}")
    return names
