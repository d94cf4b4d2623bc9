"""The guides of examples/guides: every block of Python runs, every command fits its script, every link leads to a file."""

import contextlib
import re
import shlex

import ale_py  # noqa: F401  # registers its ids here, because `registry` is a copy that is forgotten
import pytest
import tyro
from helpers import EXAMPLES, load_example

PAGES = sorted((EXAMPLES / "guides").glob("*.md"))
# Libraries of the extras; their pages run in the environments of .ci/run that have them.
OPTIONAL = {
    "brax",
    "envpool",
    "gymnax",
    "jax",
    "mjlab",
    "onnxruntime",
    "onnxscript",
    "rl_games",
    "rsl_rl",
    "skrl",
    "torchrl",
}


@contextlib.contextmanager
def skipped_without_library():
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_python_run_in_order_and_raise_what_the_page_says(
    page, tmp_path, monkeypatch, registry, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    names = {"__name__": "__main__"}
    # A comment that begins with "test" is code which only this test runs, such as a stand-in of a simulator.
    for match in re.finditer(
        r"(?:```python|<!-- test)\n(.*?)(?:```|-->)", page.read_text(), re.DOTALL
    ):
        line = page.read_text()[: match.start(1)].count("\n")
        with skipped_without_library():
            exec(compile("\n" * line + match[1], page, "exec"), names)  # the pages are ours
    shown = " ".join(page.read_text().replace("#", " ").split())
    for line in (
        capsys.readouterr().out.splitlines() if page.stem != "trainers" else ()
    ):  # whose libraries print much
        if len(re.findall(r"\b[a-z]{2,}\b", line)) >= 5:  # a sentence, such as the text of an error
            assert " ".join(line.replace("#", " ").split()) in shown, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_fit_their_scripts(page, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
        for name, flags in re.findall(r"examples/(\w+)\.py(.*)$", block, re.MULTILINE):
            with skipped_without_library():
                script = load_example(name)
            if hasattr(script, "Args"):
                tyro.cli(script.Args, args=shlex.split(flags, comments=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in link or (page.parent / link).is_file(), link
