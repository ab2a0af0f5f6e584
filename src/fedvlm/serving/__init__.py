"""Serve an exported classifier over HTTP: images or embeddings in; classes, prediction sets and rejections out.

Images are neither stored nor logged. Requests are checked and limited as those of `fedvlm serve-encoder` are.
"""

from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.classifier.personalised import Personalised, reopen_encoder
from fedvlm.classifier.predict import Options, Prediction, predict_embeddings
from fedvlm.core import Matching
from fedvlm.data.sources import to_eight_bit
from fedvlm.encoders.images import decode
from fedvlm.encoders.serve import MAX_BATCH, MAX_BYTES, Gateway, RequestRefused, Service, new_application
from fedvlm.errors import FedVLMError
from fedvlm.report.explain import explain_image
from fedvlm.report.page.render import open_template, page_shell

MAX_COVERAGE = 0.999
STYLE = """
#drop { border: 2px dashed var(--quiet); padding: 2rem; text-align: center; margin: 1rem 0; }
#drop.over { border-style: solid; }
canvas { max-width: 100%; image-rendering: pixelated; }
"""


class ClassifierService:
    """Predict what requests send, independent of the HTTP framework."""

    def __init__(self, classifier: Personalised, encoder: Any | None, max_batch: int = MAX_BATCH) -> None:
        self.classifier, self.encoder, self.max_batch = classifier, encoder, max_batch
        self.images = None
        if encoder is not None:
            # Any name does: a file that arrives has none, and its first bytes say what it is.
            convert = lambda data: to_eight_bit("image.png", data, classifier.window)  # noqa: E731
            self.images = Service(encoder, MAX_BYTES, max_batch, convert)
        self.can_reject = self._can(Options(reject=True))
        self.predicted: Counter[str] = Counter()  # images by class, and those rejected

    def _can(self, options: Options) -> bool:
        try:
            options.check(self.classifier)
        except FedVLMError:
            return False
        return True

    @property
    def has_heatmap(self) -> bool:
        is_single = not self.classifier.frozen.multi_label
        return self.encoder is not None and is_single and isinstance(self.classifier.method, Matching)

    def info(self) -> dict[str, Any]:
        classifier = self.classifier
        return {
            "method": classifier.method.name,
            "classes": list(classifier.frozen.classes),
            "encoder": classifier.encoder,
            "multi_label": classifier.frozen.multi_label,
            "dim": classifier.frozen.dim,
            "takes_images": self.images is not None,
            "rejects": self.can_reject,
            "has_heatmap": self.has_heatmap,
            "max_batch": self.max_batch,
            "notes": classifier.warnings(),
        }

    def predict(self, body: Any) -> tuple[dict[str, Any], int]:
        """Predict one image or embedding."""
        name = _only_name(body, "image", "embedding")
        options, heatmap = self._options(body), body.get("heatmap", False)
        if not isinstance(heatmap, bool):
            raise RequestRefused(422, "heatmap must be true or false")
        (prediction,) = self._predict({f"{name}s": [body[name]]}, f"{name}s", options)
        content = self._describe(prediction)
        if name == "image" and heatmap and self.has_heatmap:
            content["heatmap"] = self._heatmap(body[name], prediction.label)
        return content, 1

    def predict_batch(self, body: Any) -> tuple[dict[str, Any], int]:
        """Predict several images or embeddings."""
        predictions = self._predict(body, _only_name(body, "images", "embeddings"), self._options(body))
        return {"predictions": [self._describe(prediction) for prediction in predictions]}, len(predictions)

    def _options(self, body: Mapping[str, Any]) -> Options:
        coverage = body.get("coverage")
        if coverage is not None:
            is_number = isinstance(coverage, int | float) and not isinstance(coverage, bool)
            if not is_number or not 0 < coverage <= MAX_COVERAGE:
                raise RequestRefused(422, f"coverage must be above 0 and at most {MAX_COVERAGE}")
            coverage = max(1e-6, round(float(coverage), 6))  # the exact fraction of more digits is slow
        options = Options(coverage, self.can_reject)
        try:
            options.check(self.classifier)
        except FedVLMError as error:
            raise RequestRefused(422, str(error)) from error
        return options

    def _predict(self, body: Mapping[str, Any], name: str, options: Options) -> list[Prediction]:
        values = self._embed(body) if name == "images" else self._read_embeddings(body[name])
        skipped: list[tuple[str, str]] = []
        labels = [f"{name[:-1]} {index}" for index in range(len(values))]
        fault = "it has no embedding: NaN, infinite or zero"
        predictions = predict_embeddings(self.classifier, labels, values, fault, skipped, options)
        if skipped:
            raise RequestRefused(422, f"{skipped[0][0]}: {skipped[0][1]}")
        for prediction in predictions:
            self.predicted.update(["rejected"] if prediction.rejected else prediction.names)
        return predictions

    def _embed(self, body: Mapping[str, Any]) -> NDArray[Any]:
        if self.images is None:
            raise RequestRefused(422, "this classifier has no encoder here; send embeddings")
        images = self.images.read_strings(body, "images")
        needs = self.classifier.method.traits.needs
        if "image tower" in needs:
            return np.stack(self.images.prepare_images(images))
        patches = "patches" in needs
        vectors = self.images.embed_images(images, patches)
        return np.asarray(vectors.patches if patches else vectors.pooled, np.float32)

    def _read_embeddings(self, rows: Any) -> NDArray[np.float32]:
        dim = self.classifier.frozen.dim
        is_rows = isinstance(rows, list) and bool(rows)
        if not is_rows or any(not isinstance(row, list) or len(row) != dim for row in rows):
            raise RequestRefused(422, f"an embedding must be a list of {dim} numbers")
        if len(rows) > self.max_batch:
            raise RequestRefused(413, f"{len(rows)} embeddings in one request; send at most {self.max_batch}")
        if any(type(number) not in (int, float) for row in rows for number in row):
            raise RequestRefused(422, f"an embedding must be a list of {dim} numbers")
        try:
            with np.errstate(over="ignore"):
                values = np.array(rows, np.float64).astype(np.float32)
        except OverflowError as error:
            raise RequestRefused(422, "an embedding holds a number that is too large") from error
        if self.classifier.method.traits.needs & {"patches", "image tower"}:
            raise RequestRefused(422, f"{self.classifier.method.name} predicts from images; send images")
        return values

    def _describe(self, prediction: Prediction) -> dict[str, Any]:
        findings = {"findings": list(prediction.findings)} if prediction.findings is not None else {}
        return findings | {
            "class": prediction.label,
            "probabilities": dict(prediction.probabilities),
            "prediction_set": None if prediction.prediction_set is None else list(prediction.prediction_set),
            "rejected": prediction.rejected,
        }

    def _heatmap(self, image: str, label: str) -> dict[str, Any]:
        """Return the cosines of patches and the predicted class, by the shared and by the local prompt."""
        explanation = explain_image(self.classifier, self.encoder, decode(b64decode(image)), label)
        shared, local = explanation.similarity.tolist()
        return {"class": label, "shared": shared, "local": local}

    def metrics(self, gateway: Gateway) -> str:
        """Return counts in Prometheus' text format."""
        lines = ["# TYPE fedvlm_requests_total counter"]
        lines += [f'fedvlm_requests_total{{status="{key}"}} {count}' for key, count in gateway.n_requests.items()]
        lines += ["# TYPE fedvlm_request_seconds_total counter", f"fedvlm_request_seconds_total {gateway.seconds:.6f}"]
        lines += ["# TYPE fedvlm_predictions_total counter"]
        for name, count in self.predicted.items():
            escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
            lines.append(f'fedvlm_predictions_total{{class="{escaped}"}} {count}')
        return "\n".join(lines) + "\n"


def _only_name(body: Any, *names: str) -> str:
    given = [name for name in names if isinstance(body, dict) and name in body]
    if len(given) != 1:
        raise RequestRefused(422, f"the body must be a JSON object with either {' or '.join(names)}")
    return given[0]


def open_service(folder: str | Path, encoder: str = "", access: Mapping[str, Any] | None = None) -> ClassifierService:
    """Load a classifier and its encoder; one that was trained on embeddings alone takes embeddings alone."""
    classifier = Personalised.from_pretrained(folder, encoder)
    name = classifier.encoder.rpartition("@")[0]
    box = reopen_encoder(classifier.encoder, encoder, access) if name or encoder else None
    return ClassifierService(classifier, box)


def create_app(service: ClassifierService, token: str | None, max_bytes: int = MAX_BYTES) -> Any:
    """Create the ASGI application; with a token, all but the page, its description and /health ask for it."""
    server = new_application("fedvlm classifier", version="1", docs_url=None, redoc_url=None)
    from fastapi import Request
    from fastapi.responses import HTMLResponse, PlainTextResponse

    gateway = Gateway(token, max_bytes)
    refusals: dict[int | str, Any] = {code: {"description": text} for code, text in REFUSALS.items()}

    @server.get("/", response_class=HTMLResponse)
    def page() -> Any:
        html, policy = render_page(service.info())
        return HTMLResponse(html, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})

    @server.get("/health")
    def health() -> dict[str, bool]:
        return {"up": True}

    @server.get("/info", responses={401: refusals[401]})
    async def info(request: Request) -> Any:
        reply = await gateway.reply(request, None)
        return service.info() if reply.status_code == 200 else reply

    @server.get("/metrics", response_class=PlainTextResponse, responses={401: refusals[401]})
    async def metrics(request: Request) -> Any:
        reply = await gateway.reply(request, None)
        return PlainTextResponse(service.metrics(gateway)) if reply.status_code == 200 else reply

    @server.post("/predict", responses=_responses(PREDICTION, refusals), openapi_extra=_request(service, False))
    async def predict(request: Request) -> Any:
        return await gateway.reply(request, service.predict)

    batch = {"type": "object", "properties": {"predictions": {"type": "array", "items": PREDICTION}}}
    batch["required"] = ["predictions"]

    @server.post("/predict/batch", responses=_responses(batch, refusals), openapi_extra=_request(service, True))
    async def predict_batch(request: Request) -> Any:
        return await gateway.reply(request, service.predict_batch)

    return server


REFUSALS = {
    401: "The token is missing or wrong.",
    408: "The body took too long.",
    413: "The request is too large.",
    422: "The body is not as described, or an image cannot be read.",
}
PREDICTION = {
    "type": "object",
    "required": ["class", "probabilities", "prediction_set", "rejected"],
    "properties": {
        "class": {"type": "string"},
        "findings": {"type": "array", "items": {"type": "string"}, "description": "Of a classifier of findings."},
        "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
        "prediction_set": {"type": ["array", "null"], "items": {"type": "string"}},
        "rejected": {"type": ["boolean", "null"], "description": "Unlike anything the client has seen."},
        "heatmap": {"type": "object"},
    },
}


def _responses(schema: Mapping[str, Any], refusals: dict[int | str, Any]) -> dict[int | str, Any]:
    return {200: {"description": "The prediction.", "content": {"application/json": {"schema": schema}}}, **refusals}


def _request(service: ClassifierService, is_batch: bool) -> dict[str, Any]:
    """Describe a body; the schema is that of the classifier, so that programs can be made from it."""
    dim = service.classifier.frozen.dim
    embedding = {"type": "array", "items": {"type": "number"}, "minItems": dim, "maxItems": dim}
    image = {"type": "string", "format": "byte", "description": "An image file in base64."}
    coverage = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_COVERAGE}
    forms = []
    for name, schema in (("image", image), ("embedding", embedding)):
        items = {"type": "array", "items": schema, "minItems": 1, "maxItems": service.max_batch}
        key, value = (f"{name}s", items) if is_batch else (name, schema)
        properties = {key: value, "coverage": coverage} | ({} if is_batch else {"heatmap": {"type": "boolean"}})
        forms.append({"type": "object", "properties": properties, "required": [key], "additionalProperties": False})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"oneOf": forms}}}}}


def render_page(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the page and its content security policy; it sends requests only to where it came from."""
    script = (files("fedvlm.serving") / "page.js").read_text("utf-8")
    parts = page_shell(script, STYLE, "connect-src 'self'")
    return open_template("page.html", "fedvlm.serving").render(**parts, info=info), parts["policy"]
