"""README.md and the guides: the code runs, tables are complete, figures are measured, claims about others are true."""

import contextlib
import functools
import importlib
import inspect
import json
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import stable_baselines3.common.vec_env as vec_env
from contract.test_differences import Ones
from gymnasium.vector import AutoresetMode
from stable_baselines3.common import atari_wrappers, env_util, evaluation

import torchwrap as tw
import torchwrap.interop.sb3
import torchwrap.testing
from torchwrap import transforms as T
from torchwrap import wrappers as W

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDES = {
    path.stem: path.read_text() for path in sorted((ROOT / "examples" / "guides").glob("*.md"))
}
SB3 = [vec_env, atari_wrappers, env_util, evaluation]
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text()


@pytest.mark.full
def test_readme_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)  # the README is ours
    assert names["transition"]["next", "reward"].shape == (64, 1) and names["data"].shape == (
        64,
        32,
    )
    assert names["returns"].shape == (128,)
    transition, _ = names["env"].step(names["env"].sample_action())
    assert transition["next", "observation"].isfinite().all()
    data, _ = tw.rollout(names["drift"], None, 3)
    assert data["next", "reward"].shape == (10_000, 3, 1)


def test_readme_has_at_most_150_lines_and_code_within_the_first_40():
    lines = README.splitlines()
    assert len(lines) <= 150 and "import torchwrap as tw" in lines[:40]


@pytest.mark.parametrize(
    "page",
    [Path("README.md"), Path("examples/README.md"), Path(".github/CONTRIBUTING.md")],
    ids=str,
)
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    scripts = re.findall(r"`((?:examples|tests)/[\w/.]+\.\w+)`", text)
    assert links and all((ROOT / page.parent / link).exists() for link in links)
    assert all((ROOT / script).exists() for script in scripts)


def test_moving_picture_is_animated_and_below_one_megabyte():
    image = pytest.importorskip("PIL.Image")
    path = ROOT / re.search(r"!\[.*\]\((.*\.gif)\)", README)[1]
    with image.open(path) as picture:
        assert picture.n_frames >= 60 and path.stat().st_size < 1_000_000


def test_tables_list_every_transform_and_wrapper():
    rows = set(re.findall(r"^\| `(\w+)\(", GUIDES["transforms"], re.MULTILINE))
    bases = {
        "ActionTransform",
        "ObservationTransform",
        "RewardTransform",
        "RunningMeanStd",
        "Transform",
    }
    assert rows == (set(T.__all__) | set(W.__all__)) - {"TransformedEnv", "Wrapper"} - bases


def test_tables_give_the_arguments_of_every_transform_and_wrapper():
    for name, arguments in re.findall(
        r"^\| `(\w+)\((.*?)\)` \|", GUIDES["transforms"], re.MULTILINE
    ):
        if "..." in arguments:
            continue
        parameters = inspect.signature(getattr(T, name, None) or getattr(W, name)).parameters
        assert re.findall(r"(?:^|, )(\w+)", re.sub(r"\(.*?\)", "", arguments)) == list(
            parameters
        ), name


def test_every_difference_from_gymnasium_has_one_row_and_one_test():
    rows = re.findall(
        r"^\| .* \| `(\w+)` \|$",
        _section(GUIDES["from_gymnasium"], "Differences from Gymnasium"),
        re.MULTILINE,
    )
    tests = re.findall(
        r"^def test_(\w+)", (ROOT / "tests" / "test_differences.py").read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted(tests)


def test_names_of_other_libraries_and_their_translations_exist():
    there = {
        "from_gymnasium": [gymnasium.wrappers, gymnasium.wrappers.vector, gymnasium],
        "from_stable_baselines3": SB3,
    }
    here = [T, W, tw, tw.testing, tw.interop.sb3]
    for page in ("from_gymnasium", "from_stable_baselines3", "from_torchrl", "from_brax"):
        rows = [
            line.strip("|").split("|")
            for line in _section(GUIDES[page], "Names").splitlines()
            if line.startswith("|")
        ]
        for theirs, ours in rows[2:]:
            for name in re.findall(r"`(?:\w+\.)*(\w+)`", theirs) if page in there else ():
                known = any(
                    name in dir(module) + getattr(module, "__all__", []) for module in there[page]
                )
                assert known or name in ("AutoResetWrapper", "FuncEnv", "check_env"), name
            for name in re.findall(r"`(?:\w+\.)*([A-Za-z_]\w*)`", ours):
                fields = inspect.signature(tw.FunctionalEnv).parameters
                assert name in (*fields, "step", "reset", "set_moments", "from_brax") or any(
                    hasattr(module, name) for module in here
                ), (
                    page,
                    name,
                )
        assert len(rows) > 4


def test_reference_lists_every_public_name_and_each_has_an_example():
    listed = {}
    for module, names in re.findall(
        r"^\.\. currentmodule:: (\S+)(.*?)^```", GUIDES["reference"], re.MULTILINE | re.DOTALL
    ):
        listed |= {
            name: f"{module}.{name}" for name in re.findall(r"^   ([\w.]+)$", names, re.MULTILINE)
        }
    assert {*tw.__all__, *T.__all__, *W.__all__} - {"transforms"} <= {*listed}
    for path in listed.values():
        module, _, name = path.rpartition(".")
        with contextlib.suppress(ModuleNotFoundError):  # of a trainer that is not installed
            assert ">>> " in getattr(importlib.import_module(module), name).__doc__, path


def test_layout_lists_every_module():
    listed = set(
        re.findall(r"^    (\w+(?:\.py|/)) ", _section(CONTRIBUTING, "Layout"), re.MULTILINE)
    )
    package = ROOT / "torchwrap"
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"} | {
        f"{path.parent.name}/" for path in package.glob("*/*.py")
    }
    assert listed == modules


def test_the_two_commands_name_the_torch_version():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2 and all("torch==2.13.0" in command for command in commands)
    assert "examples/ppo.py" in commands[0] and "pytest" in commands[1]


def test_extras_have_no_underscores():  # which pip 23 does not find
    extras = (
        (ROOT / "setup.cfg")
        .read_text()
        .partition("[options.extras_require]")[2]
        .partition("\n[")[0]
    )
    names = re.findall(r"^([\w-]+) =$", extras, re.MULTILINE)
    assert "rsl-rl" in names and not [name for name in names if "_" in name]


def test_the_lowest_version_of_torch_is_named():
    (lowest,) = re.findall(r"^    torch>=(\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert f"torch {lowest}" in README


# Figures are those of cpu.json, and say where they come from.

FIGURES = json.loads((ROOT / "tests" / "benchmarks" / "cpu.json").read_text())


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tests.benchmarks.report")


def test_table_of_speed_is_the_worst_of_cpu_json(report):
    header, _, *rows = (
        line
        for line in README.split("## Speed")[1].split("\n## ")[0].splitlines()
        if line.startswith("|")
    )
    sizes = [int(cell.replace(",", "")) for cell in header.strip("| ").split(" | ")[1:]]
    expected = report.claims(FIGURES, report.CLAIMS, sizes)
    assert rows == expected and "?" not in "".join(expected), "\n" + "\n".join(expected)


def test_figures_in_the_text_are_those_of_cpu_json(report):
    text = " ".join(README.split("## Speed")[1].split("\n## ")[0].split())
    machine = FIGURES["machine"]
    settings = report.settings(FIGURES, "glue/")
    assert settings == report.settings(FIGURES, "cartpole/")
    where = f"{machine['processor']}, {machine['cores']} cores, {report.words(settings)}"
    assert where in text and f"chunks of {machine['num_steps']} steps" in text
    (setting,) = report.settings(FIGURES, "ppo/")
    ours, theirs = (
        FIGURES[f"ppo/{side}/median/{setting}"]["wall_seconds_to_target"]
        for side in ("torchwrap", "sb3")
    )
    assert f"after {ours:.1f} s, imports included; SB3's tuned PPO after {theirs:.1f} s" in text
    assert "On an Intel Xeon, `examples/ppo.py`" in text
    assert FIGURES["machine of ppo"]["processor"].startswith("Intel(R) Xeon")
    rows = [report.within(FIGURES, setting) for setting in report.settings(FIGURES, "bridge/")]
    times = max(
        row[f"bridge/{kind} torchwrap-compiled/8"]["whole_us"]
        / row[f"bridge/{kind} gymnasium/8"]["whole_us"]
        for row in rows
        for kind in ("sync", "async")
    )
    envs = "On the EPYC, 8 HalfCheetah-v5 envs with four transforms, compiled,"
    assert (
        f"{envs} take {times:.2f} times as long as Gymnasium's" in text
        and "machine of bridge" not in FIGURES
    )
    rows = [figures for key, figures in FIGURES.items() if re.match("startup/(step|CartPole)", key)]
    cold, warm = (
        sum(row[f"{name}_seconds"] for row in rows) / len(rows) for name in ("cold", "warm")
    )
    assert (
        f"A first compilation takes about {cold:.0f} s, a cached one {warm:.0f}." in text
        and "EPYC" in where
    )
    cuda = json.loads((ROOT / "tests" / "benchmarks" / "cuda.json").read_text())
    rollout = cuda["steps"]["cartpole/4096"]["figures"]["cartpole/torchwrap-rollout/4096"][
        "steps_per_second"
    ]
    times = cuda["ratios"]["rollouts, times TorchRL's Collector"]["value"]
    assert (
        f"make {rollout / 1e6:.0f} million steps a second" in text
        and f"is {times:.0f} times as fast as TorchRL's" in text
    )


def _section(page, title):
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


# Claims about other libraries that have no row in tests/contract/test_differences.py.


COUNTING = functools.partial(Ones, length=2, start=0)  # observations 0, 1, 2


def test_gymnasium_default_autoreset_takes_a_step_that_ignores_its_action():
    vector_env = gymnasium.vector.SyncVectorEnv([COUNTING])
    assert vector_env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    vector_env.reset()
    observations, rewards, *_ = zip(*(vector_env.step([0]) for _ in range(4)), strict=True)
    assert [float(observation[0, 0]) for observation in observations] == [1, 2, 0, 1]
    assert [float(reward[0]) for reward in rewards] == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("mode", "returns"),
    [
        (
            AutoresetMode.NEXT_STEP,
            [1, 1, 1, 1.9, 1],
        ),  # the third step resets, and the last reward stays
        (AutoresetMode.SAME_STEP, [1, 0, 1, 0, 1]),
    ],
)
def test_gymnasiums_vector_normalize_reward_leaks_except_in_one_mode(mode, returns):
    vector_env = gymnasium.vector.SyncVectorEnv([COUNTING], autoreset_mode=mode)
    theirs = gymnasium.wrappers.vector.NormalizeReward(vector_env, gamma=0.9)
    theirs.reset()
    for expected in returns:
        theirs.step([0])
        assert theirs.accumulated_reward.item() == pytest.approx(expected)


def test_sb3_statistics_leave_final_observations_out_and_ours_count_them():
    theirs = vec_env.VecNormalize(vec_env.DummyVecEnv([COUNTING]), norm_reward=False)
    theirs.reset()
    for _ in range(4):
        theirs.step(np.array([0]))
    # The observations are 0 1 (2) 0 1 (2) 0; those in parentheses are final.
    assert theirs.obs_rms.mean.item() == pytest.approx(np.mean([0, 1, 0, 1, 0]), abs=1e-4)
    vector_env = gymnasium.vector.SyncVectorEnv([COUNTING], autoreset_mode=AutoresetMode.DISABLED)
    ours = tw.TransformedEnv(tw.from_gymnasium(vector_env), T.NormalizeObservation())
    tw.rollout(ours, None, 4)
    assert ours.transforms[0].statistics.mean.item() == pytest.approx(
        np.mean([0, 1, 2, 0, 1, 2, 0])
    )


def test_gymnasiums_env_0_depends_on_the_number_of_envs_and_ours_does_not():
    theirs = [
        gymnasium.make_vec("CartPole-v1", number).reset(seed=0)[0][0].tolist() for number in (2, 3)
    ]
    ours = [
        tw.make("CartPole-v1", number).reset(seed=0)["observation"][0].tolist() for number in (2, 3)
    ]
    assert theirs[0] != theirs[1] and ours[0] == ours[1]


def test_the_public_names_are_few():
    assert len(tw.__all__) <= 20 and all(hasattr(tw, name) for name in tw.__all__)
