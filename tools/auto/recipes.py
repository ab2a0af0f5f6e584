"""What auto might be: which parts a client mixes, how it weighs them, and what is shared."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors
from fedvlm.maths import calibration, gaussian_classes, logistic_regression
from fedvlm.maths.orthogonal import inverse
from fedvlm.methods._heads import fit_local_path
from fedvlm.methods.auto import FREQUENCY_LOG_WEIGHT, Auto, average_heads, moments

ANGLE = 0.05  # of a step of the rotation, in the norm of its skew matrix
BELOW = 3.0  # how far under all it has seen a client puts a class it has no rows of
KEPT = (0, 1, 2, 4, 8, 16, 24)  # steps after which the rotation is a candidate
Heads = Mapping[str, logistic_regression.Head]


@dataclass(frozen=True)
class Recipe:
    name: str
    parts: tuple[str, ...]  # classifiers; "often" is how often a client has each class
    belief: float = 1.0
    lean: float = 0.0  # 1: classifiers start by their likelihood, 0: all at the same weight
    one: bool = False  # the likeliest classifier instead of a mix
    path: bool = False  # shared is the path's mean alone, without text and Gaussian classes
    rounds: int = 16

    def head(self, heads: Heads, client: Client) -> logistic_regression.Head:
        """The client's classifier."""
        names = [name for name in self.parts if name != "often"]
        nothing = logistic_regression.Head(*(0.0 * part for part in heads["often"]))
        last = heads["often"] if "often" in self.parts else nothing
        many = [heads[name] for name in names] + [last]
        logits = torch.stack([one.logits(client.val_x.double()) for one in many])
        shares = self.shares(logits, client.val_y)
        return logistic_regression.split_head((shares[:, None, None] * torch.stack([h.joined() for h in many])).sum(0))

    def shares(self, logits: Tensor, y: Tensor) -> Tensor:
        """(parts,); with what ships this is `Auto.weigh`."""
        heats = torch.stack([calibration.fit_log_scale(one, y) for one in logits[:-1]])
        found = logistic_regression.summed_cross_entropy(heats.exp()[:, None, None] * logits[:-1], y)
        if self.one:
            return torch.nn.functional.one_hot(found.argmin(), len(logits)).double()
        likely = (-self.lean * found).log_softmax(0)
        start = torch.cat([heats + likely, heats.new_full((1,), FREQUENCY_LOG_WEIGHT)])
        return calibration.fit_log_weights(logits, y, start, self.belief).exp()


THREE = Recipe("without gaussian", ("shared", "own", "often"))
SHIPPED = Recipe("shared, near, often", ("shared", "near", "often"))
FOUR = Recipe("shared, own, gaussian, often", ("shared", "own", "gaussian", "often"))
RECIPES = (  # from the simplest
    Recipe("shared", ("shared",)),
    Recipe("the likeliest one", ("shared", "own", "gaussian"), one=True),
    THREE,
    replace(THREE, name="without gaussian, belief 2", belief=2.0),
    replace(THREE, name="without gaussian, half by likelihood", lean=0.5),
    replace(THREE, name="without gaussian, by likelihood", lean=1.0),
    SHIPPED,
    Recipe("shared, near, own, often", ("shared", "near", "own", "often")),
    Recipe("without own", ("shared", "gaussian", "often")),
    Recipe("without often", ("shared", "own", "gaussian")),
    replace(FOUR, name="eight rounds", rounds=8),
    replace(FOUR, name="path alone shared", path=True),
    FOUR,
    replace(FOUR, name="belief 1/2", belief=0.5),
    replace(FOUR, name="belief 2", belief=2.0),
    replace(FOUR, name="start by likelihood", lean=1.0),
    Recipe("near for own", ("shared", "near", "gaussian", "often")),
    Recipe("near too", ("shared", "own", "near", "gaussian", "often")),
    Recipe("rotated too", ("shared", "own", "gaussian", "rotated", "often")),
    Recipe("rotated for own", ("shared", "gaussian", "rotated", "often")),
)


@dataclass(frozen=True)
class Remembering(Auto):
    """auto whose server keeps the statistics, for the Gaussian classes of single clients."""

    def gaussians(self, total: Tensors) -> Tensors:
        kept = {f"server {key}": value for key, value in moments(total)._asdict().items()}
        return super().gaussians(total) | kept


def heads_of(method: Auto, frozen: Frozen, shared: Tensors, sent: Tensors, client: Client, more: bool) -> Heads:
    """All that a recipe may mix; `more` than one set of rounds needs costs time."""
    names = ("shared", "near", "often")
    heads = dict(zip(names, method.candidates(frozen, sent, client), strict=True))
    prior = gaussian_classes.Moments(*(shared[f"server {key}"] for key in gaussian_classes.Moments._fields))
    known = gaussian_classes.posterior_moments(prior, client.x, client.y, 1.0)
    rule = gaussian_classes.fit_discriminant(known, gaussian_classes.ridge(known, 1.0))
    heads["gaussian"] = lowered(logistic_regression.Head(rule.weight, rule.bias), client, known.counts > 0)
    _, path, there = fit_local_path(frozen, client)
    heads["own"] = average_heads(lowered(path.heads, client, there), client)
    if more:
        heads["rotated"] = average_heads(rotations(heads["shared"], client), client)
    return heads


def rotations(shared: logistic_regression.Head, client: Client) -> logistic_regression.Head:
    """FedOT's model: the shared head over embeddings that the client turns, on a path of turns.

    Steps of one length down the slope of the client's cross-entropy in the skew matrix of Cayley's
    transform, from no turn at all.
    """
    weight, bias = (part.float() for part in shared)
    skew = torch.zeros(weight.shape[1], weight.shape[1])
    eye, truth = torch.eye(len(skew)), torch.nn.functional.one_hot(client.y, len(weight))
    found = []
    for step in range(max(KEPT) + 1):
        back = inverse(eye + skew)
        toward = weight @ back.mT
        turned = 2 * toward - weight
        if step in KEPT:
            found.append(turned)
        wrong = (client.x @ turned.mT + bias).softmax(1) - truth
        half = toward.mT @ (wrong.mT @ client.x @ back)
        slope = half - half.mT
        skew = skew - ANGLE * slope / slope.norm().clamp(min=1e-12)
    return logistic_regression.Head(torch.stack(found).double(), shared.bias.expand(len(found), -1))


def lowered(head: logistic_regression.Head, client: Client, there: Tensor) -> logistic_regression.Head:
    """Classes without rows get one low logit, below all that the others have on the rows."""
    seen = head.logits(client.x.double())
    seen = torch.where((client.y >= 0)[:, None] & there, seen, torch.inf)
    floor = seen.flatten(-2).amin(-1, keepdim=True) - BELOW
    return logistic_regression.Head(torch.where(there[:, None], head.weight, 0.0), torch.where(there, head.bias, floor))
