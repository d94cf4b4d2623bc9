"""What earlier versions saved: state_dicts, snapshots and specs, which `saved/write.py` made."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from gymnasium.envs.registration import EnvSpec

import torchwrap as tw

FOLDER = Path(__file__).parent / "saved"
CASES = ["0.2.0/pendulum", "0.2.0/cartpole"]


@pytest.fixture(params=CASES)
def saved(request):
    """The spec of a stack, and the files that belong to it."""
    version, _, name = request.param.partition("/")
    specs = json.loads((FOLDER / version / "specs.json").read_text())
    files = torch.load(FOLDER / version / "saved.pt", weights_only=True)
    return EnvSpec.from_json(json.dumps(specs[name])), files[name]


def test_state_dict_loads_into_another_number_of_envs(saved):
    spec, files = saved
    env = tw.make(spec, num_envs=5)
    env.load_state_dict(files["state_dict"])
    torch.testing.assert_close(dict(env.state_dict()), files["state_dict"])
    env.eval().reset(seed=0)
    transition, _ = env.step(env.sample_action())
    assert transition["next", "observation"].isfinite().all()


def test_snapshot_continues_as_in_the_version_that_saved_it(saved):
    spec, files = saved
    env = tw.make(spec)
    td = env.restore(files["snapshot"])
    for step, action in enumerate(files["actions"]):
        transition, td = env.step(td.set("action", action))
        torch.testing.assert_close(transition["next", "reward"], files["rewards"][step])
        torch.testing.assert_close(td["observation"], files["observations"][step])


@pytest.mark.parametrize("version", ["0.2.0"])
def test_pickled_spec_of_transforms_that_have_moved_makes_the_stack(version):
    spec = pickle.loads((FOLDER / version / "sticky.pickle").read_bytes())  # the file is ours
    env = tw.make(spec)
    td = env.reset(seed=0)
    td["next", "hidden"] = torch.ones(3, 4)
    _, td = env.step(td.set("action", env.sample_action()))
    assert td["hidden"].eq(1).all()
