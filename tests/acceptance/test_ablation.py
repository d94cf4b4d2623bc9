"""examples/ablation.py: the statistics of a paper, and runs that are killed and continued."""

import itertools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import ablation
import numpy as np
import ppo
import pytest
from helpers import EXAMPLES


@pytest.mark.parametrize(
    ("scores", "mean"),  # as of scipy.stats.trim_mean(scores, 0.25), which rliable calls
    [
        pytest.param([8, 1, 7, 2, 6, 3, 4, 90], 5, id="two of eight at each end"),
        pytest.param([9, 1, 2, 3, 4], 3, id="one of five at each end"),
        pytest.param([9, 1, 2], 4, id="none of three"),
    ],
)
def test_interquartile_mean_leaves_out_a_quarter_at_each_end(scores, mean):
    assert ablation.interquartile_mean(np.array(scores)) == mean


@pytest.mark.parametrize(
    "scores",
    [
        pytest.param([[1, 2, 4, 8, 16]], id="one env"),
        pytest.param([[2, 0, 25], [22, 25, 16]], id="each env apart"),
    ],
)
def test_interval_is_that_of_all_resamples(scores):
    means = []
    for rows in itertools.product(*(itertools.product(row, repeat=len(row)) for row in scores)):
        ordered = sorted(itertools.chain(*rows))
        middle = ordered[1 : len(ordered) - 1]  # without a quarter of 5 or 6 at each end
        means.append(sum(middle) / len(middle))
    expected = np.percentile(means, [2.5, 97.5])
    assert ablation.interval(np.array(scores)) == pytest.approx(expected)


OWN = """
import torchwrap as tw
from torchwrap import transforms as T

def make(*args, **kwargs):
    transforms = T.NormalizeReward(), T.RecordEpisodeStatistics()
    return tw.TransformedEnv(tw.make(*args, **kwargs), *transforms)
"""
PAPER = """
num_seeds = 2
num_envs = 8
num_steps = 16
total_timesteps = 2560
save_every = 1
[envs.CartPole-v1]
[envs.Acrobot-v1]
update_epochs = 1
[variants."as it is"]
[variants.normalized]
make = "own:make"
[scales]
CartPole-v1 = [0, 500]
Acrobot-v1 = [-500, 0]
"""


def test_run_of_two_commands_is_trained_once(tmp_path, monkeypatch):
    run = ablation.Run(ppo.Args(out=tmp_path), "torchwrap:make")
    trained = []
    monkeypatch.setattr(ppo, "main", lambda *_: time.sleep(0.2) or trained.append(1))
    monkeypatch.setattr(ablation, "curve_of", lambda args: [])
    with ThreadPoolExecutor() as commands:
        list(commands.map(lambda run: run.train(), [run, run]))
    assert trained == [1]


@pytest.mark.full
def test_killed_command_continues_and_trains_nothing_twice(tmp_path, monkeypatch):
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    (tmp_path / "own.py").write_text(OWN)
    config = tmp_path / "paper.toml"
    config.write_text(PAPER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{EXAMPLES.parent}")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, EXAMPLES / "ablation.py", config]

    monkeypatch.syspath_prepend(tmp_path)
    values = tomllib.loads(PAPER)
    ablation.main(ablation.Args(**values, processes=2, out=tmp_path / "whole"))
    process = subprocess.Popen([*command, "--out", "killed"])
    finished = tmp_path / "killed" / "CartPole-v1" / "as it is-1" / "run.json"
    while not list((tmp_path / "killed").glob("CartPole-v1/as it is-2/checkpoint.pt")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    written = finished.stat().st_mtime_ns
    subprocess.run([*command, "--out", "killed"], check=True)

    assert finished.stat().st_mtime_ns == written
    killed, whole = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("killed", "whole")
    )
    assert killed == whole
    (scores,) = whole["normalized"]["CartPole-v1"]["scores"]
    for score in scores:  # the mean length of 20 episodes
        assert 8 < score < 500 and score * 20 == pytest.approx(round(score * 20), abs=1e-3)
    table = (tmp_path / "whole" / "table.md").read_text().splitlines()
    assert table[0] == "| variant | CartPole-v1 | Acrobot-v1 | all, scaled |"
    assert len(table) == 4
    assert (tmp_path / "whole" / "ablation.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(ValueError, match=r"flags.*gamma"):
        ablation.main(ablation.Args(**values, gamma=0.5, out=tmp_path / "whole"))


def test_runs_of_one_folder_are_refused():
    with pytest.raises(ValueError, match="folders"):
        ablation.plan(ablation.Args(envs={"Maze-v0": {}, "maze:Maze-v0": {}}))
