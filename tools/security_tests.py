"""Run the tests that docs/security/security.md names and write docs/security/tests-passed.md.

usage: python -m tools.security_tests [ROW ...]     all rows, or those of these numbers from 1; the others are kept
"""

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/security/security.md"
PASSED = ROOT / "docs/security/tests-passed.md"
OPENING = """# Passed tests

*For those who check the promises of [security](security.md). `python -m tools.security_tests` writes this page. Tests
of more than a minute are left out.*

| against | tests | passed | failed | skipped | date (UTC) | commit |
|---|---|---:|---:|---:|---|---|
"""


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    section = text.partition(heading)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def named_tests(text: str) -> list[tuple[str, list[str]]]:
    """Return adversary and files of each row of the page's table of tests."""
    return [(row[0], re.findall("`([^`]+)`", row[-1])) for row in table_rows(text, "## What is held by a test")]


def run_tests(files: list[str]) -> list[str]:
    """Return how many tests passed, failed and were skipped, the date and the commit."""
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
    command = [sys.executable, "-m", "pytest", "-m", "not long", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-300:])}
    if not counts:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    counts["failed"] = counts.get("failed", 0) + counts.get("error", 0)
    figures = [str(counts.get(kind, 0)) for kind in ("passed", "failed", "skipped")]
    return [*figures, f"{datetime.now(UTC):%d %B %Y}", commit]


def main() -> None:
    old = table_rows(PASSED.read_text(encoding="utf-8") if PASSED.exists() else "", "# Passed tests")
    results = {row[1]: row[2:] for row in old}
    tests = named_tests(PAGE.read_text(encoding="utf-8"))
    wanted = [int(number) for number in sys.argv[1:]] or range(1, len(tests) + 1)
    for number, (_, files) in enumerate(tests, 1):
        names = " ".join(f"`{name}`" for name in files)
        if number in wanted:
            results[names] = run_tests(files)
            print(number, names, *results[names], flush=True)
        page = [(against, " ".join(f"`{name}`" for name in files)) for against, files in tests]
        lines = [f"| {' | '.join([against, names, *results[names]])} |" for against, names in page if names in results]
        PASSED.write_text(OPENING + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
