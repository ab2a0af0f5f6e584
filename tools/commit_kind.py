#!/usr/bin/env python3
"""Refuses a commit message that does not begin with a kind and a verb."""

import re
import sys
from pathlib import Path

KINDS = ("FEAT", "FIX", "PERF", "TEST", "DOCS", "REFACTOR")

if __name__ == "__main__":
    first = Path(sys.argv[1]).read_text("utf-8").split("\n", 1)[0]
    if not re.match(rf"({'|'.join(KINDS)}) [a-z]|Merge ", first):
        sys.exit(
            f"the message begins with {first[:40]!r}; write a kind and a verb, as "
            f"'FEAT add the embedding cache' (kinds: {', '.join(KINDS)})"
        )
