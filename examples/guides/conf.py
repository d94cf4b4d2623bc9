"""The site of the guides and docstrings: `sphinx-build -W examples/guides build/site`."""

import itertools

import torchwrap

project = "torchwrap"
author = copyright = "the authors of torchwrap"
version = release = torchwrap.__version__

exclude_patterns = ["README.md"]  # the first page, `index`, includes it
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"torchwrap {release}"

myst_heading_anchors = 3
default_role = "code"  # docstrings put names into single backquotes
napoleon_custom_sections = ["Shape"]
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "exclude-members": "extra_repr",
}
autodoc_typehints = "none"  # the text of each argument gives types and shapes
ATTRIBUTES = {}  # their texts, by name
autodoc_mock_imports = ["brax", "jax", "rl_games", "rsl_rl", "skrl", "stable_baselines3", "torchrl"]


def markdown(app, what, name, obj, options, lines):
    """Turn the Markdown tables and indented code of a docstring into reStructuredText."""
    for start in reversed([i for i, line in enumerate(lines) if line.startswith("|---")]):
        rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start + 1 :]))
        table = [".. list-table::", "   :header-rows: 1", ""]
        for row in [lines[start - 1], *rows]:
            first, *others = [cell.strip() for cell in row.strip("| ").split(" | ")]
            table += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
        lines[start - 1 : start + 1 + len(rows)] = [*table, ""]
    for i, (line, blank, code) in enumerate(zip(lines, lines[1:], lines[2:])):
        if line.endswith(":") and line[0] != " " and not blank and code.startswith("    "):
            lines[i] += ":"


def keep(app, what, name, obj, options, lines):
    """Keep the text of an attribute from napoleon, which takes what precedes a colon for a type."""
    if what in ("attribute", "property"):
        lines[:] = ATTRIBUTES.setdefault(name, list(lines))


def setup(app):
    app.connect("autodoc-process-docstring", markdown, priority=400)  # before napoleon, at 500
    app.connect("autodoc-process-docstring", keep, priority=401)
    app.connect("autodoc-process-docstring", keep, priority=600)
