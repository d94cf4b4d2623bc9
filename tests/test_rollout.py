from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def test_a_rollout_holds_what_steps_give():
    env, other = ScriptedEnv(3), ScriptedEnv(3)
    data, td = tw.rollout(env, None, 6, env.reset(seed=0))
    assert data.shape == (3, 6) and data.names == [None, "time"]
    other_td = other.reset(seed=0)
    for step in range(6):
        transition, other_td = other.step(other_td.set("action", other.sample_action()))
        assert all((data[:, step][key] == transition[key]).all() for key in transition.keys(True, True))
    assert (td["observation"] == other_td["observation"]).all()


def test_a_rollout_goes_on_where_the_last_one_stopped():
    env, other = ScriptedEnv(2), ScriptedEnv(2)
    first, td = tw.rollout(env, None, 3, env.reset(seed=0))
    second, _ = tw.rollout(env, None, 4, td)
    whole, _ = tw.rollout(other, None, 7, other.reset(seed=0))
    both = torch.cat([first, second], 1)
    assert all((both[key] == whole[key]).all() for key in whole.keys(True, True))


def test_the_root_of_a_step_is_the_successor_of_the_last_unless_an_episode_ended():
    data, _ = tw.rollout(ScriptedEnv(4), None, 30)
    following, root, done = data["next", "observation"][:, :-1], data["observation"][:, 1:], data["next", "done"][:, :-1, 0]
    assert (following[~done] == root[~done]).all() and (root[done][:, 0] % 1000 == 0).all()
    assert done.any() and not done.all()


@pytest.mark.parametrize(
    "policy",
    [
        lambda td: torch.full((2, 6), 0.5),
        lambda td: td.set("action", torch.full((2, 6), 0.5)),
        lambda td: TensorDict({"observation": td["observation"], "action": torch.full((2, 6), 0.5)}, [2]),
    ],
)
def test_a_policy_gives_the_action_or_a_td_with_it(policy):
    data, _ = tw.rollout(ScriptedEnv(2), policy, 3)
    assert (data["next", "info", "action"] == 0.5).all()


def test_what_a_policy_writes_is_kept():
    def policy(td):
        return td.update({"action": torch.zeros(2, 6), "value": td["observation"][:, :1] * 2})

    data, _ = tw.rollout(ScriptedEnv(2), policy, 3)
    assert (data["value"] == data["observation"][..., :1] * 2).all()


def test_a_policy_has_no_gradient_in_a_rollout():
    network = torch.nn.Linear(17, 6)
    data, _ = tw.rollout(ScriptedEnv(2), lambda td: network(td["observation"] / 1000).clamp(-1, 1), 3)
    assert not data["action"].requires_grad and network(data["observation"]).requires_grad


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, True, None])
def test_a_rollout_of_no_steps_is_refused(num_steps):
    error = ValueError if isinstance(num_steps, int) else TypeError
    with pytest.raises(error, match=f"rollout needs (an integer )?num_steps of at least 1, but got {num_steps}"):
        tw.rollout(ScriptedEnv(2), None, num_steps)


def test_every_env_contributes_equally_to_an_evaluation():
    # Env 0 has episodes of 1 step (return 1), env 1 of 4 (return 10): by order of ending, env 0 would fill the 6 places.
    class Scripted(ScriptedEnv):
        def _step(self, td):
            self.episode.zero_()
            return super()._step(td)

    result = tw.evaluate(Scripted(2, episode_lengths=(1, 4)), None, 6)
    assert result["episode_return"].tolist() == [1, 1, 1, 10, 10, 10]
    assert result["episode_length"].tolist() == [1, 1, 1, 4, 4, 4]


def test_an_evaluation_rounds_up_to_whole_rounds():
    assert tw.evaluate(ScriptedEnv(3), None, 4).shape == (6,)


def test_an_evaluation_gives_the_raw_return_below_reward_transforms():
    env = tw.TransformedEnv(ScriptedEnv(2, episode_lengths=3), T.RecordEpisodeStatistics(), T.ClipReward(-1, 1))
    assert tw.evaluate(env, None, 2)["episode_return"].tolist() == [6, 6]
    without = tw.TransformedEnv(ScriptedEnv(2, episode_lengths=3), T.ClipReward(-1, 1))
    assert tw.evaluate(without, None, 2)["episode_return"].tolist() == [3, 3]


def test_an_evaluation_freezes_statistics_and_puts_the_mode_back():
    env = tw.TransformedEnv(ScriptedEnv(2), T.NormalizeObservation(), T.NormalizeReward())
    env.transform.transforms[1].eval()
    tw.rollout(env, None, 5)
    before = {name: value.clone() for name, value in env.state_dict().items()}
    tw.evaluate(env, None, 8)
    assert all((value == before[name]).all() for name, value in env.state_dict().items())
    assert env.training and env.transform.transforms[0].training and not env.transform.transforms[1].training


@pytest.mark.parametrize("num_episodes", [0, -1, 1.5, True, None])
def test_an_evaluation_of_no_episodes_is_refused(num_episodes):
    error = ValueError if isinstance(num_episodes, int) else TypeError
    with pytest.raises(error, match=f"evaluate needs (an integer )?num_episodes of at least 1, but got {num_episodes}"):
        tw.evaluate(ScriptedEnv(2), None, num_episodes)


def test_an_evaluation_leaves_the_env_where_it_is():
    env = tw.make("CartPole-v1", 2)
    env.reset(seed=0)
    tw.evaluate(env, None, 4)
    snapshot = env.snapshot()
    state = torch.stack([snapshot["buffers"][f"state_{name}"] for name in ("x", "x_dot", "theta", "theta_dot")], -1)
    assert (snapshot["observation"] == state).all()


def test_an_action_may_have_a_part_called_action():
    space = spaces.Dict(action=spaces.Box(-1, 1, (2,)), other=spaces.Discrete(3))
    env = ScriptedEnv(2, action_space=space)
    data, _ = tw.rollout(env, None, 3)
    again, _ = tw.rollout(env, lambda td: env.sample_action(), 3)
    assert set(data["action"].keys()) == set(again["action"].keys()) == {"action", "other"}
