"""How Sphinx makes the site of these pages: `sphinx-build -W docs build/docs`."""

from importlib import metadata

project = "relayquant"
release = metadata.version("relayquant")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
html_theme = "alabaster"
html_theme_options = {"description": "Post-training quantization for Apache TVM"}
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
