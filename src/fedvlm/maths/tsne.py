"""Points in many dimensions drawn on a plane: exact t-SNE, for hundreds of points and no more.

Van der Maaten and Hinton, Visualizing data using t-SNE, JMLR 2008.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EARLY, FACTOR = 150, 8.0  # first steps, in which neighbours attract each other more


def tsne(points: NDArray[np.floating], perplexity: float = 30.0, steps: int = 600) -> Floats:
    """(points, 2) of unit spread; the same points always give the same image.

    At most a third of the other points count as neighbours, whatever the perplexity.
    """
    x = points.astype(np.float64).reshape(len(points), -1)
    x = x - x.mean(0)
    wanted = np.log(max(1.0, min(perplexity, (len(x) - 1) / 3)))
    near = neighbours(squares(x), wanted)
    joint = np.maximum((near + near.T) / (2 * len(x)), 1e-12)
    left, size, _ = np.linalg.svd(np.column_stack([x, 0 * x]), full_matrices=False)
    place = (left * size)[:, :2]
    place = 1e-2 * place / max(float(place.std(0).max()), 1e-300)  # principal axes, made small
    speed, gain = np.zeros_like(place), np.ones_like(place)
    for step in range(steps):
        early = step < EARLY
        closeness = 1 / (1 + squares(place))
        np.fill_diagonal(closeness, 0)
        pull = (joint * (FACTOR if early else 1) - closeness / closeness.sum()) * closeness
        slope = 4 * (pull.sum(1)[:, None] * place - pull @ place)
        gain = np.maximum(np.where(slope * speed < 0, gain + 0.2, 0.8 * gain), 0.01)
        speed = (0.5 if early else 0.8) * speed - max(len(x) / 12, 2.0) * gain * slope
        place = place + speed - (place + speed).mean(0)
    spread: Floats = place / max(float(place.std()), 1e-300)
    return spread


def squares(x: Floats) -> Floats:
    """(points, points) squared distances."""
    length = np.square(x).sum(1)
    out: Floats = np.maximum(length[:, None] + length - 2 * x @ x.T, 0)
    return out


def neighbours(distance: Floats, wanted: float) -> Floats:
    """(points, points): each row's chances of a neighbour, of the wanted entropy, by bisection."""
    away = distance + np.diag(np.full(len(distance), np.inf))
    away = away - away.min(1, keepdims=True)  # the nearest is always a neighbour
    typical = np.median(distance[distance > 0]) if (distance > 0).any() else 1.0
    low, high = np.full(len(away), 1e-6), np.full(len(away), 1e9)  # of precision x typical
    for _ in range(80):
        middle = np.sqrt(low * high)
        chance = np.exp(-middle[:, None] * away / typical)
        chance /= chance.sum(1, keepdims=True)
        entropy = -(chance * np.log(np.maximum(chance, 1e-300))).sum(1)
        low, high = (
            np.where(entropy > wanted, middle, low),
            np.where(entropy > wanted, high, middle),
        )
    out: Floats = chance
    return out
