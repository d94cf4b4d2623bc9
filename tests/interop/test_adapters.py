"""One contract for the adapters of all trainers, against an env that is stepped directly."""

import importlib

import numpy as np
import pytest
import torch
from adapters import LOGGED, VECTOR, simulator, staggered, staggered_steps
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode
from helpers import RewardTerms, discrete

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
from torchwrap.interop.tensors import from_functions
from torchwrap.testing import ScriptedEnv

pytestmark = [
    pytest.mark.filterwarnings("ignore:to_rsl_rl.*unbounded:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(tensordict|torchrl).*"),
]


class Adapter:
    """What a library sees of an env.

    `root` is the observation of the first reset. `step` returns the next root, the rewards, dones
    and time-outs, and the final observations by row.
    """

    @classmethod
    def export(cls, env, **kwargs):
        module = pytest.importorskip(f"torchwrap.interop.{cls.name}", exc_type=ImportError)
        return getattr(module, f"to_{cls.name}")(env, **kwargs)


class Sb3(Adapter):
    name = "sb3"

    def __init__(self, env, seed=0):
        self.venv = self.export(env)
        self.venv.seed(seed)
        self.root = self.venv.reset()

    def reset(self):
        return self.venv.reset()

    def step(self, action):
        given = action.numpy().copy()
        self.venv.step_async(given)
        given += 1
        root, reward, done, infos = self.venv.step_wait()
        assert len(set(map(id, infos))) == len(infos)  # VecEnvWrappers write into them
        finals = {}
        for row, info in enumerate(infos):
            if info:
                finals[row] = info["terminal_observation"]
        time_outs = [info.get("TimeLimit.truncated", False) for info in infos]
        return root, reward, done, time_outs, finals

    @classmethod
    def save(cls, env, path):
        cls.export(env).save(path)

    @classmethod
    def load(cls, env, path):
        from stable_baselines3.common.vec_env import VecNormalize

        return VecNormalize.load(path, cls.export(env)).reset


class Gymnasium(Adapter):
    name = "gymnasium"
    mode = AutoresetMode.SAME_STEP

    def __init__(self, env, seed=0):
        self.venv = self.export(env)
        self.root, _ = self.venv.reset(seed=seed)

    @classmethod
    def export(cls, env):
        return tw.to_gymnasium(env, autoreset_mode=cls.mode)

    def reset(self):
        return self.venv.reset()[0]

    def step(self, action):
        root, reward, terminated, truncated, infos = self.venv.step(action.numpy())
        done = terminated | truncated
        finals = dict(enumerate(infos["final_obs"])) if done.any() else {}
        return root, reward, done, truncated & ~terminated, finals


class Disabled(Gymnasium):
    mode = AutoresetMode.DISABLED

    def step(self, action):
        final, reward, terminated, truncated, _ = self.venv.step(action.numpy())
        done = terminated | truncated
        root = final
        if done.any():
            root, _ = self.venv.reset(options={"reset_mask": done})
        return root, reward, done, truncated & ~terminated, dict(enumerate(final))


class TorchRL(Adapter):
    name = "torchrl"

    def __init__(self, env, seed=0):
        self.venv = self.export(env)
        self.venv.set_seed(seed)
        self.root = self.reset()

    def reset(self):
        self.td = self.venv.reset()
        return self.td["observation"]

    def step(self, action):
        transition, self.td = self.venv.step_and_maybe_reset(self.td.set("action", action))
        successor = transition["next"]
        time_outs = successor["truncated"] & ~successor["terminated"]
        finals = dict(enumerate(successor["observation"]))
        return self.td["observation"], successor["reward"], successor["done"], time_outs, finals


class RslRl(Adapter):
    name = "rsl_rl"

    def __init__(self, env, seed=0):
        self.venv = self.export(env, seed=seed)
        self.root = self.venv.get_observations()["policy"]

    def reset(self):
        return self.venv.reset()[0]["policy"]

    def step(self, action):
        observations, reward, done, extras = self.venv.step(action)
        assert torch.equal(self.venv.get_observations()["policy"], observations["policy"])
        self.numbers = extras.get("log", {})
        finals = dict(enumerate(extras["final_obs"]["policy"]))
        return observations["policy"], reward, done, extras["time_outs"], finals

    @classmethod
    def save(cls, env, path):
        from test_rsl_rl import make_runner

        make_runner(env).save(path)

    @classmethod
    def load(cls, env, path):
        from test_rsl_rl import make_runner

        runner = make_runner(env)
        runner.load(path)
        return runner.alg.train_mode


class Skrl(Adapter):
    name = "skrl"

    def __init__(self, env, seed=0):
        self.venv = self.export(env)
        self.config = importlib.import_module("skrl").config.torch
        self.config.key = seed
        self.root, _ = self.venv.reset()

    def reset(self):
        observations, _ = self.venv.reset()
        self.config.key = 0
        return observations

    def step(self, action):
        root, reward, terminated, truncated, infos = self.venv.step(action)
        self.numbers = infos.get("episode", {})
        assert all(value.dim() == 0 for value in self.numbers.values())  # skrl logs no others
        finals = dict(enumerate(infos["final_observations"]))
        return root, reward, terminated | truncated, truncated & ~terminated, finals

    @classmethod
    def agent(cls, env):
        from test_skrl import make_idle_agent, true_successors

        venv = cls.export(env)
        return venv, true_successors(make_idle_agent(venv), venv)

    @classmethod
    def save(cls, env, path):
        cls.agent(env)[1].save(path)

    @classmethod
    def load(cls, env, path):
        venv, agent = cls.agent(env)
        agent.load(path)
        return venv.reset


class RlGames(Adapter):
    name = "rl_games"

    def __init__(self, env, seed=0):
        self.venv = self.export(env)
        self.venv.seed(seed)
        self.root = self.reset()

    def reset(self):
        return self.venv.reset()

    def step(self, action):
        root, reward, done, infos = self.venv.step(action)
        self.numbers = infos.get("episode", {})
        finals = dict(enumerate(infos["final_observation"]))
        return root, reward, done, infos["time_outs"], finals

    @classmethod
    def save(cls, env, path):
        torch.save(cls.export(env).get_env_state(), path)

    @classmethod
    def load(cls, env, path):
        venv = cls.export(env)
        venv.set_env_state(torch.load(path))
        return venv.reset


def over(*adapters):
    return pytest.mark.parametrize("adapter", adapters, ids=lambda adapter: adapter.__name__)


ALL = (Sb3, Gymnasium, TorchRL, RslRl, Skrl, RlGames)


def flat(value):
    return torch.as_tensor(value).float().flatten()


# Steps.


@pytest.mark.parametrize("is_disturbed", [False, True], ids=["held", "written to"])
@over(*ALL, Disabled)
def test_steps_are_those_of_the_env_with_true_final_observations(adapter, is_disturbed):
    """Results are the caller's: no later step changes them, and writing changes no later step."""
    venv = adapter(staggered())
    held = []
    for action, successor, td, time_outs in staggered_steps():
        root, reward, done, given, finals = venv.step(action.clone())
        expected = (td["observation"], successor["reward"], successor["done"], time_outs)
        for value, other in zip((root, reward, done, given), expected, strict=True):
            assert torch.equal(flat(value), flat(other))
        for row in successor["done"].flatten().nonzero().flatten().tolist():
            assert torch.equal(flat(finals[row]), successor["observation"][row])
        finals = [value for value in finals.values() if value is not None]
        for array in (root, reward, done, *finals):
            tensor = torch.as_tensor(array)
            held.append((tensor, tensor.clone()))
            if is_disturbed:
                tensor.fill_(1)
    assert is_disturbed or all(torch.equal(*pair) for pair in held)


@over(TorchRL, RslRl, Skrl, RlGames)
def test_tensors_are_passed_on_without_copies(adapter, monkeypatch):
    env = ScriptedEnv(2, (2,), 1)
    venv = adapter(env)
    seen = []
    drive = env._drive
    monkeypatch.setattr(env, "_drive", lambda *given: seen.extend(drive(*given)) or seen)
    root, reward, *_, finals = venv.step(torch.zeros(2, 6))
    result, td = seen
    successor = result.get("next", result)  # of a transition, or alone
    pairs = [(root, td["observation"]), (reward, successor["reward"])]
    for given, own in [*pairs, (finals[0], successor["observation"])]:
        assert given.data_ptr() == own.data_ptr()


@over(*ALL)
def test_seed_is_that_of_the_first_reset_alone(adapter):
    expected = tw.make("Pendulum-v1", 3).reset(seed=5)["observation"]
    venv = adapter(tw.make("Pendulum-v1", 3), seed=5)
    assert torch.equal(flat(venv.root), flat(expected))
    assert (flat(venv.reset()) != flat(expected)).any()


# Logs.


def means(numbers):
    return {name: value.mean().item() for name, value in numbers.items() if value.numel()}


@over(RslRl, Skrl, RlGames)
def test_numbers_of_infos_and_of_finished_episodes_are_logged(adapter):
    recorder = T.RecordEpisodeStatistics(metrics={"most": ("twice", "max")})
    base = ScriptedEnv(3, (1,), (1, 3, 3))
    venv = adapter(tw.TransformedEnv(base, RewardTerms(), recorder, T.ScaleReward(9)))
    for rewards, episode in (([1, 1, 1], (1, 1, 2)), ([1, 2, 2], None), ([2, 3, 3], (6, 3, 6))):
        venv.step(torch.zeros(3, 6))
        mean = np.mean(rewards)
        expected = {"twice": 2 * mean, "terms/half": mean / 2}
        if episode:
            names = ("episode_return", "episode_length", "episode_most")
            expected |= zip(names, episode, strict=True)
        assert means(venv.numbers) == pytest.approx(expected)
    plain = adapter(ScriptedEnv(2, (1,), 1))
    plain.step(torch.zeros(2, 6))
    assert plain.numbers == {}


@pytest.mark.parametrize("key", ["log", "episode"])
@over(RslRl, Skrl, RlGames)
def test_numbers_that_a_simulator_logs_are_logged_and_stay_its_own(adapter, key):
    venv = adapter(simulator(key))
    for step in range(4):
        venv.step(torch.zeros(2, 6))
        assert means(venv.numbers) == {name: values[step] for name, values in LOGGED.items()}
        venv.numbers.clear()


# Checkpoints.


def of_functions(num_envs, levels):
    env = tw.FunctionalEnv(Pendulum(), num_envs, params={"length": levels})
    return env, env.params["length"]


def of_simulator(num_envs, levels):
    def reset(mask):
        return torch.ones(num_envs, 3)

    def step(action):
        no = torch.zeros(num_envs)
        return reset(no), no, no, no, {}

    spaces = (VECTOR, Box(-1, 1, (1,), np.float32))
    held = {"level": torch.zeros(num_envs)}
    options = {"seed": lambda seed: None, "levels": lambda: held}
    env = from_functions(reset, step, num_envs, *spaces, **options)
    held["level"] = levels  # a simulator may replace its tensors
    return env, levels


RESUMED = {  # number of envs, mode, and levels
    "training": (3, True, [7, 8, 9]),
    "evaluation": (3, False, [1, 2, 3]),
    "other envs": (2, True, [1, 2]),
}


@pytest.mark.parametrize(("num_envs", "mode", "expected"), RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("make", [of_functions, of_simulator])
@over(Sb3, RslRl, Skrl, RlGames)
def test_checkpoint_holds_statistics_and_the_levels_of_an_env_that_trains(
    adapter, make, num_envs, mode, expected, tmp_path
):
    def leveled(num_envs, first):
        base, levels = make(num_envs, first + torch.arange(float(num_envs)))
        return tw.TransformedEnv(base, T.NormalizeObservation()), levels

    saved, _ = leveled(3, 7)
    tw.rollout(saved, None, 5)
    adapter.save(saved, str(tmp_path / "saved"))
    env, levels = leveled(num_envs, 1)
    resume = adapter.load(env, str(tmp_path / "saved"))
    torch.testing.assert_close(dict(env.state_dict()), dict(saved.state_dict()), rtol=0, atol=0)
    assert env.transforms[0].statistics.mean.any()
    env.train(mode)
    resume()
    assert levels.tolist() == expected  # in the env's own tensor


# Refusals.

DOUBLES = Box(0, 1, (2,), np.float64)
FROM_1 = Discrete(2, start=1)
MATRIX = MultiDiscrete([[2, 3]])
OBSERVATIONS = {
    Sb3: [FROM_1],
    RslRl: [
        Box(0, 1, (3, 8), np.float32),
        Box(0, 255, (3, 8, 8), np.uint8),
        Dict(a=VECTOR, b=Discrete(2)),
        Dict(a=VECTOR, b=DOUBLES),
    ],
    Skrl: [MultiBinary(3)],
    RlGames: [Discrete(3), Dict(a=VECTOR), Box(0, 9, (3,), np.int64)],
}
ACTIONS = {
    Sb3: [FROM_1],
    RslRl: [Discrete(2), DOUBLES],
    Skrl: [MultiBinary(3), MATRIX, FROM_1],
    RlGames: [MultiDiscrete([2, 3]), FROM_1, VECTOR],
}


@pytest.mark.parametrize("name", ["observation", "action"])
@over(*ACTIONS)
def test_spaces_that_a_library_cannot_hold_are_refused_before_a_reset(adapter, name):
    for space in (OBSERVATIONS if name == "observation" else ACTIONS)[adapter]:
        env = ScriptedEnv(2, (3,), **{f"{name}_space": space})
        with pytest.raises(ValueError, match=f"to_{adapter.name}.*{name}"):
            adapter.export(env)
        assert env.np_random_seed is None


@over(Sb3, Gymnasium, Skrl)
def test_actions_do_not_wrap_around_in_the_dtype_of_their_space(adapter):
    given = adapter(ScriptedEnv(2, (3,), action_space=discrete(3, np.uint8)))
    given.step(torch.tensor([2, 0]))
    with pytest.raises(ValueError, match="action"):
        given.step(torch.tensor([256, 0]))


@over(*ALL)
def test_other_objects_and_envs_that_hold_the_state_of_a_policy_are_refused(adapter):
    state = tw.PolicyState({"hidden": (4,)})
    with pytest.raises(ValueError, match=f"to_{adapter.name}.*PolicyState"):
        adapter.export(tw.TransformedEnv(ScriptedEnv(2, (3,)), state))
    with pytest.raises(TypeError, match=f"to_{adapter.name}.*env"):
        adapter.export(torch.nn.Linear(1, 1))
