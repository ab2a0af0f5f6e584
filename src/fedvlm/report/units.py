"""In which unit a column is written: shares in per cent, others as they are."""

# How columns begin that are no shares, and the digits they are written with.
DIGITS_BY_PREFIX = {"kappa": 2, "cosine": 3, "dof": 0, "seconds": 3, "minutes": 3, "trained": 0, "rows": 0}
CLIENT_GROUPS = {"own": "train", "unseen": "unseen"}  # whom a metric's columns are of


def is_unscaled(column: str) -> bool:
    """Whether a column is not a share; a metric is one, whatever its name begins with."""
    metric = column.endswith(tuple(f", {group}" for group in CLIENT_GROUPS))
    return column.startswith(tuple(DIGITS_BY_PREFIX)) and not metric


def to_printed_unit(column: str, mean: float, deviation: float | None) -> tuple[float, float | None]:
    """In the unit of a print, where 100 · 0.9468 is 94.68 and not a little below it."""
    unit = 1 if is_unscaled(column) else 100
    return round(unit * mean, 9), None if deviation is None else round(unit * deviation, 9)


def format_number(column: str, value: float) -> str:
    """A number as tables have it: shares in per cent."""
    if not is_unscaled(column):
        return f"{100 * value:.2f}"
    digits = next(DIGITS_BY_PREFIX[key] for key in DIGITS_BY_PREFIX if column.startswith(key))
    return f"{value:.{digits}f}"
