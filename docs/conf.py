"""The documentation site: `make docs`. Warnings are errors, and no step asks a network."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SOURCE = "https://github.com/fedvlm/fedvlm/blob/main/"
sys.path[:0] = [str(ROOT / "src"), str(DOCS)]

import generate  # noqa: E402

import fedvlm  # noqa: E402

generate.write(DOCS / "reference" / "generated")

project = "fedvlm"
author = "the authors of fedvlm"
copyright = author
version = release = fedvlm.__version__
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build", "README.md"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = f"fedvlm {release}"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["docs.css"]
nitpicky = True


def outside(app, docname, text):
    """A link that leaves docs/ goes to the repository, if the file is there."""
    page = Path(app.env.doc2path(docname))

    def point(match):
        goal = (page.parent / match[1]).resolve()
        if goal.is_relative_to(DOCS) or not goal.exists():
            return match[0]  # Sphinx checks the first and complains of the second
        return f"]({SOURCE}{goal.relative_to(ROOT)})"

    text[0] = re.sub(r"\]\((\.\./[^)#]*)\)", point, text[0])


def setup(app):
    app.connect("source-read", outside)
