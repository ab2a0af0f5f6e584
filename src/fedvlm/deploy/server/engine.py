"""Exchange signed Flower messages with real sites."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

from torch import Tensor

from fedvlm import __version__, tensors
from fedvlm.channel import Channel
from fedvlm.channel.validation import check_sample_count, tensor_schema
from fedvlm.core import Tensors
from fedvlm.data.catalogue import catalogue
from fedvlm.data.splits import SPLITS
from fedvlm.data.table import Dataset
from fedvlm.deploy import messages
from fedvlm.deploy.identity.certificates import current_certificate, exclusion_reason
from fedvlm.deploy.identity.keys import Signer, Verifier
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.messages import PROTOCOL
from fedvlm.deploy.operations.events import EventLogger, ignore_event
from fedvlm.engines.client import RoundReplies, Task
from fedvlm.engines.flower.client import to_arrays, to_tensors
from fedvlm.engines.flower.engine import FlowerEngine
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.storage.files import read_json, write_json

MAX_RELATIVE_DIFFERENCE = 1e-4  # relative: what the encoders of two machines may differ by
OPEN_TIMEOUT_SECONDS = 600.0  # seconds a site has to open a training: it may have to embed its images first
MAX_LOST_UPLOADS = 1000  # uploads that may have left a site and never arrived; more it would not allow
NODES_FILE = "nodes.json"  # in the server's folder
LOG_INTERVAL_SECONDS = 10.0  # seconds between two log lines with the sites that are awaited
RETRY_SECONDS = 60.0  # seconds until a site that took no part is asked again: it may have consented


@dataclass(frozen=True)
class SiteOpening:
    """Hold what a site reported when it opened a training."""

    header: Mapping[str, Any]
    first: Tensors  # shared tensors as it would start from them
    text: Tensor | None
    descriptions: Tensor | None = None

    @property
    def texts_of_plan(self) -> Tensors:
        texts = {"text": self.text, "descriptions": self.descriptions}
        return {name: value for name, value in texts.items() if value is not None}

    @property
    def texts(self) -> Tensors:
        return {} if self.text is None else {"class texts": self.text}


class RemoteEngine(FlowerEngine):
    """Run rounds over sites; each must prove its key, and late sites are admitted when they connect."""

    def __init__(
        self,
        grid: Any,
        kit: ServerKit,
        spec: Any,
        reference: Tensors,
        log_event: EventLogger = ignore_event,
        excluded_nodes: Iterable[int] = (),  # nodes that are not to be asked
    ) -> None:
        self.log_event, self.last_log_time = log_event, 0.0  # when it last said whom it waits for
        self.channel = Channel(**spec["identity"]["channel"])
        super().__init__(grid, {}, messages.training_key(spec), kit.quorum, kit.deadline)
        self.kit, self.spec, self.reference = kit, spec, reference
        self.sign = Signer(kit.folder / "signing.key")
        self.site_keys: dict[str, str] = {}  # that the sites which are there have come with
        self.sites: dict[str, SiteOpening] = {}
        self.counts = {name: dict.fromkeys(SPLITS, 0) for name in kit.sites}  # rows of each part
        self.base = ""  # a site that the others are like
        self.rejected_nodes: dict[int, float] = {}  # nodes of sites that took no part, and when
        self.unidentified_nodes: dict[int, str] = {}  # nodes that are nobody's here; never asked again
        self.excluded_nodes = frozenset(excluded_nodes)
        self.opening = token_hex(8)  # of a new run; a resumed one has that of its begin
        self.notes: list[str] = []  # on the sites' data and versions, for the record

    def seal(self, message: Message) -> Message:
        return self.sign(message)

    def unseal(self, message: Message, id: str, context: str) -> Message:
        name = str(message.header.get("client"))
        if name not in self.kit.sites:
            raise FederationError(f"{context}: {name[:80]!r} is not a site of this federation")
        if reason := self.exclusion_reason(name):
            raise FederationError(f"{context}: {reason}")
        try:
            Verifier(current_certificate(self.kit.folder, name).key.encode())(message, f"site {name}")
        except FederationError as error:
            raise FederationError(f"{context}: {error}") from error
        return message

    def exclusion_reason(self, id: str) -> str:
        return exclusion_reason(self.kit.folder, id)

    def is_complete(self, waiting: set[str]) -> bool:
        return all(self.exclusion_reason(name) for name in waiting)

    def drop_revoked(self) -> None:
        """Drop sites whose key was revoked; a site with a new key is admitted again by that key."""
        for name in self.kit.sites:
            reason = self.exclusion_reason(name)
            if reason:
                self.absent[name] = reason
            elif name in self.nodes and self.site_keys[name] != current_certificate(self.kit.folder, name).key:
                self.absent[name] = "it has a new key, and is not connected with it yet"
            else:
                continue
            self.nodes.pop(name, None)

    def describe_error(self, error: Any) -> str:
        """Return our own sentence for a reported error; of any other text, one printable line at most."""
        if type(error) is str:
            plain = " ".join(error.split())[:300]
            return "".join(char for char in plain if char.isprintable())
        return messages.render_error(error)

    def check(self, message: Message, id: str, request: Message) -> None:
        messages.check_reply(message, request.header)
        messages.check_arrays(message)
        if message.header["releases"] > message.header["round"] + MAX_LOST_UPLOADS:
            raise FederationError("it reports more uploads than it can have sent")
        counts, scores, opened = self.counts[id], message.header["scores"], self.sites[id].header
        held = counts["validation"] or counts["train"]
        # Known labels count with several findings per image, and groups where metrics are of groups.
        n_labels = len(opened["classes"]) if opened.get("multi_label") else 1
        is_exact = n_labels == 1 and self.spec["identity"].get("group_metrics", "image") == "image"
        for part, n_samples in (("validation", held), ("test", counts["test"])):
            n_scored, most = scores[f"{part}_rows"], n_labels * n_samples
            if n_scored > most or (is_exact and n_scored not in (0, most)):
                raise FederationError(f"it reports {n_scored} {part} samples, but {most} when it opened the training")

    def wait_for_sites(self) -> None:
        """Wait for the sites as long as the kit says, and open the training at each."""
        end = monotonic() + self.kit.wait
        while True:
            self.drop_revoked()
            self.open_new_nodes(OPEN_TIMEOUT_SECONDS)
            absent_sites = set(self.kit.sites) - set(self.nodes)
            if absent_sites <= self.absent.keys() or monotonic() > end:
                break
            if monotonic() - self.last_log_time > LOG_INTERVAL_SECONDS:
                self.last_log_time = monotonic()
                self.log_event("waiting", sites=sorted(absent_sites), left=round(end - monotonic()))
            sleep(0.5)
        self.missing = {id: self.absent.get(id, "it is not connected") for id in sorted(absent_sites)}
        self.missing |= {f"node {node}": reason for node, reason in self.unidentified_nodes.items()}
        if self.nodes:  # sites that do not fit the largest group cannot stop the others
            group = min(self._compatible_groups(), key=lambda group: (-len(group), min(group)))
            self.base = group[0]
            for name in sorted(self.nodes.keys() - set(group)):
                self.missing[name] = self.describe_difference(self.base, name) or ""
                self._reject(self.nodes.pop(name), name, self.missing[name])
        self._check_quorum(self.kit.sites, self.nodes, 0)

    def _compatible_groups(self) -> list[list[str]]:
        """Group the sites that can train together."""
        groups: list[list[str]] = []
        for name in sorted(self.nodes):
            for group in groups:
                if self.describe_difference(group[0], name) is None:
                    group.append(name)
                    break
            else:
                groups.append([name])
        return groups

    def open_new_nodes(self, patience: float) -> None:
        """Open the training at nodes that are new, or were rejected a while ago."""
        past = {*self.nodes.values(), *self.unidentified_nodes, *self.excluded_nodes}
        past |= {node for node, when in self.rejected_nodes.items() if monotonic() - when < RETRY_SECONDS}
        new = {f"node {node_id}": node_id for node_id in self.grid.get_node_ids() if node_id not in past}
        if not new:
            return
        exchange = OpeningExchange(self, new, patience)
        for id, reply in exchange.exchange(dict.fromkeys(new, self.opening_message()), 0).items():
            self._register_site(reply, new[id])
        for id, reason in exchange.missing.items():
            if id in exchange.site_names:
                self._reject(new[id], exchange.site_names[id], reason.removeprefix(f"{id}: "))
            else:
                self.unidentified_nodes[new[id]] = reason

    def opening_message(self) -> Message:
        header = {"kind": "open", "training": self.training, "round": 0, "spec": self.spec}
        header |= {"opening": self.opening, "software": __version__, "protocol": PROTOCOL}
        return Message(header, to_arrays(self.reference))

    def _reject(self, node: int, name: str, reason: str) -> None:
        self.absent[name] = reason
        self.log_event("refused", site=name, why=reason)
        self.rejected_nodes[node] = monotonic()

    def _register_site(self, reply: Message, node: int) -> None:
        header, values = reply.header, to_tensors(reply.arrays)
        name = self._register_node(header["client"], node)
        first = {key[7:]: value for key, value in values.items() if key.startswith("shared/")}
        self.sites[name] = SiteOpening(header, first, values.get("text"), values.get("descriptions"))
        self.counts[name] = dict(header["samples"])
        self.rows[name] = self.counts[name]["train"]
        self.log_event("connected", site=name, samples=self.rows[name], version=header.get("software", ""))
        for text in describe_opening(header):
            self.notes.append(f"{name} {text}")
            self.log_event("notice", site=name, text=text)

    def _register_node(self, name: str, node: int) -> str:
        self.nodes[name] = node
        write_json(self.kit.folder / NODES_FILE, {**known_nodes(self.kit), name: node})
        self.site_keys[name] = current_certificate(self.kit.folder, name).key
        self.absent.pop(name, None)
        return name

    def check_opening(self, message: Message, request: Message) -> None:
        """Check what a single site can get wrong; differences between sites are checked later."""
        if (protocol := message.header.get("protocol", PROTOCOL)) != PROTOCOL:
            raise FederationError(
                f"it runs fedvlm {str(message.header.get('software'))[:20]!r} with protocol {str(protocol)[:20]}, and "
                f"the server {__version__!r} with protocol {PROTOCOL}; install the same fedvlm at both"
            )
        messages.check_reply(message, request.header)
        messages.check_arrays(message, limit=float("inf"))  # a first tensor may wait at infinity
        header, expected_classes = message.header, self.spec["classes"]
        if header["opened"] != self.training or (expected_classes and header["classes"] != expected_classes):
            raise FederationError("it opened another training, or with other classes")
        if header.get("template", "") not in {"", *known_templates(self.spec["identity"]["source"])}:
            raise FederationError(
                "its prompt template is not in the experiment; name the template there, as source.templates, or remove "
                "the site's own"
            )
        if not header["scale"] > 0 or not header["classes"]:
            raise FederationError("the scale of its encoder, or its list of classes, is invalid")
        shape = (len(header["classes"]), *([2] if header.get("multi_label") else []), header["dim"])
        for key, value in message.arrays.items():
            is_text = (key == "text" and value.shape == shape) or (key == "descriptions" and value.ndim == 3)
            if not (key.startswith("shared/") or is_text):
                raise FederationError("it sends tensors that do not belong to an opening")
        for part in SPLITS:
            check_sample_count(header["samples"][part], self.channel, "it")
        if self.kit.max_samples and header["samples"]["train"] > self.kit.max_samples:
            raise FederationError(
                f"it reports {header['samples']['train']} training samples, but server.toml allows "
                f"{self.kit.max_samples} at most"
            )

    def describe_difference(self, first: str, name: str) -> str | None:
        """Describe how two sites differ in encoder, classes or first tensors, or return None."""
        first_site, second_site = self.sites[first], self.sites[name]
        for key in ("encoder", "classes", "multi_label", "dim", "scale", "local", "template"):
            first_value, theirs = (site.header.get(key, "") or "" for site in (first_site, second_site))
            if key == "encoder":
                first_value, theirs = messages.encoder_fingerprint(first_value), messages.encoder_fingerprint(theirs)
            if not _is_close(first_value, theirs):
                # Words of a site stay out of the record; numbers and fingerprints may enter it.
                is_word = key in ("classes", "local", "template")
                values = "" if is_word else f": {str(first_value)[:80]!r} and {str(theirs)[:80]!r}"
                if key == "multi_label":
                    key, values = "kind of labels", " (one class, or several findings per image)"
                return f"sites {first} and {name} do not have the same {key}{values}; all sites need the same {key}"
        limit = messages.MAX_NUMBER  # so that two infinite numbers compare as equal
        first_value, theirs = (
            {key: tensor.clamp(-limit, limit) for key, tensor in {**site.first, **site.texts}.items()}
            for site in (first_site, second_site)
        )
        is_alike = tensor_schema(first_value) == tensor_schema(theirs)
        if not is_alike or tensors.max_relative_difference(first_value, theirs) > MAX_RELATIVE_DIFFERENCE:
            return (
                f"sites {first} and {name} start from different tensors, though their encoders are the same; do they "
                "have the same templates and versions?"
            )
        return None

    def round(self, number: int, tasks: Sequence[Task]) -> RoundReplies:
        """Run a round; sites that connected since are admitted if they fit the others."""
        self.drop_revoked()
        connected = set(self.nodes)
        if any(task.id not in connected and not self.exclusion_reason(task.id) for task in tasks):
            self.open_new_nodes(self.kit.deadline)
        for name in self.nodes.keys() - connected:
            if reason := self.describe_difference(self.base, name):
                self._reject(self.nodes.pop(name), name, reason)
        return super().round(number, tasks)


def known_templates(source: Mapping[str, Any]) -> set[str]:
    """Return the prompt templates that a record may hold: the experiment's own, else those of fedvlm's data sets."""
    templates = source.get("templates")
    if templates is not None:
        return {templates} if isinstance(templates, str) else set(map(str, templates))
    return {template for entry in catalogue().values() for template in entry.templates} | set(Dataset.templates)


def describe_opening(header: Mapping[str, Any]) -> list[str]:
    """Describe what is unusual about a site that opened a training: its version, or data that have changed."""
    texts = []
    if (version := header.get("software", "")) not in ("", __version__):
        texts.append(f"runs fedvlm {version}, and the server {__version__}")
    if header.get("data") == "changed":
        gone = header["removed_classes"]
        text = "has other data than in its last run of this experiment"
        texts.append(text + (f"; {gone} of its classes have no samples any more" if gone else ""))
    elif header.get("data") == "kept":
        texts.append("uses the samples that it had when it last opened this experiment, though its data have changed")
    return texts


def known_nodes(kit: ServerKit) -> dict[str, int]:
    """Return the nodes by which sites have proved their names; a node belongs to a key."""
    try:
        return {str(name): int(node) for name, node in read_json(kit.folder / NODES_FILE).items()}
    except (FedVLMError, AttributeError, TypeError, ValueError):  # none yet, or damaged
        return {}


def _is_close(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) <= MAX_RELATIVE_DIFFERENCE * abs(first)
    return bool(first == second)


class OpeningExchange(FlowerEngine):
    """Ask nodes who they are and to open the training; a node that does not answer is not missed."""

    def __init__(self, remote: RemoteEngine, nodes: Mapping[str, int], patience: float) -> None:
        super().__init__(remote.grid, nodes, remote.training, 0.0, patience)
        self.remote = remote
        self.site_names: dict[str, str] = {}  # the sites behind the nodes, as far as they have answered

    def seal(self, message: Message) -> Message:
        return self.remote.seal(message)

    def unseal(self, message: Message, id: str, context: str) -> Message:
        message = self.remote.unseal(message, id, context)
        self.site_names[id] = str(message.header["client"])
        return message

    def describe_error(self, error: Any) -> str:
        return self.remote.describe_error(error)

    def check(self, message: Message, id: str, request: Message) -> None:
        self.remote.check_opening(message, request)

    def is_complete(self, waiting: set[str]) -> bool:
        """Stop waiting once all sites of the federation have answered: unknown nodes cannot delay a run."""
        awaited = set(self.remote.kit.sites) - {*self.site_names.values(), *self.remote.nodes}
        return all(self.remote.exclusion_reason(name) for name in awaited)
