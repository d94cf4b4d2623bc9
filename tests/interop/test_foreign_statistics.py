"""The lines of the guide `saving` that take over the statistics of other libraries, each run with the library itself."""

from __future__ import annotations

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
LINES = {  # by library: into torchwrap, and back
    re.match(r"\w+(?: \w+)?", library)[0]: [line.strip(" `").replace("\\|", "|") for line in lines]
    for library, *lines in [
        re.split(r" (?<!\\)\| ", row.strip("| "))
        for row in TABLE.splitlines()
        if row.startswith("|")
    ][2:]
}
BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ROWS = torch.randn(3, 2048, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
    [1, 5, 20.0]
) + torch.tensor([0, -3, 9])


class Noise(gymnasium.Env):
    """Observations and rewards that are drawn, in episodes of five steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space=BOX):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed = 0
        return self.observe(), {}

    def observe(self):
        draw = lambda: self.np_random.normal(4, [1, 5, 20]).astype("f4")  # noqa: E731
        return (
            draw()
            if self.observation_space is BOX
            else {key: draw() for key in self.observation_space}
        )

    def step(self, action):
        self.elapsed += 1
        return self.observe(), self.np_random.normal(1, 7), False, self.elapsed == 5, {}


def baselines(tmp_path, space=BOX):
    """A trained VecNormalize, saved and loaded by Stable-Baselines3."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    make = lambda: vec_env.DummyVecEnv([lambda: Noise(space)] * 4)  # noqa: E731
    v = vec_env.VecNormalize(make(), clip_obs=1.5, clip_reward=0.4, epsilon=1e-3)
    v.reset()
    for _ in range(50):
        v.step(np.zeros(4, int))
    v.save(tmp_path / "vec_normalize.pkl")
    return vec_env.VecNormalize.load(tmp_path / "vec_normalize.pkl", make())


def stack(*transforms, space=BOX):
    return tw.TransformedEnv(
        ScriptedEnv(4, observation_space=space, episode_lengths=5), *transforms
    )


def check(library, env, names, normalize, learn, rtol=1e-5):
    """Normalizes as the library does, before and after both have learned the same rows, and gives the statistics back."""
    into, back = LINES[library]
    s = env.transforms[0].statistics
    names |= {"s": s, "env": env, "torch": torch}
    exec(into, names)
    count, rows = s.count.max().item(), ROWS[1]
    np.testing.assert_allclose(
        env.transforms(TensorDict({"observation": rows}, [2048]))["observation"],
        normalize(rows),
        rtol=1e-4,
        atol=1e-4,
    )
    learn(rows), s.update(rows)
    assert (s.count == count + 2048).all()
    result = env.transforms(TensorDict({"observation": rows}, [2048]))["observation"]
    np.testing.assert_allclose(result, normalize(rows), rtol=rtol, atol=rtol)
    s.update(ROWS[2] + 3)  # what only torchwrap has seen
    exec(back, names)
    expected = env.transforms(TensorDict({"observation": rows}, [2048]))["observation"]
    np.testing.assert_allclose(normalize(rows), expected, rtol=1e-4, atol=1e-4)
    mean, var = s.mean.clone(), s.var.clone()
    exec(into, names)  # again the same
    assert (s.count == count + 2 * 2048).all()
    torch.testing.assert_close((s.mean, s.var), (mean, var), rtol=1e-4, atol=1e-4)


def test_observation_statistics_of_stable_baselines(tmp_path):
    v = baselines(tmp_path)
    env = stack(T.NormalizeObservation(v.epsilon), T.ClipObservation(-v.clip_obs, v.clip_obs))
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
    env = stack(T.NormalizeReward(v.gamma, v.epsilon), T.ClipReward(-v.clip_reward, v.clip_reward))
    names = {"v": v, "r": env.transforms[0].statistics}
    exec(LINES["its rewards"][0], names)
    assert names["r"].count.item() == 200
    td, same = env.eval().reset(seed=0), stack()
    plain = same.reset(seed=0)
    for _ in range(6):
        transition, td = env.step(td.set("action", env.sample_action()))
        raw, plain = same.step(plain.set("action", transition["action"]))
        theirs = v.normalize_reward(raw["next", "reward"].squeeze(-1).numpy())
        np.testing.assert_allclose(transition["next", "reward"].squeeze(-1), theirs, rtol=1e-5)
    names["r"].update(ROWS[0, :, :1])
    exec(LINES["its rewards"][1], names)
    reward = np.float32([0.1, -0.2, 2])
    expected = np.clip(reward * names["r"].scale(v.epsilon).numpy(), -v.clip_reward, v.clip_reward)
    np.testing.assert_allclose(v.normalize_reward(reward), expected, rtol=1e-5)
    assert v.ret_rms.count == 200 + 2048


def test_dict_statistics_of_stable_baselines(tmp_path):
    space = spaces.Dict(b=BOX, a=spaces.Box(-np.inf, np.inf, (3,), np.float32))
    v = baselines(tmp_path, space)
    v.clip_obs, env = np.inf, stack(T.NormalizeObservation(v.epsilon), space=space)
    names = {"v": v, "n": env.transforms[0]}
    for learns in (False, True):
        exec(LINES["its"][learns], names)
        rows = {"a": ROWS[0], "b": ROWS[1]}
        ours, theirs = (
            env.transforms(TensorDict({"observation": TensorDict(rows, [2048])}, [2048])),
            v.normalize_obs({key: value.numpy() for key, value in rows.items()}),
        )
        for key, value in rows.items():
            np.testing.assert_allclose(ours["observation", key], theirs[key], rtol=1e-4, atol=1e-4)
            names["n"].statistics_of[(key,)].update(value)
    assert {float(each.count) for each in v.obs_rms.values()} == {204 + 2048}


def test_statistics_of_gymnasium():
    vector_env = gymnasium.vector.SyncVectorEnv([Noise] * 4)
    w = gymnasium.wrappers.vector.NormalizeObservation(vector_env, epsilon=1e-3)
    w.reset()
    for _ in range(50):
        w.step(np.zeros(4, int))
    normalize = lambda rows: (rows.numpy() - w.obs_rms.mean) / np.sqrt(w.obs_rms.var + w.epsilon)  # noqa: E731
    learn = lambda rows: w.obs_rms.update(rows.double().numpy())  # noqa: E731
    check("Gymnasium", stack(T.NormalizeObservation(w.epsilon)), {"w": w}, normalize, learn)


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
    check("TorchRL", stack(T.NormalizeObservation()), {"t": t}, normalize, step, rtol=1e-4)


def test_statistics_of_rsl_rl():
    e = pytest.importorskip("rsl_rl.modules").EmpiricalNormalization((3,))
    e.update(ROWS[0])
    # The deviation of 1 with 0.01 added, of which the rows that are counted later have none.
    check("rsl_rl", stack(T.NormalizeObservation()), {"e": e}, e, e.update, rtol=0.02)


def test_statistics_of_skrl():
    scaler = pytest.importorskip("skrl.resources.preprocessors.torch").RunningStandardScaler
    p = scaler(BOX, clip_threshold=1.5, device="cpu")
    p(ROWS[0], train=True)
    env = stack(T.NormalizeObservation(), T.ClipObservation(-p.clip_threshold, p.clip_threshold))
    check(
        "skrl", env, {"p": p}, p, lambda rows: p(rows, train=True), rtol=1e-3
    )  # of batches, it adds the sample variance


def test_set_moments_refuses_what_does_not_fit_before_anything_changes():
    statistics = T.RunningMeanStd((3,))
    statistics.update(ROWS[0])
    before = {name: buffer.clone() for name, buffer in statistics.named_buffers()}
    good = {"mean": np.zeros(3), "var": torch.ones(3), "count": 7.0001}
    for name, value, error, match in (
        ("mean", np.zeros(2), ValueError, r"mean of shape \(3,\), but got \(2,\)"),
        ("mean", [0, np.nan, 0], ValueError, "mean .*, finite, but got"),
        ("mean", [0, 1e300, 0], ValueError, "mean .*, finite, but got"),
        ("var", [1, 1, -1e-9], ValueError, "var .*, finite and at least 0, but got"),
        ("var", [1, 1, np.inf], ValueError, "var .*, finite and at least 0"),
        ("count", 1e-4, ValueError, "count .*, finite and at least 1, but got 0.0001"),
        ("count", [5, 5, 0], ValueError, "count .*, finite and at least 1"),
        ("var", "ones", TypeError, "var .* as numbers, but got 'ones'"),
        ("count", None, TypeError, "count .* as numbers, but got None"),
    ):
        with pytest.raises(error, match=f"RunningMeanStd needs {match}"):
            statistics.set_moments(**{**good, name: value})
        assert all(torch.equal(buffer, before[key]) for key, buffer in statistics.named_buffers())
    statistics.set_moments(**good)
    assert statistics.count.tolist() == [7, 7, 7] and statistics.synced[2].tolist() == [7, 7, 7]
    large = T.RunningMeanStd((1,))  # whose mean float32 does not hold
    large.set_moments(123456789.123, 4.0, 10)
    assert (large.mean.item(), large.var.item()) == (
        pytest.approx(123456789.123, rel=1e-15),
        pytest.approx(4.0, rel=1e-12),
    )
