"""The guides: every block of Python runs, every command fits its script, every link leads on."""

import contextlib
import importlib
import re
import shlex

import ale_py  # noqa: F401  # registers its ids before `registry` is copied
import pytest
import tyro
from helpers import EXAMPLES

PAGES = sorted((EXAMPLES / "guides").glob("*.md"))
# The guides of these libraries run in the environments of .ci/run that have them.
OPTIONAL = {
    "brax",
    "envpool",
    "gymnax",
    "jax",
    "minari",
    "mjlab",
    "onnxruntime",
    "onnxscript",
    "rl_games",
    "rsl_rl",
    "skrl",
    "torchrl",
}
# A comment that begins with "test" is code for this test alone, such as a stand-in of a simulator.
BLOCK = re.compile(r"(?:```python|<!-- test)\n(.*?)(?:```|-->)", re.DOTALL)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@contextlib.contextmanager
def skipped_without_library():
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")


def words(text):
    return " ".join(text.replace("#", " ").split())


@pytest.mark.full
@every_page
def test_blocks_run_in_order_and_print_the_sentences_of_the_page(
    page, tmp_path, monkeypatch, registry, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    text = page.read_text()
    names = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        above = text.count("\n", 0, match.start(1))
        with skipped_without_library():
            exec(compile("\n" * above + match[1], page, "exec"), names)  # the pages are ours
    printed = capsys.readouterr().out.splitlines()
    if page.stem == "trainers":  # whose libraries print much
        return
    sentences = [line for line in printed if len(re.findall(r"\b[a-z]{2,}\b", line)) >= 5]
    missing = [line for line in sentences if words(line) not in words(text)]
    assert not missing, "\n".join(missing)


@every_page
def test_commands_fit_their_scripts(page, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
        for name, flags in re.findall(r"examples/(\w+)\.py(.*)$", block, re.MULTILINE):
            with skipped_without_library():
                script = importlib.import_module(name)  # once: a script may register an id
            if hasattr(script, "Args"):
                tyro.cli(script.Args, args=shlex.split(flags, comments=True))


def test_recipes_have_twelve_lines_or_less():
    page = (EXAMPLES / "guides" / "recipes.md").read_text()
    for match in BLOCK.finditer(page):
        lines = [line for line in match[1].splitlines() if line.strip()]
        assert len(lines) <= 12, match[1]


def anchors(page):
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower())
        yield name.replace(" ", "-")


@every_page
def test_links_lead_to_files_and_headings(page):
    for link, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        target = page.parent / link if link else page
        assert "://" in link or target.is_file(), link
        if heading and "://" not in link:
            assert heading in anchors(target), f"{link}#{heading}"
