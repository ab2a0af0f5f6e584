"""The page on what a method may say is the classes' own."""

import ast
import sys
from pathlib import Path

from fedvlm import parts
from fedvlm.core import OPTIONAL_PROTOCOLS, VERBS

DOCS = Path(__file__).parents[2] / "docs"


def contract_page():
    sys.path.insert(0, str(DOCS))
    try:
        import generate

        return generate.contract_page()
    finally:
        sys.path.remove(str(DOCS))


def test_the_page_of_the_contract_is_made_from_the_classes():
    assert (DOCS / "reference" / "contract.md").read_text(encoding="utf-8") == contract_page(), (
        "docs/reference/contract.md is old; make it again: python docs/generate.py"
    )


def test_every_optional_verb_has_a_line_of_its_own():
    lines = [line for line in contract_page().splitlines() if line.startswith("| `")]
    for kind in OPTIONAL_PROTOCOLS:
        words = [name for name in vars(kind) if not name.startswith("_")]
        assert any(all(f"`{word}" in line for word in words) for line in lines), kind


def test_every_attribute_that_a_part_reads_from_a_method_is_on_the_page():
    page = contract_page()
    for path in sorted(Path(parts.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                name = node.attr
                known = name in (*VERBS, "traits") or f"`{name}`" in page or f"`{name}(" in page
                assert known, f"{path.name}:{node.lineno} reads {name}, which is not on the page of the contract"
