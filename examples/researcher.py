"""Compare methods, add one of your own, read the result in a sentence and paste its table.

Run it: python examples/researcher.py (the tutorial is docs/tutorials/researcher.md)
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from new_method import FedBias  # a method of one's own, in a file of its own

import fedvlm
from fedvlm.report.page.gather import gather
from fedvlm.report.page.render import write_model
from fedvlm.report.tables import compare

METHODS = (
    "zero-shot",  # what the frozen model says
    {"name": "fedavg", "rate": 3e-2, "rounds": 10},  # one head for all
    FedBias(rate=3e-2, rounds=10),  # the same, and a bias that stays with its client
    "alone",  # what a client has without the others
)
SETTINGS = {
    "data": "demo",  # the embedded emoji
    "clients": {"by": "pathological", "count": 8},  # eight clients of two classes
    "protocol": "own-test",  # each is tested on its own rows, all sixteen classes to choose from
    "smoke": True,  # few rows, to be fast; leave it out for numbers that mean something
}


def main() -> None:
    with TemporaryDirectory() as folder:
        runs = [
            fedvlm.run(method, out=f"{folder}/{number}", **SETTINGS)
            for number, method in enumerate(METHODS)
        ]
        print(compare(runs, traffic=True))  # to read
        model = gather(runs, "My first comparison")
        print(*model["sentences"], sep="\n")  # who leads, and who cannot be told from it
        print(compare(runs, form="latex"))  # to paste
        page = write_model(model, Path(folder, "report.html"))  # to send
        print(f"the page has {page.stat().st_size // 1000} kB and asks no network")


if __name__ == "__main__":
    main()
