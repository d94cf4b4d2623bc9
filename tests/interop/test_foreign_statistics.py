"""The guide `saving`: its lines that take over statistics, each run with the other library."""

from __future__ import annotations

import functools
import pickle
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

PAGE = (Path(__file__).parents[2] / "examples" / "guides" / "saving.md").read_text()
TABLE = PAGE.split("\n## Statistics from other libraries\n")[1].split("\n## ")[0]
BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
NOISE = torch.randn(3, 2048, 3, generator=torch.Generator().manual_seed(0))
MEAN = torch.tensor([0, -3, 9])
ROWS = MEAN + NOISE * torch.tensor([1, 5, 20.0])


def lines_of_guide():
    """By library: the line that takes its statistics over, and the line back."""
    rows = [row for row in TABLE.splitlines() if row.startswith("|")]
    lines = {}
    for row in rows[2:]:
        library, *cells = re.split(r" (?<!\\)\| ", row.strip("| "))
        name = re.match(r"\w+(?: \w+)?", library)[0]
        lines[name] = [cell.strip(" `").replace("\\|", "|") for cell in cells]
    return lines


LINES = lines_of_guide()


class Noise(gymnasium.Env):
    """Observations and rewards that are drawn, in episodes of five steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space=BOX):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed = 0
        return self.observe(), {}

    def draw(self):
        return self.np_random.normal(4, [1, 5, 20]).astype("f4")

    def observe(self):
        if self.observation_space is BOX:
            return self.draw()
        return {key: self.draw() for key in self.observation_space}

    def step(self, action):
        self.elapsed += 1
        return (
            self.observe(),
            self.np_random.normal(1, 7),
            False,
            self.elapsed == 5,
            {},
        )


def baselines(tmp_path, space=BOX):
    """A trained VecNormalize, saved and loaded by Stable-Baselines3."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")

    def make():
        return vec_env.DummyVecEnv([lambda: Noise(space)] * 4)

    v = vec_env.VecNormalize(make(), clip_obs=1.5, clip_reward=0.4, epsilon=1e-3)
    v.reset()
    for _ in range(50):
        v.step(np.zeros(4, int))
    v.save(tmp_path / "vec_normalize.pkl")
    return vec_env.VecNormalize.load(tmp_path / "vec_normalize.pkl", make())


def stack(*transforms, space=BOX):
    env = ScriptedEnv(4, observation_space=space, episode_lengths=5)
    return tw.TransformedEnv(env, *transforms)


def observed(env, rows):
    """Rows of observations through the transforms of an env."""
    return env.transforms(TensorDict({"observation": rows}, [2048]))["observation"]


def assert_close(first, second, tolerance=1e-4):
    np.testing.assert_allclose(first, second, rtol=tolerance, atol=tolerance)


def check(library, env, names, normalize, learn, tolerance=1e-5):
    """Both normalize the same rows alike, before and after learning, there and back again."""
    into, back = LINES[library]
    statistics = env.transforms[0].statistics
    names |= {"s": statistics, "env": env, "torch": torch}
    rows = ROWS[1]
    exec(into, names)
    count = statistics.count.max().item()
    assert_close(observed(env, rows), normalize(rows))
    learn(rows)
    statistics.update(rows)
    assert (statistics.count == count + 2048).all()
    assert_close(observed(env, rows), normalize(rows), tolerance)
    statistics.update(ROWS[2] + 3)  # torchwrap alone
    exec(back, names)
    assert_close(normalize(rows), observed(env, rows))
    mean = statistics.mean.clone()
    var = statistics.var.clone()
    exec(into, names)
    assert (statistics.count == count + 2 * 2048).all()
    assert_close(statistics.mean, mean)
    assert_close(statistics.var, var)


def test_observation_statistics_of_stable_baselines(tmp_path):
    v = baselines(tmp_path)
    env = stack(
        T.NormalizeObservation(v.epsilon),
        T.ClipObservation(-v.clip_obs, v.clip_obs),
    )
    check(
        "Stable",
        env,
        {"v": v},
        lambda rows: v.normalize_obs(rows.numpy()),
        lambda rows: v.obs_rms.update(rows.double().numpy()),
    )
    assert pickle.loads(pickle.dumps(v)).obs_rms.count == v.obs_rms.count


def test_reward_statistics_of_stable_baselines(tmp_path):
    v = baselines(tmp_path)
    clip = v.clip_reward
    normalize = T.NormalizeReward(v.gamma, v.epsilon)
    env = stack(normalize, T.ClipReward(-clip, clip)).eval()
    statistics = env.transforms[0].statistics
    names = {"v": v, "r": statistics}
    exec(LINES["its rewards"][0], names)
    assert statistics.count.item() == 200
    raw_env = stack()
    td = env.reset(seed=0)
    raw_td = raw_env.reset(seed=0)
    for _ in range(6):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        raw, raw_td = raw_env.step(raw_td.set("action", action))
        theirs = v.normalize_reward(raw["next", "reward"].numpy())
        np.testing.assert_allclose(transition["next", "reward"], theirs, rtol=1e-5)
    statistics.update(ROWS[0, :, :1])
    exec(LINES["its rewards"][1], names)
    reward = np.float32([0.1, -0.2, 2])
    scaled = reward * statistics.scale(v.epsilon).numpy()
    expected = np.clip(scaled, -clip, clip)
    np.testing.assert_allclose(v.normalize_reward(reward), expected, rtol=1e-5)
    assert v.ret_rms.count == 200 + 2048


def test_dict_statistics_of_stable_baselines(tmp_path):
    other = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    space = spaces.Dict(b=BOX, a=other)
    v = baselines(tmp_path, space)
    v.clip_obs = np.inf
    env = stack(T.NormalizeObservation(v.epsilon), space=space)
    names = {"v": v, "n": env.transforms[0]}
    rows = {"a": ROWS[0], "b": ROWS[1]}
    for line in LINES["its"]:  # into torchwrap; and back, after it has learned
        exec(line, names)
        ours = observed(env, TensorDict(rows, [2048]))
        arrays = {key: value.numpy() for key, value in rows.items()}
        theirs = v.normalize_obs(arrays)
        for key, value in rows.items():
            assert_close(ours[key], theirs[key])
            names["n"].statistics_of[(key,)].update(value)
    assert {float(each.count) for each in v.obs_rms.values()} == {204 + 2048}


def test_statistics_of_gymnasium():
    vector_env = gymnasium.vector.SyncVectorEnv([Noise] * 4)
    w = gymnasium.wrappers.vector.NormalizeObservation(vector_env, epsilon=1e-3)
    w.reset()
    for _ in range(50):
        w.step(np.zeros(4, int))

    def normalize(rows):
        deviation = np.sqrt(w.obs_rms.var + w.epsilon)
        return (rows.numpy() - w.obs_rms.mean) / deviation

    def learn(rows):
        w.obs_rms.update(rows.double().numpy())

    check(
        "Gymnasium",
        stack(T.NormalizeObservation(w.epsilon)),
        {"w": w},
        normalize,
        learn,
    )


def test_statistics_of_torchrl():
    torchrl = pytest.importorskip("torchrl.envs.transforms")
    t = torchrl.VecNormV2(["observation"], decay=1.0, reduce_batch_dims=True)

    def step(rows):
        td = TensorDict({"observation": rows.clone()}, rows.shape[:1])
        return t._step(td, td)["observation"]

    def normalize(rows):
        t.freeze()
        result = step(rows)
        t.unfreeze()
        return result

    step(ROWS[0])
    check(
        "TorchRL",
        stack(T.NormalizeObservation()),
        {"t": t},
        normalize,
        step,
        1e-4,
    )


def test_statistics_of_rsl_rl():
    e = pytest.importorskip("rsl_rl.modules").EmpiricalNormalization((3,))
    e.update(ROWS[0])
    # It adds 0.01 to the deviation, of 1 here; ours is taken over with it, and learns without.
    check(
        "rsl_rl",
        stack(T.NormalizeObservation()),
        {"e": e},
        e,
        e.update,
        0.02,
    )


def test_statistics_of_skrl():
    scaler = pytest.importorskip("skrl.resources.preprocessors.torch").RunningStandardScaler
    p = scaler(BOX, clip_threshold=1.5, device="cpu")
    p(ROWS[0], train=True)
    env = stack(
        T.NormalizeObservation(),
        T.ClipObservation(-p.clip_threshold, p.clip_threshold),
    )
    # It adds the sample variance of each batch.
    learn = functools.partial(p, train=True)
    check("skrl", env, {"p": p}, p, learn, 1e-3)


# set_moments, which the lines call.

GOOD = {"mean": np.zeros(3), "var": torch.ones(3), "count": 7.0001}
UNFIT = {
    "shape": ("mean", np.zeros(2), ValueError),
    "NaN": ("mean", [0, np.nan, 0], ValueError),
    "negative": ("var", [1, 1, -1e-9], ValueError),
    "below 1": ("count", 1e-4, ValueError),
    "not counted exactly": ("count", 2.0**54, ValueError),
    "string": ("var", "ones", TypeError),
}


@pytest.mark.parametrize(("name", "value", "error"), UNFIT.values(), ids=UNFIT)
def test_set_moments_refuses_unfit_moments_before_anything_changes(name, value, error):
    statistics = T.RunningMeanStd((3,))
    statistics.update(ROWS[0])
    before = {key: buffer.clone() for key, buffer in statistics.named_buffers()}
    with pytest.raises(error, match=f"RunningMeanStd.*{name}"):
        statistics.set_moments(**{**GOOD, name: value})
    for key, buffer in statistics.named_buffers():
        assert torch.equal(buffer, before[key])


def test_set_moments_rounds_the_count_and_keeps_float64():
    statistics = T.RunningMeanStd((3,))
    statistics.set_moments(**GOOD)
    assert statistics.count.tolist() == [7, 7, 7]
    assert statistics.synced[2].tolist() == [7, 7, 7]
    large = T.RunningMeanStd((1,))
    large.set_moments(123456789.123, 4.0, 10)  # float32 does not hold this mean
    assert large.mean.item() == pytest.approx(123456789.123, rel=1e-15)
    assert large.var.item() == pytest.approx(4.0, rel=1e-12)
