"""README.md, the tables of the guides, and CONTRIBUTING.md: complete, and true of others."""

import contextlib
import importlib
import inspect
import json
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import stable_baselines3.common.vec_env as vec_env
from helpers import EXAMPLES
from stable_baselines3.common import atari_wrappers, env_util, evaluation

import torchwrap as tw
import torchwrap.interop.sb3
import torchwrap.testing
from torchwrap import transforms as T
from torchwrap import wrappers as W

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
PAGES = (EXAMPLES / "guides").glob("*.md")
GUIDES = {page.stem: page.read_text() for page in PAGES}


def section(page, title):
    return page.split(f"\n## {title}")[1].split("\n## ")[0]


def matches(pattern, text):
    return re.findall(pattern, text, re.MULTILINE | re.DOTALL)


# README.


@pytest.mark.full
def test_readme_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in matches(r"```python\n(.*?)```", README):
        exec(compile(block, "README.md", "exec"), names)  # the README is ours
    assert names["transition"]["next", "reward"].shape == (64, 1)
    assert names["data"].shape == (64, 32)
    assert names["results"]["episode_return"].shape == (128,)
    transition, _ = names["env"].step(names["env"].sample_action())
    assert transition["next", "observation"].isfinite().all()
    data = tw.rollout(names["drift"], None, 3)
    assert data["next", "reward"].shape == (10_000, 3, 1)


def test_readme_is_short_and_begins_with_code():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert "import torchwrap as tw" in lines[:40]
    others = ("|", "![", "python3 -m venv")
    assert not [line for line in lines if len(line) > 100 and not line.startswith(others)]


@pytest.mark.parametrize("page", ["README.md", "examples/README.md", ".github/CONTRIBUTING.md"])
def test_links_lead_to_files(page):
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)[)#]", path.read_text())
    local = [link for link in links if "://" not in link]
    scripts = re.findall(r"`((?:examples|tests)/[\w/.]+\.\w+)`", path.read_text())
    assert local
    assert not [link for link in local if not (path.parent / link).exists()]
    assert not [script for script in scripts if not (ROOT / script).exists()]


def test_the_two_commands_name_the_torch_version():
    commands = matches(r"^python3 -m venv [^\n]*$", README)
    train, test = commands
    assert all("torch==2.13.0" in command for command in commands)
    assert "examples/ppo.py" in train
    assert "pytest" in test


def test_the_lowest_version_of_torch_is_named():
    (lowest,) = matches(r"^\s+torch>=(\S+)$", (ROOT / "setup.cfg").read_text())
    assert f"torch {lowest}" in README


def test_the_public_names_are_few():
    assert len(tw.__all__) <= 24
    assert all(hasattr(tw, name) for name in tw.__all__)


# Tables of the guides and of CONTRIBUTING.md.


def test_guides_have_at_most_19000_words():
    assert sum(len(page.split()) for page in GUIDES.values()) <= 19_000


def test_every_difference_from_gymnasium_has_one_row_and_one_test():
    differences = section(GUIDES["from_gymnasium"], "Differences from Gymnasium")
    rows = matches(r"^\|[^\n]* \| `(\w+)` \|$", differences)
    module = importlib.import_module("contract.test_differences")
    tests = [name for name in vars(module) if name.startswith("test_")]
    assert sorted(rows) == sorted(name.removeprefix("test_") for name in tests)


def table(page, title):
    lines = section(GUIDES[page], title).splitlines()
    rows = [line.strip("|") for line in lines if line.startswith("|")]
    return [row.split("|") for row in rows[2:]]


SB3 = vec_env, atari_wrappers, env_util, evaluation
GYMNASIUM = gymnasium.wrappers, gymnasium.wrappers.vector, gymnasium


@pytest.mark.parametrize(
    ("page", "modules"),
    [("from_gymnasium", GYMNASIUM), ("from_stable_baselines3", SB3)],
    ids=["gymnasium", "sb3"],
)
def test_names_of_another_library_exist(page, modules):
    known = {"AutoResetWrapper", "FuncEnv", "check_env"}
    known = known.union(*map(dir, modules), gymnasium.wrappers.__all__)
    for theirs, _ in table(page, "Names"):
        assert set(re.findall(r"`(?:\w+\.)*(\w+)`", theirs)) <= known


@pytest.mark.parametrize(
    "page", ["from_gymnasium", "from_stable_baselines3", "from_torchrl", "from_brax"]
)
def test_translated_names_exist(page):
    known = {"from_brax", "reset", "set_moments", "step"}
    modules = T, W, tw, tw.testing, tw.interop.sb3
    known = known.union(*map(dir, modules))
    known |= set(inspect.signature(tw.FunctionalEnv).parameters)
    rows = table(page, "Names")
    assert len(rows) > 4
    for _, ours in rows:
        assert set(re.findall(r"`(?:\w+\.)*([A-Za-z_]\w*)`", ours)) <= known


def reference():
    """The paths of the names that have a page on the site."""
    paths = []
    pattern = r"^\.\. currentmodule:: (\S+)(.*?)^```"
    for module, names in matches(pattern, GUIDES["reference"] + GUIDES["transforms"]):
        paths += [f"{module}.{name}" for name in matches(r"^   ([\w.]+)$", names)]
    return paths


def test_reference_lists_every_public_name_once():
    paths = reference()
    assert len(paths) == len(set(paths))
    names = {path.rpartition(".")[2] for path in paths}
    assert {*tw.__all__, *T.__all__, *W.__all__} - {"transforms"} <= names


@pytest.mark.parametrize("path", reference())
def test_name_in_the_reference_has_an_example(path):
    module, _, name = path.rpartition(".")
    with contextlib.suppress(ModuleNotFoundError):  # of a trainer that is not installed
        public = getattr(importlib.import_module(module), name)
        assert ">>> " in public.__doc__


def test_layout_lists_every_module():
    layout = section(CONTRIBUTING, "Layout").split("\ntests/")[0]
    listed = matches(r"^    (\w+(?:\.py|/)) ", layout)
    package = ROOT / "torchwrap"
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/*.py")}
    assert set(listed) == files | folders


# Figures are those of cpu.json, and say where they come from.

BENCHMARKS = ROOT / "tests" / "benchmarks"
FIGURES = json.loads((BENCHMARKS / "cpu.json").read_text())
CUDA = json.loads((BENCHMARKS / "cuda.json").read_text())
SPEED = section(README, "Speed")
TEXT = " ".join(SPEED.split())


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tests.benchmarks.report")


def test_table_of_speed_is_the_worst_of_cpu_json(report):
    header, _, *rows = [line for line in SPEED.splitlines() if line.startswith("|")]
    cells = header.strip("| ").split(" | ")[2:]
    sizes = [int(cell.replace(",", "")) for cell in cells]
    expected = report.claims(FIGURES, report.CLAIMS, sizes)
    assert rows == expected, "\n" + "\n".join(expected)
    assert "?" not in "".join(expected)


def test_table_of_the_guide_is_that_of_cpu_json(report):
    rows = report.step_costs.page(FIGURES)
    page = (ROOT / "examples" / "guides" / "compiling.md").read_text()
    assert "\n".join(rows) in page, "\n" + "\n".join(rows)
    assert "?" not in "".join(rows)


def test_text_names_the_machine_and_the_settings(report):
    machine = FIGURES["machine"]
    settings = report.settings(FIGURES, "glue/")
    assert settings == report.settings(FIGURES, "cartpole/")
    words = report.words(settings)
    assert f"{machine['processor']}, {machine['cores']} cores, {words}" in TEXT
    assert f"chunks of {machine['num_steps']} steps" in TEXT
    assert "EPYC" in machine["processor"]


def test_text_gives_the_times_of_ppo(report):
    (setting,) = report.settings(FIGURES, "ppo/")
    medians = [FIGURES[f"ppo/{side}/median/{setting}"] for side in ("torchwrap", "sb3")]
    ours, theirs = [median["wall_seconds_to_target"] for median in medians]
    assert f"after {ours:.1f} s, imports included; SB3's tuned PPO after {theirs:.1f} s" in TEXT
    assert "On an Intel Xeon, `examples/ppo.py`" in TEXT
    assert FIGURES["machine of ppo"]["processor"].startswith("Intel(R) Xeon")


def test_text_gives_the_worst_ratio_of_the_bridge(report):
    ratios = []
    for setting in report.settings(FIGURES, "bridge/"):
        row = report.within(FIGURES, setting)
        for kind in ("sync", "async"):
            ours = row[f"bridge/{kind} torchwrap-compiled/8"]["whole_us"]
            theirs = row[f"bridge/{kind} gymnasium/8"]["whole_us"]
            ratios.append(ours / theirs)
    envs = "On the EPYC, 8 HalfCheetah-v5 envs with four transforms, compiled,"
    assert f"{envs} take {max(ratios):.2f} times as long as Gymnasium's" in TEXT
    assert "machine of bridge" not in FIGURES


def test_text_gives_the_mean_times_of_compilation():
    rows = [row for key, row in FIGURES.items() if re.match("startup/(step|CartPole)", key)]
    cold = np.mean([row["cold_seconds"] for row in rows])
    warm = np.mean([row["warm_seconds"] for row in rows])
    assert f"A first compilation takes about {cold:.0f} s, a cached one {warm:.0f}." in TEXT


def test_text_gives_the_figures_of_the_gpu():
    figures = CUDA["steps"]["cartpole/4096"]["figures"]
    rollout = figures["cartpole/torchwrap-rollout/4096"]["steps_per_second"]
    times = CUDA["ratios"]["rollouts, times TorchRL's Collector"]["value"]
    assert f"make {rollout / 1e6:.0f} million steps a second" in TEXT
    assert f"is {times:.0f} times as fast as TorchRL's" in TEXT
