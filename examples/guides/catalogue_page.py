"""Fills the tables of transforms.md with the first sentences of the docstrings."""

import inspect
import re
from pathlib import Path

from torchwrap import transforms, wrappers

PAGE = Path(__file__).parent / "transforms.md"
ROW = re.compile(r"^\| `(\w+)` \|[^|]*\|$", re.MULTILINE)


def row(match):
    name = match[1]
    component = getattr(transforms, name, None) or getattr(wrappers, name)
    summary = inspect.getdoc(component).partition("\n\n")[0]
    sentence = re.split("[.:] ", " ".join(summary.split()))[0]
    return f"| `{name}` | {sentence.rstrip('.')} |"


def filled(text):
    return ROW.sub(row, text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
