"""Every message that the page of errors quotes is one that the code writes."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"


def texts_of_code():
    """Each string of the package; values put into it are written as …."""
    for path in (ROOT / "src" / "fedvlm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def quoted_messages():
    rows = re.findall(r"(?m)^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"))
    return [message for message, _, _ in rows]


def is_written(message, texts):
    pattern = re.compile(".*".join(re.escape(piece.strip()) for piece in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_the_page_has_thirty_messages_of_the_code():
    texts = list(texts_of_code())
    messages = quoted_messages()
    assert len(messages) >= 30
    assert [message for message in messages if not is_written(message, texts)] == []
    assert not is_written("there are no … unicorns", texts)
