"""A finished run as its directory tells it, and the classifiers it has made."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Frozen, Tensors, make
from fedvlm.errors import DataError, FedVLMError, SettingsError
from fedvlm.evaluate import Table
from fedvlm.record import Record, read_json, read_tensors, write_tensors

DESCRIPTIONS = "descriptions.safetensors"  # the file of a run that has some


def slug(name: str) -> str:
    """A file name for a job: readable, and different for different names."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40]
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Personalised:
    """One client's classifier: frozen, shared and local tensors, and the encoder it goes with."""

    method: Any
    frozen: Frozen
    shared: Tensors
    local: Tensors
    client: str
    encoder: str  # name and fingerprint

    def logits(self, x: Tensor) -> Tensor:
        """(rows, classes) for what the encoder this was trained on makes of pictures.

        Rows are pooled embeddings, or what the method needs instead: patches or pixels.
        """
        wanted: tuple[int | str, ...] = ("rows", self.frozen.dim)
        if "image tower" in self.method.needs:
            wanted = ("rows", 3, "height", "width")
        elif "patches" in self.method.needs:
            wanted = ("rows", "patches", self.frozen.dim)
        fits = x.ndim == len(wanted) and all(
            size == want
            for size, want in zip(x.shape, wanted, strict=True)
            if isinstance(want, int)
        )
        if not fits:
            raise DataError(
                f"rows of shape {tuple(x.shape)} do not fit; this classifier takes "
                f"({', '.join(map(str, wanted))}) from {self.encoder}"
            )
        if not x.isfinite().all():
            raise DataError("the rows hold NaN or infinite numbers; look at their source")
        x = torch.nn.functional.normalize(x.float(), dim=1) if len(wanted) == 2 else x.float()
        sent = self.method.send(self.shared, self.client)
        out: Tensor = self.method.predict(self.frozen, sent, self.local, x)
        return out

    def predict(self, x: Tensor) -> list[str]:
        """The name of the likeliest class of each row."""
        return [self.frozen.classes[i] for i in self.logits(x).argmax(dim=1).tolist()]

    def save_pretrained(self, folder: str | Path) -> None:
        tensors = {f"shared/{key}": value for key, value in self.shared.items()}
        tensors |= {f"local/{key}": value for key, value in self.local.items()}
        if self.frozen.text is not None:
            tensors["frozen/text"] = self.frozen.text
        if self.frozen.descriptions is not None:
            tensors["frozen/descriptions"] = self.frozen.descriptions
        about = {
            "method": {"name": self.method.name, **asdict(self.method)},
            "classes": self.frozen.classes,
            "dim": self.frozen.dim,
            "scale": self.frozen.scale,
            "seed": self.frozen.seed,
            "client": self.client,
            "encoder": self.encoder,
        }
        write_tensors(Path(folder) / "classifier.safetensors", tensors, about)

    @classmethod
    def from_pretrained(cls, folder: str | Path, encoder: str = "") -> "Personalised":
        """A saved classifier; `encoder` says where its encoder is now, if the method needs it."""
        path = Path(folder) / "classifier.safetensors"
        if not path.exists():
            raise DataError(f"{folder} holds no classifier; `fedvlm export` writes one")
        tensors, about = read_tensors(path)

        def group(name: str) -> Tensors:
            return {k.split("/", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{name}/")}

        frozen = Frozen(
            tuple(about["classes"]),
            about["dim"],
            about["scale"],
            group("frozen").get("text"),
            about["seed"],
            descriptions=group("frozen").get("descriptions"),
        )
        method = make(**about["method"])
        return cls(
            method,
            equip(frozen, method, about["encoder"], encoder),
            group("shared"),
            group("local"),
            about["client"],
            about["encoder"],
        )


def reopen(encoder: str, where: str = "", access: Mapping[str, Any] | None = None) -> Any:
    """The very encoder something was trained on, by its name and fingerprint.

    `where` is what it is called now, if that has changed.
    """
    from fedvlm.encoders import fingerprint, open_encoder

    name, _, wanted = encoder.rpartition("@")
    try:
        box = open_encoder(where or name, **(access or {}))
    except FedVLMError as error:
        raise type(error)(
            f"{error} (the classifier goes with {encoder}; if that is called otherwise here, name "
            "it with --encoder)"
        ) from error
    if not fingerprint(box).startswith(wanted):
        raise SettingsError(
            f"{where or name} is not the encoder this was trained on: its fingerprint is "
            f"{fingerprint(box)[:16]}, not {wanted} ({name}); bring the old weights back, or train "
            "again"
        )
    return box


def equip(frozen: Frozen, method: Any, encoder: str, where: str = "") -> Frozen:
    """The towers a method needs, from the very encoder it was trained on."""
    if not method.needs & {"text tower", "image tower"}:
        return frozen
    from fedvlm.load import towers

    text, image = towers(reopen(encoder, where), frozen.classes, method.needs)
    return replace(frozen, text_tower=text, image_tower=image)


@dataclass(frozen=True)
class Result:
    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return dict(read_json(self.folder / "manifest.json"))

    @cached_property
    def descriptions(self) -> Tensor | None:
        """(classes, texts, dim) of the sentences that all clients had, if there were any."""
        path = self.folder / DESCRIPTIONS
        return read_tensors(path)[0]["common"] if path.exists() else None

    @cached_property
    def tables(self) -> list[Table]:
        """One table per seed, in the order of the seeds."""
        return list(read_json(self.folder / "result.json")["tables"])

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One entry per round of every job, as recorded."""
        return Record(self.folder).lines()

    @property
    def traffic(self) -> tuple[int, float]:
        """Exchanges of a client with the server, and the bytes both ways over all of them.

        The most of any client, and the mean over clients and jobs. A round's download is what it
        starts from, so the last download stands for the first, which everyone has by `init`.
        """
        moved: dict[tuple[str, str], list[int]] = {}
        for line in self.rounds:
            for id, one in line["clients"].items():
                if size := one["bytes_up"] + one["bytes_down"]:
                    moved.setdefault((line["job"], id), []).append(size)
        totals = [sum(sizes) for sizes in moved.values()]
        most = max(map(len, moved.values()), default=0)
        return most, sum(totals) / len(totals) if totals else 0.0

    def table(self, form: str = "text") -> str:
        """Mean ± deviation over seeds as text, markdown, latex or csv."""
        from fedvlm.report.tables import compare

        return compare([self], form)

    def jobs(self, seed: int | None = None) -> Mapping[str, dict[str, Any]]:
        """Scores and map diagnostics of every training of one seed (the first one if none)."""
        return {
            job: dict(read_json(self._path(job, seed, "json"))) for job in self.manifest["jobs"]
        }

    def outcome(self, job: str, seed: int | None = None) -> tuple[Tensors, dict[str, Tensors]]:
        """What a job ended with: the shared tensors, and the local ones of each client."""
        tensors, about = read_tensors(self._path(job, seed, "safetensors"))

        def group(name: str) -> Tensors:
            return {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)}

        local = {id: group(f"local/{number}/") for number, id in enumerate(about["train"])}
        return group("shared/"), local

    def personalised(self, client: str, seed: int | None = None) -> Personalised:
        """A client's own classifier, from the first job in which it trained."""
        if names := self.manifest.get("local"):
            raise SettingsError(
                f"{', '.join(names)} of {client!r} never left its site; its classifier is there, "
                "in the folder classifiers of its kit"
            )
        for job in self.manifest["jobs"]:
            shared, local = self.outcome(job, seed)
            if client in local:
                return self._classifier(shared, local[client], client, seed)
        raise SettingsError(
            f"no client {client!r} trained in {self.folder}; "
            f"its clients are {', '.join(self.manifest['clients'])}"
        )

    def local(self, job: str | None = None, seed: int | None = None) -> dict[str, Tensors]:
        """What each client that trained in a job (the first one if none) keeps at home."""
        tensors, about = read_tensors(
            self._path(job or self.manifest["jobs"][0], seed, "safetensors")
        )
        out: dict[str, Tensors] = {id: {} for id in about["train"]}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "local":
                number, _, key = rest.partition("/")
                out[about["train"][int(number)]][key] = value
        return out

    def unseen(self, job: str | None = None, seed: int | None = None) -> Personalised:
        """The classifier of a client that joins later: what is shared, and the first local."""
        job = job or self.manifest["jobs"][0]
        shared, _ = self.outcome(job, seed)
        bare = self._classifier(shared, {}, "", seed)
        _, local = bare.method.init(bare.frozen)
        return self._classifier(shared, local, "", seed)

    def _path(self, job: str, seed: int | None, ending: str) -> Path:
        seeds: Sequence[int] = self.manifest["identity"]["seeds"]
        if seed is not None and seed not in seeds:
            raise SettingsError(f"the run has no seed {seed}; it has {list(seeds)}")
        return self.folder / "jobs" / f"{seeds[0] if seed is None else seed}-{slug(job)}.{ending}"

    def _classifier(
        self, shared: Tensors, local: Tensors, client: str, seed: int | None
    ) -> Personalised:
        told = self.manifest
        text = None if told["text"] is None else torch.tensor(told["text"])
        frozen = Frozen(
            tuple(told["classes"]),
            told["dim"],
            told["scale"],
            text,
            told["identity"]["seeds"][0] if seed is None else seed,
            descriptions=self.descriptions,
        )
        method = make(**told["identity"]["method"])
        frozen = equip(frozen, method, told["encoder"])
        return Personalised(method, frozen, shared, local, client, told["encoder"])
