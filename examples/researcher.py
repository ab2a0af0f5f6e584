"""Compare methods, add one of your own, and paste the table.

Run it: python examples/researcher.py (the tutorial is docs/tutorials/researcher.md)
"""

from tempfile import TemporaryDirectory

from new_method import FedBias  # a method of one's own, in a file of its own

import fedvlm

METHODS = (
    "zero-shot",  # what the frozen model says
    {"name": "fedavg", "lr": 3e-2, "rounds": 10},  # one head for all
    FedBias(lr=3e-2, rounds=10),  # the same, and a bias that stays with its client
    "alone",  # what a client has without the others
)
SETTINGS = {
    "data": "demo",  # the embedded emoji
    "clients": {"partition": "pathological", "count": 8},  # eight clients of two classes
    "protocol": "own-test",  # each is tested on its own rows, all sixteen classes to choose from
    "smoke": True,  # few rows, to be fast; leave it out for numbers that mean something
}


def main() -> None:
    with TemporaryDirectory() as folder:
        runs = [fedvlm.run(method, out=f"{folder}/{number}", **SETTINGS) for number, method in enumerate(METHODS)]
        table = fedvlm.compare(*runs)  # a pandas data frame, one row per run
        print(table[["own", "rounds", "kB per client"]].round(3))  # to read
        print(table[["own", "kB per client"]].to_latex(float_format="%.3f"))  # to paste
        per_client = runs[2].frame()  # one row per client
        worst = per_client.loc[per_client.accuracy.idxmin()]
        print(f"fedbias is worst at {worst.client}: {worst.accuracy:.0%} of {worst.rows} rows")


if __name__ == "__main__":
    main()
