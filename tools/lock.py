"""packaging/requirements.lock: every package of a server's or a site's install, with its hashes.

    python tools/lock.py

torch is left out, and what its build for graphics processors brings: it is installed before, by
version, from the index that has the build for the machine, whose hashes differ.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BY_VERSION = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
HEAD = """\
# Made by tools/lock.py. torch is not here: install it before, by its version in packaging/constraints.txt.
#   pip install --require-hashes --no-deps -r packaging/requirements.lock
#   pip install --no-deps .
"""
COMMAND = (
    "uv pip compile pyproject.toml --extra flower --generate-hashes --universal -c packaging/constraints.txt "
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
