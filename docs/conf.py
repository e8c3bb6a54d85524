"""How Sphinx makes the site of these pages: `sphinx-build -W docs build/docs`."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))
from operator_table import format_table

from relayquant.base.version import __version__

project = "relayquant"
release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
html_theme = "furo"
html_title = f"relayquant {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fbf", "color-brand-content": "#1f5fbf"},
    "dark_css_variables": {"color-brand-primary": "#7db0ff", "color-brand-content": "#7db0ff"},
}
pygments_style, pygments_dark_style = "friendly", "github-dark"
root_doc = "index"
exclude_patterns = ["build", "tutorials/GALLERY_HEADER.rst"]
# Tutorials are shown, not run: their test runs them.
sphinx_gallery_conf = {
    "examples_dirs": "../tutorials",
    "gallery_dirs": "tutorials",
    "plot_gallery": False,
    "download_all_examples": False,
}
# A link in a page to a file outside of it is one for readers of the repository.
suppress_warnings = ["myst.xref_missing"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True


class OperatorTable(SphinxDirective):
    """Where the table of operators stands in a page."""

    def run(self):
        return self.parse_text_to_nodes(format_table())


def stay_inside(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to the repository's README and tutorials lead to what the site has of them."""
    inside = {"tutorials": "/tutorials/index.rst", "README.md": "/index.md"}
    link = r"\]\((?:\.\./)+(tutorials|README\.md)\)"
    source[0] = re.sub(link, lambda found: f"]({inside[found[1]]})", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", stay_inside)
    app.add_directive("operator-table", OperatorTable)
