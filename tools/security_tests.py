"""Run the tests that docs/security/security.md names and write docs/security/tests-passed.md.

usage: python -m tools.security_tests     (minutes)
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

*For those who check the promises of [security](security.md). `python -m tools.security_tests` wrote this page on
{date} (UTC), on commit {commit}. Tests that take more than a minute are left out.*

| against | tests | passed | failed | skipped |
|---|---|---:|---:|---:|
"""


def named_tests(text: str) -> list[tuple[str, list[str]]]:
    """Return adversary and files of each row of the page's table of tests."""
    section = text.partition("## What is held by a test")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [(row[0].strip(), re.findall("`([^`]+)`", row[-1])) for row in rows[2:]]


def run_tests(files: list[str]) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped."""
    command = [sys.executable, "-m", "pytest", "-m", "not long", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-300:])}
    if not counts:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    counts["failed"] = counts.get("failed", 0) + counts.get("error", 0)
    return counts


def main() -> None:
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
    page = OPENING.format(date=f"{datetime.now(UTC):%d %B %Y}", commit=commit)
    for against, files in named_tests(PAGE.read_text(encoding="utf-8")):
        counts = run_tests(files)
        figures = " | ".join(str(counts.get(kind, 0)) for kind in ("passed", "failed", "skipped"))
        page += f"| {against} | {' '.join(f'`{name}`' for name in files)} | {figures} |\n"
        print(against, files, counts, flush=True)
    PASSED.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
