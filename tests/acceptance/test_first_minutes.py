"""The scripts that users of four kinds would write first, each in a short form."""

import ast
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tokenize
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import EXAMPLES, load_example

from torchwrap import transforms as T

SCRIPTS = re.findall(
    r"^\| \[(\w+)\.py\].* \| (\d+) \| \d+", (EXAMPLES / "README.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("name", "given"), SCRIPTS)
def test_readme_counts_the_lines_of_code(name, given):
    path = EXAMPLES / f"{name}.py"
    tree = ast.parse(path.read_text())
    docstrings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings += range(node.lineno, node.end_lineno + 1)
    lines = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
    assert len(lines - {*docstrings}) == int(given)


@pytest.mark.full
def test_market_trains_an_own_env_with_dict_observations_and_multidiscrete_actions(
    tmp_path, registry
):
    load_example("ppo")
    script = load_example("market")
    args = replace(script.ARGS, total_timesteps=16_384, out=tmp_path)
    results = script.main(args, num_episodes=64)
    assert {*results["trained"]} == {
        f"episode_{name}" for name in ("return", "length", "sold", "missed")
    }
    assert results["trained"]["episode_return"] > results["random"]["episode_return"] > 0


@pytest.mark.full
def test_sb3_callbacks_write_checkpoints_and_go_on(tmp_path, capsys):
    script = load_example("sb3_callbacks")
    small = dict(num_envs=4, num_steps=64, save_every=256, out=tmp_path)
    result = script.main(script.Args(total_timesteps=512, **small))
    assert result["env_steps"] == 512 and result["episode_length"] == 50
    assert (tmp_path / "best_model.zip").exists()
    assert (tmp_path / "rl_model_vecnormalize_512_steps.pkl").exists()
    args = script.Args(total_timesteps=768, resume=True, **small)
    # As of a run that was killed before the last statistics were written
    (tmp_path / "rl_model_vecnormalize_512_steps.pkl").unlink()
    assert script.main(args)["env_steps"] == 768
    assert "continues from 256 steps" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.full
def test_sb3_learns(tmp_path):
    script = load_example("sb3_callbacks")
    result = script.main(script.Args(seed=20261126, out=tmp_path))  # a seed not used for tuning
    assert result["episode_distance"] > -0.05  # at random -0.2


@pytest.fixture(scope="module")
def robot():
    for name in ("rsl_rl", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    return load_example("robot")


@pytest.mark.filterwarnings("ignore")  # PyTorch's ONNX exporter warns of its own code
def test_robot_trains_with_rsl_rl_and_plays_from_an_onnx_file(robot, tmp_path):
    args = robot.Args(num_envs=64, iterations=2, num_eval_envs=8, out=tmp_path)
    results = robot.main(args)
    assert {*results} == {"episode_return", "episode_upright", "onnx_upright", "onnx_error"}
    assert results["onnx_error"] < 1e-5
    assert (tmp_path / "policy.onnx").exists()
    assert (tmp_path / "policy.json").exists()


@pytest.mark.long
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # PyTorch's ONNX exporter warns of its own code
def test_robot_learns(robot, tmp_path):
    results = robot.main(robot.Args(seed=20261126, out=tmp_path))  # a seed not used for tuning
    assert results["episode_upright"] > 0.5
    assert results["onnx_upright"] > 0.5


def test_robot_is_the_arm_that_the_benchmarks_have_by_hand(robot, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    peer = importlib.import_module("tests.benchmarks.rsl_rl_peer").ArmEnv(16)
    peer.noise_std = 0
    make_noise = T.AddNoise
    monkeypatch.setattr(T, "AddNoise", lambda std: make_noise(0.0))
    env = robot.make_env(16)
    td = env.reset(seed=0)
    state = env.unwrapped.state
    parts = {type(part): part for part in env.modules()}
    peer.motor_delay = parts[T.DelayAction].delays.clone()
    peer.sensor_delay = parts[T.DelayObservation].delays.clone()
    peer.angle = state["angle"].clone()
    peer.speed = state["speed"].clone()
    peer.robot = state["robot"].clone()
    peer.measured = peer.measure(peer.angle).unsqueeze(1).repeat(1, 3, 1)
    peer.stack = peer.measured[:, :1].repeat(1, 5, 1)
    generator = torch.Generator().manual_seed(0)
    close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    for step in range(200):
        obs = peer.get_observations()
        close(td["observation", "policy"], obs["policy"])
        close(td["observation", "critic"], obs["critic"])
        action = 2 * torch.randn(16, 1, generator=generator)
        _, reward, dones, extras = peer.step(action)
        transition, td = env.step(action)
        close(transition["next", "reward"][:, 0], reward)
        assert transition["next", "done"].all() == dones.all() == (step == 199)
    for name, value in extras["log"].items():
        close(transition["next", name][:, 0].float(), value)


@pytest.fixture(scope="module")
def rsl_rl_robot(robot):
    return load_example("rsl_rl_robot")


@pytest.fixture(scope="module")
def taught(rsl_rl_robot, tmp_path_factory):
    """The folder of a teacher of two iterations, and what Weights & Biases got."""
    folder = tmp_path_factory.mktemp("taught")
    wandb = SimpleNamespace(config={}, logged={}, saved=[])
    wandb.init = wandb.finish = lambda **kwargs: None
    wandb.log = lambda scalars, step: wandb.logged.update(scalars)
    wandb.save = lambda path, base_path: wandb.saved.append(Path(path).name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rsl_rl.utils.wandb_log_writer.wandb", wandb)
        args = dict(num_envs=16, iterations=2, logger="wandb", out=folder)
        rsl_rl_robot.main(rsl_rl_robot.Args("teacher", **args))
    return folder, wandb


@pytest.mark.full
def test_rsl_rl_robot_sends_its_logs_and_checkpoints_to_weights_and_biases(taught):
    _, wandb = taught
    names = {"Episode/level", "Episode/episode_upright", "Rnd/mean_intrinsic_reward"}
    assert names <= {*wandb.logged}
    assert {"model_0.pt", "model_1.pt"} <= {*wandb.saved}
    json.dumps(wandb.config)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # PyTorch's ONNX exporter warns of its own code
def test_rsl_rl_robot_teaches_a_student_that_plays_from_an_onnx_file(rsl_rl_robot, taught):
    folder, _ = taught
    args = rsl_rl_robot.Args("student", num_envs=16, iterations=1, eval_steps=210, out=folder)
    results = rsl_rl_robot.main(args)
    assert 0 <= results["onnx_upright"] <= 1
    assert results["onnx_error"] < 1e-5


@pytest.mark.full
def test_rsl_rl_robot_goes_on(rsl_rl_robot, taught):
    folder, _ = taught
    rsl_rl_robot.main(
        rsl_rl_robot.Args("teacher", num_envs=16, iterations=1, resume=True, out=folder)
    )
    assert (folder / "teacher/model_2.pt").exists()


@pytest.mark.long
@pytest.mark.full
def test_rsl_rl_robot_trains_and_goes_on_in_two_processes(rsl_rl_robot, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = f"teacher --num-envs 8 --iterations 2 --out {tmp_path}"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    for arguments in (flags, f"{flags} --resume"):
        command = [*torchrun, EXAMPLES / "rsl_rl_robot.py", *arguments.split()]
        subprocess.run(command, env=variables, check=True, timeout=240)
    assert (tmp_path / "teacher/model_3.pt").exists()
