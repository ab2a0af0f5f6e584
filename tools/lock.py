"""Write packaging/requirements.lock: every package that a server or a site installs, with its hashes.

    python tools/lock.py

torch and the packages of its GPU build are left out: torch is installed before, by version, from the index
with the build for the machine, whose hashes differ.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BY_VERSION = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
HEAD = """\
# Made by tools/lock.py. torch is not in this file: install it first, in the version of constraints.txt.
#   pip install --require-hashes --no-deps -r packaging/requirements.lock
#   pip install --no-deps .
"""
COMMAND = (
    "uv pip compile pyproject.toml --extra flower --generate-hashes --universal -c constraints.txt "
    "--python-version 3.11 --quiet --no-header --no-annotate"
)


def main() -> None:
    command = [sys.executable, "-m", *COMMAND.split()]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    blocks = re.split(r"^(?=\S)", output, flags=re.MULTILINE)
    blocks_to_keep = [block for block in blocks if block.strip() and not BY_VERSION.match(block)]
    (ROOT / "packaging" / "requirements.lock").write_text(HEAD + "".join(blocks_to_keep))


if __name__ == "__main__":
    main()
