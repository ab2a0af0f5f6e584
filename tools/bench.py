"""Runs the benchmarks, keeps their figures in one JSON file and writes the page from it.

    python -m tools.bench               # all of them, half an hour on an idle machine
    python -m tools.bench --quick       # ratios of processor time only, a few minutes
    python -m tools.bench --page        # the page again, from the file

A run replaces the figures of the scripts it ran, each with the machine it ran on.
"""

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedvlm.machine import count_cores
from fedvlm.storage.files import write_file

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks"
RESULTS, PAGE = SCRIPTS / "results.json", ROOT / "docs" / "papers" / "benchmarks.md"
HELPERS = {"figures", "naive_fedot"}
QUICK = ("fedot", "transport", "faa_clip", "peers")  # ratios, which hold on a busy machine too
HEAD = """\
# Benchmarks

`make bench` runs `benchmarks/*.py` and writes this page; `make bench QUICK=1` runs those that print
ratios of processor time. Processes compute with one thread. Times are of the machine named, and
ratios of two things done in turns; [how fast?](how-fast.md) says what they mean.
"""


def machine() -> str:
    """What the figures were measured on."""
    chip = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        chip = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{chip}, {count_cores()} cores, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, "
        f"fedvlm {version('fedvlm')}"
    )


def scripts() -> list[str]:
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in HELPERS)


def measure(names: list[str]) -> dict[str, Any]:
    """Every script's rows, with the day, the machine and its load before and after."""
    results = {}
    for name in names:
        print(f"== benchmarks/{name}.py", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            place, before = Path(folder) / "figures", os.getloadavg()[0]
            env = {**os.environ, "FEDVLM_FIGURES": str(place), "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, SCRIPTS / f"{name}.py"], env=env, check=True)
            results[name] = {
                "day": datetime.now(UTC).date().isoformat(),
                "machine": machine(),
                "load": [round(load, 1) for load in (before, os.getloadavg()[0])],
                "rows": [json.loads(line) for line in place.read_text().splitlines()],
            }
    return results


def number(value: float | str) -> str:
    """Three digits of a number; small ones by their power."""
    if isinstance(value, str):
        return value
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.0e}"


def tables(rows: list[dict[str, Any]]) -> str:
    """Rows with the same figures share a table; one without figures is a sentence."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row["figures"]), []).append(row)
    out = []
    for names, some in groups.items():
        if not names:
            out += [f"{row['what']}.\n" for row in some]
            continue
        lines = [["", *names], ["---"] * (1 + len(names))]
        lines += [[row["what"], *map(number, row["figures"].values())] for row in some]
        out.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join(out)


def page(results: dict[str, Any]) -> str:
    """The page of these figures: a section a script, headed by the first line of its docstring."""
    parts = [HEAD]
    for name, results_of_script in sorted(results.items()):
        docstring = ast.get_docstring(ast.parse((SCRIPTS / f"{name}.py").read_text())) or ""
        before, after = results_of_script["load"]
        parts.append(
            f"## {name}\n{docstring.splitlines()[0]}\n\n{tables(results_of_script['rows'])}\n"
            f"{results_of_script['day']}, {results_of_script['machine']}; load {before} before and {after} after.\n"
        )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.page:
        results |= measure(list(QUICK) if args.quick else scripts())
        write_file(RESULTS, json.dumps(results, indent=1, ensure_ascii=False).encode() + b"\n")
    write_file(PAGE, page(results).encode())


if __name__ == "__main__":
    main()
