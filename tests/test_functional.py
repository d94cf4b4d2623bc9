from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import FunctionalEnv, random
from torchwrap import transforms as T
from torchwrap.envs.cartpole import CartPole


class Walk(FuncEnv):
    # One world at a time: no batch in sight, and an index that would be wrong with one.
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def initial(self, rng, params=None, start=0.0):
        return {"place": torch.zeros(2) + start, "count": torch.zeros((), dtype=torch.int64)}

    def transition(self, state, action, rng, params=None):
        moved = torch.stack([state["place"][0] + action[0], state["place"][0]])
        return {"place": moved, "count": state["count"] + 1}

    def observation(self, state, rng, params=None):
        return state["place"] * 10

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["place"][0] - 2 * state["place"][0]

    def terminal(self, state, rng, params=None):
        return state["place"][0] >= 3


class BroadcastWalk(Walk):
    broadcasts = True

    def initial(self, rng, params=None, start=0.0):
        worlds = rng.env.shape
        return {"place": torch.zeros(*worlds, 2) + start, "count": torch.zeros(worlds, dtype=torch.int64)}

    def transition(self, state, action, rng, params=None):
        return {
            "place": torch.stack([state["place"][..., 0] + action[..., 0], state["place"][..., 0]], -1),
            "count": state["count"] + 1,
        }

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["place"][..., 0] - 2 * state["place"][..., 0]

    def terminal(self, state, rng, params=None):
        return state["place"][..., 0] >= 3


class Noisy(FuncEnv):
    # Every function draws.
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def initial(self, rng, params=None):
        return {"place": random.uniform(rng, (3,))}

    def transition(self, state, action, rng, params=None):
        return {"place": state["place"] + action + random.normal(rng, (3,))}

    def observation(self, state, rng, params=None):
        return state["place"] + 1e-3 * random.normal(rng, (3,))

    def reward(self, state, action, next_state, rng, params=None):
        return random.uniform(rng)

    def terminal(self, state, rng, params=None):
        return random.uniform(rng) < 0.2


class BroadcastNoisy(Noisy):
    broadcasts = True


class Nested(Walk):
    observation_space = spaces.Dict(
        {"at": spaces.Box(-np.inf, np.inf, (2,), np.float32), "of": spaces.Tuple([spaces.Discrete(99)])}
    )

    def observation(self, state, rng, params=None):
        return TensorDict(
            {"at": state["place"], "of": TensorDict({"0": state["count"]}, state["count"].shape)}, state["count"].shape
        )


class Plain(Nested):
    # The same, in dicts of its own.
    def observation(self, state, rng, params=None):
        return {"at": state["place"], "of": {"0": state["count"]}}


class BroadcastNested(BroadcastWalk):
    observation_space, observation = Nested.observation_space, Nested.observation


class Itself(Walk):
    def observation(self, state, rng, params=None):
        return state["place"]


class BroadcastItself(BroadcastWalk):
    observation = Itself.observation


both_walks = pytest.mark.parametrize("func_env", [Walk(), BroadcastWalk()], ids=["vmap", "broadcast"])
both_noisy = pytest.mark.parametrize("func_env", [Noisy(), BroadcastNoisy()], ids=["vmap", "broadcast"])


def play(env, td, actions):
    # All that comes out, copied at once.
    out = []
    for action in actions:
        transition, td = env.step(td.set("action", action))
        out.append(torch.stack([transition["next"].clone(), TensorDict({**transition["next"], **td}, td.batch_size).clone()]))
    return torch.stack(out), td


def some_actions(env, steps, seed=0):
    return torch.empty(steps, *env.action_space.shape).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))


def equal(one, other):
    return bool((one == other).all())


def buffers(env):
    return {name: buffer.clone() for name, buffer in env.named_buffers()}


def changed(env, before):
    return [name for name, buffer in env.named_buffers() if not torch.equal(buffer, before[name])]


# Dynamics.


@both_walks
def test_an_episode_is_as_computed_by_hand(func_env):
    env = FunctionalEnv(func_env, 2, max_episode_steps=3)
    td = env.reset(seed=0)
    assert td["observation"].tolist() == [[0, 0], [0, 0]]
    actions = [[2, 0.5], [1, 0.5], [-1, 2], [4, 1]]  # env 0: at 2, then at 3, the end, then afresh
    expected = [
        # next observation, reward, terminated, truncated, where to act
        ([[20, 0], [5, 0]], [2, 0.5], [False, False], [False, False], [[20, 0], [5, 0]]),
        ([[30, 20], [10, 5]], [-1, 0], [True, False], [False, False], [[0, 0], [10, 5]]),
        ([[-10, 0], [30, 10]], [-1, 1], [False, True], [False, True], [[-10, 0], [0, 0]]),
        ([[30, -10], [10, 0]], [5, 1], [True, False], [False, False], [[0, 0], [10, 0]]),
    ]
    for action, (successor, reward, terminated, truncated, now) in zip(actions, expected, strict=True):
        transition, td = env.step(td.set("action", torch.tensor(action, dtype=torch.float32).unsqueeze(-1)))
        following = transition["next"]
        assert following["observation"].tolist() == successor
        assert following["reward"].squeeze(-1).tolist() == reward
        assert following["terminated"].squeeze(-1).tolist() == terminated
        assert following["truncated"].squeeze(-1).tolist() == truncated
        assert torch.equal(following["done"], following["terminated"] | following["truncated"])
        assert td["observation"].tolist() == now


@pytest.mark.parametrize(
    "one, other", [(Walk, BroadcastWalk), (Noisy, BroadcastNoisy), (Nested, BroadcastNested), (Itself, BroadcastItself)]
)
def test_vmap_and_broadcasting_give_the_same(one, other):
    envs = [FunctionalEnv(func_env(), 5, max_episode_steps=7) for func_env in (one, other)]
    actions = some_actions(envs[0], 30)
    first, second = (play(env, env.reset(seed=4), actions)[0] for env in envs)
    assert equal(first, second)
    assert first["done"].any()


@pytest.mark.parametrize("limit", [1, 4, None])
@both_walks
def test_truncation_comes_at_the_limit(func_env, limit):
    env = FunctionalEnv(func_env, 3, max_episode_steps=limit)
    out, _ = play(env, env.reset(seed=0), torch.zeros(12, 3, 1))
    expected = [limit is not None and step % limit == 0 for step in range(1, 13)]
    assert out[:, 0]["truncated"].squeeze(-1).tolist() == [[each] * 3 for each in expected]


@both_walks
def test_reset_options_are_arguments_of_initial(func_env):
    env = FunctionalEnv(func_env, 2)
    assert env.reset(options={"start": 1.5})["observation"].tolist() == [[15, 15]] * 2
    assert env.reset(mask=torch.tensor([True, False]))["observation"].tolist() == [[0, 0], [15, 15]]


@both_walks
def test_an_unknown_reset_option_is_refused_and_nothing_has_changed(func_env):
    env = FunctionalEnv(func_env, 2)
    play(env, env.reset(seed=0), torch.ones(2, 2, 1))
    before = buffers(env)
    with pytest.raises(ValueError, match=r"reset needs options among \['start'\], but got \['begin'\]"):
        env.reset(seed=1, options={"begin": 1.5})
    assert changed(env, before) == []


def test_initial_state_is_written_to_in_place():
    env = FunctionalEnv(Walk(), 2)
    td = env.reset(seed=0)
    env.state["place"].copy_(torch.tensor([[1.0, 1.0], [-5.0, 0.0]]))
    transition, _ = env.step(td.set("action", torch.zeros(2, 1)))
    assert transition["next", "observation"].tolist() == [[10, 10], [-50, -50]]


# Randomness.


@pytest.mark.parametrize("num_envs", [1, 7, 64])
@both_noisy
def test_env_i_is_the_same_whatever_num_envs(func_env, num_envs):
    large, env = (FunctionalEnv(func_env, count, max_episode_steps=9) for count in (64, num_envs))
    actions = some_actions(large, 40)
    everything, _ = play(large, large.reset(seed=11), actions)
    out, _ = play(env, env.reset(seed=11), actions[:, :num_envs])
    assert equal(out, everything[:, :, :num_envs])


@both_noisy
def test_shards_by_first_index_are_the_whole(func_env):
    whole = FunctionalEnv(func_env, 8, max_episode_steps=9)
    actions = some_actions(whole, 40)
    everything, _ = play(whole, whole.reset(seed=11), actions)
    for first, count in ((0, 3), (3, 4), (7, 1)):
        shard = FunctionalEnv(func_env, count, max_episode_steps=9, first_index=first)
        out, _ = play(shard, shard.reset(seed=11), actions[:, first : first + count])
        assert equal(out, everything[:, :, first : first + count])


@both_noisy
def test_a_seed_and_the_same_actions_give_the_same_transitions_again(func_env):
    env = FunctionalEnv(func_env, 4, max_episode_steps=9)
    actions = some_actions(env, 40)
    first, _ = play(env, env.reset(seed=5), actions)
    again, _ = play(env, env.reset(seed=5), actions)
    other, _ = play(env, env.reset(seed=6), actions)
    assert equal(first, again)
    assert not (first["reward"] == other["reward"]).any()


@pytest.mark.parametrize("seeds", [(0, 2**32), (0, 2**63), (1, 2**32 + 1), (2**64 - 1, 2**32 - 1)])
def test_all_64_bits_of_a_seed_count(seeds):
    env = FunctionalEnv(Noisy(), 3)
    first, second = (env.reset(seed=seed)["observation"] for seed in seeds)
    assert not (first == second).any()


def test_without_a_seed_two_envs_differ():
    first, second = (FunctionalEnv(Noisy(), 3).reset()["observation"] for _ in range(2))
    assert not (first == second).any()


@both_noisy
def test_no_two_steps_episodes_or_envs_share_their_numbers(func_env):
    env = FunctionalEnv(func_env, 16, max_episode_steps=5)
    out, _ = play(env, env.reset(seed=0), torch.zeros(60, 16, 3))
    rewards = out[:, 0]["reward"].flatten()
    assert len(rewards.unique()) == len(rewards)


def test_the_functions_of_one_step_share_no_numbers():
    class Telling(BroadcastNoisy):
        def transition(self, state, action, rng, params=None):
            return {"place": random.uniform(rng, (3,))}

        def observation(self, state, rng, params=None):
            return torch.stack([state["place"][..., 0], random.uniform(rng, (1,))[..., 0], state["place"][..., 1]], -1)

        def reward(self, state, action, next_state, rng, params=None):
            return random.uniform(rng, (1,))[..., 0]

        def terminal(self, state, rng, params=None):
            return random.uniform(rng, (1,))[..., 0] < 0.5

    env = FunctionalEnv(Telling(), 5000)
    td = env.reset(seed=0)
    columns = [*td["observation"].unbind(-1)]
    following = env.step(td.set("action", torch.zeros(5000, 3)))[0]["next"]
    columns += [*following["observation"].unbind(-1), following["reward"][:, 0], following["terminated"][:, 0].float()]
    assert (torch.corrcoef(torch.stack(columns)) - torch.eye(8)).abs().max() < 0.08


@both_noisy
def test_a_partial_reset_leaves_the_other_envs_alone(func_env):
    env, untouched = (FunctionalEnv(func_env, 4, max_episode_steps=9) for _ in range(2))
    actions = some_actions(env, 20)
    _, td = play(env, env.reset(seed=5), actions[:3])
    before = td["observation"].clone()
    _, expected = play(untouched, untouched.reset(seed=5), actions[:3])
    td = env.reset(mask=torch.tensor([True, False, False, True]))
    assert equal(td["observation"][1:3], before[1:3])
    assert not (td["observation"][[0, 3]] == before[[0, 3]]).any()
    out, _ = play(env, td, actions[3:])
    reference, _ = play(untouched, expected, actions[3:])
    assert equal(out[:, :, 1:3], reference[:, :, 1:3])
    assert not (out[:, :, [0, 3]]["reward"] == reference[:, :, [0, 3]]["reward"]).all()


class Places(BroadcastWalk):
    def initial(self, rng, params=None, places=0.0):
        self.worlds = rng.env.tolist()
        return super().initial(rng, start=places)


def test_only_worlds_that_begin_anew_are_made():
    func_env = Places()
    env = FunctionalEnv(func_env, 4)
    td = env.reset()
    assert func_env.worlds == [0, 1, 2, 3]
    env.step(td.set("action", torch.tensor([[0.0], [3], [0], [3]])))
    assert func_env.worlds == [1, 3]
    func_env.worlds = None
    assert equal(env.reset(mask=torch.zeros(4, dtype=torch.bool)), td.select("observation"))
    assert func_env.worlds is None
    observation = env.reset(mask=torch.tensor([False, False, True, False]), options={"places": 7.0})["observation"]
    assert observation.tolist() == [[0, 0], [0, 0], [70, 70], [0, 0]]


def test_a_partial_reset_with_a_seed_begins_that_seeds_first_episode():
    env, fresh = FunctionalEnv(Noisy(), 4), FunctionalEnv(Noisy(), 4)
    _, td = play(env, env.reset(seed=5), torch.zeros(3, 4, 3))
    mask = torch.tensor([True, False, False, True])
    observation = env.reset(seed=8, mask=mask)["observation"]
    assert equal(observation[mask], fresh.reset(seed=8)["observation"][mask])
    assert equal(observation[~mask], td["observation"][~mask])


def test_sampled_actions_do_not_disturb_the_env():
    env, same = FunctionalEnv(Noisy(), 4), FunctionalEnv(Noisy(), 4)
    td, expected, actions = env.reset(seed=5), same.reset(seed=5), some_actions(env, 10)
    for action in actions:
        env.sample_action()
        transition, td = env.step(td.set("action", action))
        reference, expected = same.step(expected.set("action", action))
        assert equal(transition["next"], reference["next"])


# Snapshots.


def through_a_file(snapshot):
    file = io.BytesIO()
    torch.save(snapshot.to_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("carry", [lambda snapshot: snapshot, through_a_file], ids=["memory", "file"])
@pytest.mark.parametrize(
    "func_env", [Noisy(), BroadcastNoisy(), Nested(), Plain(), BroadcastItself()], ids=lambda f: type(f).__name__
)
def test_a_restored_env_continues_bit_for_bit(func_env, carry):
    env, other = (FunctionalEnv(func_env, 4, max_episode_steps=9) for _ in range(2))
    actions = some_actions(env, 30)
    _, td = play(env, env.reset(seed=5), actions[:7])
    snapshot = carry(env.snapshot())
    expected, _ = play(env, td, actions[7:])
    sampled = env.sample_action()
    for restored in (env, other):  # the same one, gone on; and one that has not even begun
        td_again = restored.restore(snapshot)
        assert equal(td_again["observation"], td["observation"])
        assert equal(play(restored, td_again, actions[7:])[0], expected)
        assert equal(restored.sample_action(), sampled)


def test_a_restored_stack_continues_bit_for_bit():
    def make():
        return tw.TransformedEnv(
            FunctionalEnv(Noisy(), 4), T.TimeLimit(5), T.NormalizeObservation(), T.FrameStackObservation(3)
        )

    env, other = make(), make()
    actions = some_actions(env, 30)
    _, td = play(env, env.reset(seed=5), actions[:7])
    snapshot = through_a_file(env.snapshot())
    expected, _ = play(env, td, actions[7:])
    assert equal(play(other, other.restore(snapshot), actions[7:])[0], expected)


def test_a_snapshot_is_not_changed_by_later_steps_nor_by_the_env_that_took_it_up():
    env = FunctionalEnv(Noisy(), 4)
    play(env, env.reset(seed=5), some_actions(env, 3))
    snapshot = env.snapshot()
    kept = snapshot.clone()
    td = env.restore(snapshot)
    td["observation"].zero_()
    play(env, td, some_actions(env, 9))
    assert equal(snapshot, kept)


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: FunctionalEnv(Noisy(), 5), ValueError, r"restore needs .* of shape \(4,.*\) .*, but got \(5,.*\)"),
        (lambda: FunctionalEnv(Noisy(), 1), ValueError, r"restore needs .* of shape \(4,.*\) .*, but got \(1,.*\)"),
        (lambda: FunctionalEnv(Walk(), 4), ValueError, "snapshot of the same env, but got one that differs in .*state_count"),
        (lambda: FunctionalEnv(CartPole(), 4), ValueError, "snapshot of the same env, but got one that differs in .*state_x"),
        (lambda: FunctionalEnv(Noisy(), 4), None, ""),
    ],
    ids=["more envs", "fewer envs", "another env", "cartpole", "same"],
)
def test_a_snapshot_of_another_env_is_refused_and_nothing_has_changed(make, error, match):
    env, given = FunctionalEnv(Noisy(), 4), make()
    play(env, env.reset(seed=5), some_actions(env, 3))
    given.reset(seed=1)
    before, snapshot = buffers(env), given.snapshot()
    if error is None:
        assert env.restore(snapshot).batch_size == (4,)
    else:
        with pytest.raises(error, match=match):
            env.restore(snapshot)
        assert changed(env, before) == []


@pytest.mark.parametrize("bad", [None, {}, {"buffers": {}, "observation": 1}, TensorDict({}, []), "snapshot.pt"])
def test_what_is_no_snapshot_is_refused(bad):
    env = FunctionalEnv(Noisy(), 2)
    with pytest.raises(
        (TypeError, ValueError), match=r"restore needs (what snapshot\(\) gave|a snapshot of the same env), but got"
    ):
        env.restore(bad)


def test_a_snapshot_with_a_field_of_another_dtype_is_refused_and_nothing_has_changed():
    env, double = FunctionalEnv(CartPole(), 2), FunctionalEnv(CartPole(dtype=torch.float64), 2)
    env.reset(seed=0)
    double.reset(seed=1)
    before = buffers(env)
    with pytest.raises(ValueError, match=r"needs state_x of shape \(2,\) torch.float32, but got \(2,\) torch.float64"):
        env.restore(double.snapshot())
    assert changed(env, before) == []


def test_a_snapshot_with_another_observation_is_refused_and_nothing_has_changed():
    env, other = FunctionalEnv(Walk(), 2), FunctionalEnv(Nested(), 2)
    env.reset(seed=0)
    play(other, other.reset(seed=1), torch.ones(2, 2, 1))
    before = buffers(env)
    with pytest.raises((TypeError, ValueError), match="observation"):
        env.restore(other.snapshot())
    assert changed(env, before) == []


def test_a_snapshot_needs_a_reset_first():
    with pytest.raises(RuntimeError, match=r"needs reset\(\) first, but got snapshot"):
        FunctionalEnv(Walk(), 2).snapshot()


def test_running_episodes_are_not_in_the_state_dict():
    env = FunctionalEnv(Noisy(), 4)
    env.reset(seed=0)
    assert env.state_dict() == {}


# Whose memory it is.


@pytest.mark.parametrize(
    "func_env", [Walk(), Itself(), BroadcastItself(), Nested(), Plain(), BroadcastNested()], ids=lambda f: type(f).__name__
)
def test_what_was_handed_out_is_never_changed(func_env):
    env = FunctionalEnv(func_env, 3, max_episode_steps=3)
    td, kept = env.reset(seed=0), []
    for action in some_actions(env, 10):
        kept.append((td["observation"], td["observation"].clone()))
        transition, td = env.step(td.set("action", action))
        kept.append((transition["next"], transition["next"].clone()))
    env.reset(mask=torch.tensor([True, False, True]))
    env.reset(seed=1)
    assert all(equal(handed_out, copied) for handed_out, copied in kept)


@pytest.mark.parametrize(
    "func_env", [Walk(), Itself(), BroadcastItself(), Nested(), Plain(), BroadcastNested()], ids=lambda f: type(f).__name__
)
def test_writing_into_what_was_handed_out_does_not_reach_the_env(func_env):
    env, same = (FunctionalEnv(func_env, 3, max_episode_steps=3) for _ in range(2))
    td, expected = env.reset(seed=0), same.reset(seed=0)
    for step, action in enumerate(some_actions(env, 10)):
        td.apply_(lambda leaf: leaf.fill_(77))
        if step % 4 == 2:
            mask = torch.tensor([False, True, False])
            td, expected = env.reset(mask=mask), same.reset(mask=mask)
            assert equal(td["observation"][mask], expected["observation"][mask])
            td.apply_(lambda leaf: leaf.fill_(77))
        transition, td = env.step(td.set("action", action.clone()))
        reference, expected = same.step(expected.set("action", action))
        assert equal(transition["next"], reference["next"])
        assert equal(td["observation"], expected["observation"])
        transition.apply_(lambda leaf: leaf.fill_(1))
    assert equal(env.snapshot()["buffers"], same.snapshot()["buffers"])


def test_writing_into_where_to_act_does_not_reach_the_transition():
    env = FunctionalEnv(Walk(), 2)
    transition, td = env.step(env.reset(seed=0).set("action", torch.ones(2, 1)))
    td["observation"].fill_(77)
    assert transition["next", "observation"].tolist() == [[10, 0]] * 2


def test_the_action_is_the_callers_and_may_be_changed_afterwards():
    class Remembering(BroadcastWalk):
        def initial(self, rng, params=None):
            return {"last": torch.zeros(*rng.env.shape, 1)}

        def transition(self, state, action, rng, params=None):
            return {"last": action}

        def observation(self, state, rng, params=None):
            return state["last"].expand(-1, 2)

        def reward(self, state, action, next_state, rng, params=None):
            return action[..., 0]

        def terminal(self, state, rng, params=None):
            return state["last"][..., 0] > 5

    env, action = FunctionalEnv(Remembering(), 2), torch.ones(2, 1)
    transition, _ = env.step(env.reset(seed=0).set("action", action))
    action.fill_(9)
    assert env.state["last"].tolist() == [[1], [1]]
    assert transition["next", "reward"].tolist() == [[1], [1]]
    assert transition["next", "observation"].tolist() == [[1, 1]] * 2


class Aliasing(FuncEnv):
    # Written the natural way: parts of the state are handed on as they are.
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def initial(self, rng, params=None):
        draw = random.uniform(rng)
        return {"now": draw * 0, "before": draw * 0 - 1, "prize": 1 + draw, "over": draw < 0}

    def transition(self, state, action, rng, params=None):
        return {"now": state["now"] + action[..., 0], "before": state["now"], "prize": state["prize"], "over": state["over"]}

    def observation(self, state, rng, params=None):
        return state["before"][..., None]

    def reward(self, state, action, next_state, rng, params=None):
        return state["prize"]

    def terminal(self, state, rng, params=None):
        return state["over"]


class BroadcastAliasing(Aliasing):
    broadcasts = True


class Last(Aliasing):
    def reward(self, state, action, next_state, rng, params=None):
        return state["now"]


class BroadcastLast(Last):
    broadcasts = True


@pytest.mark.parametrize("func_env", [Aliasing(), BroadcastAliasing()], ids=["vmap", "broadcast"])
def test_a_field_may_take_the_old_value_of_another(func_env):
    env = FunctionalEnv(func_env, 2)
    td = env.reset(seed=0)
    for now in (2, 4, 6):
        transition, td = env.step(td.set("action", torch.full((2, 1), 2.0)))
        assert transition["next", "observation"].tolist() == [[now - 2]] * 2
        assert env.state["now"].tolist() == [now] * 2
        assert env.state["before"].tolist() == [now - 2] * 2


@pytest.mark.parametrize("func_env", [Last(), BroadcastLast()], ids=["vmap", "broadcast"])
def test_a_reward_may_be_a_field_of_the_old_state(func_env):
    env = FunctionalEnv(func_env, 2)
    td = env.reset(seed=0)
    for reward in (0, 2, 4):
        transition, td = env.step(td.set("action", torch.full((2, 1), 2.0)))
        assert transition["next", "reward"].tolist() == [[reward]] * 2


@pytest.mark.parametrize("func_env", [Aliasing(), BroadcastAliasing()], ids=["vmap", "broadcast"])
def test_rewards_and_flags_that_are_fields_are_never_changed_later(func_env):
    env = FunctionalEnv(func_env, 2, max_episode_steps=2)
    td, kept = env.reset(seed=0), []
    for _ in range(5):
        prize = env.state["prize"].tolist()
        env.state["over"].zero_()
        transition, td = env.step(td.set("action", torch.zeros(2, 1)))
        kept.append((transition["next", "reward"], prize, transition["next", "terminated"]))
    env.state["over"].fill_(True)
    assert [reward.squeeze(-1).tolist() for reward, _, _ in kept] == [prize for _, prize, _ in kept]
    assert not any(terminated.any() for _, _, terminated in kept)


# What is refused.


def walk(**functions):
    return type("Odd", (Walk,), {name: staticmethod(function) for name, function in functions.items()})()


def broadcast_walk(**functions):
    return type("Odd", (BroadcastWalk,), {name: staticmethod(function) for name, function in functions.items()})()


@pytest.mark.parametrize(
    "func_env, match",
    [
        (walk(), None),
        (broadcast_walk(), None),
        (
            walk(observation=lambda state, rng: state["place"][:1]),
            r"Odd.observation needs to give of shape \(3, 2\).*\(3, 1\)",
        ),
        (walk(observation=lambda state, rng: state["place"].double()), "Odd.observation needs to give of dtype torch.float32"),
        (walk(observation=lambda state, rng: {"place": state["place"]}), "Odd.observation needs to give as a torch.Tensor"),
        (broadcast_walk(observation=lambda state, rng: state["place"][0]), r"Odd.observation .*\(3, 2\).*, but got \(2,\)"),
        (walk(reward=lambda state, action, next_state, rng: action), r"Odd.reward needs to give one scalar an env.*\(3, 1\)"),
        (broadcast_walk(reward=lambda state, action, next_state, rng: action.sum()), "Odd.reward needs to give one scalar"),
        (walk(reward=lambda state, action, next_state, rng: 1.0), "Odd.reward"),
        (broadcast_walk(reward=lambda state, action, next_state, rng: 1.0), "Odd.reward"),
        (walk(terminal=lambda state, rng: state["count"]), "Odd.terminal needs to give torch.bool, but got torch.int64"),
        (walk(terminal=lambda state, rng: state["place"] > 3), r"Odd.terminal needs to give one scalar an env.*\(3, 2\)"),
        (walk(terminal=lambda state, rng: False), "Odd.terminal"),
        (broadcast_walk(terminal=lambda state, rng: False), "Odd.terminal"),
        (
            walk(transition=lambda state, action, rng: {"place": state["place"]}),
            r"Odd.transition needs to give fields \['place', 'count'\], but got \['place'\]",
        ),
        (
            walk(transition=lambda state, action, rng: {**state, "more": state["count"]}),
            r"Odd.transition needs to give fields \['place', 'count'\], but got \['place', 'count', 'more'\]",
        ),
        (
            walk(transition=lambda state, action, rng: {**state, "count": state["count"] + 0.5}),
            r"Odd.transition needs to give 'count' of shape \(3,\) torch.int64, but got \(3,\) torch.float32",
        ),
        (
            walk(transition=lambda state, action, rng: {**state, "place": state["place"][:1]}),
            r"Odd.transition needs to give 'place' of shape \(3, 2\)",
        ),
        (walk(transition=lambda state, action, rng: state["place"]), "Odd.transition"),
        (walk(initial=lambda rng: torch.zeros(2)), "Odd.initial"),
        (walk(initial=lambda rng: {"place": torch.zeros(2), "count": 0}), "Odd.initial"),
        (broadcast_walk(initial=lambda rng: {"place": torch.zeros(3, 2), "count": torch.tensor(0)}), "Odd.initial.*'count'"),
        (
            broadcast_walk(initial=lambda rng: {"place": torch.zeros(3, 2), "count": torch.zeros(1).long()}),
            "Odd.initial.*'count'",
        ),
    ],
)
def test_a_function_that_does_not_fit_is_refused_by_name_where_the_env_is_built(func_env, match):
    if match is None:
        FunctionalEnv(func_env, 3).reset(seed=0)
    else:
        with pytest.raises((ValueError, TypeError), match=match):
            FunctionalEnv(func_env, 3)


def test_fields_may_come_back_in_another_order():
    env = FunctionalEnv(walk(transition=lambda state, action, rng: dict(reversed(state.items()))), 2)
    env.step(env.reset(seed=0).set("action", torch.zeros(2, 1)))


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"num_envs": 0}, "num_envs of at least 1, but got 0"),
        ({"num_envs": -1}, "num_envs of at least 1, but got -1"),
        ({"num_envs": True}, "num_envs of at least 1, but got True"),
        ({"num_envs": 2.0}, "num_envs of at least 1, but got 2.0"),
        ({"num_envs": 2, "max_episode_steps": 0}, "max_episode_steps of at least 1, but got 0"),
        ({"num_envs": 2, "max_episode_steps": -3}, "max_episode_steps of at least 1, but got -3"),
        ({"num_envs": 2, "max_episode_steps": 2.5}, "max_episode_steps of at least 1, but got 2.5"),
        ({"num_envs": 2, "first_index": -1}, "first_index of at least 0, but got -1"),
        ({"num_envs": 2, "first_index": 0.5}, "first_index of at least 0, but got 0.5"),
        ({"num_envs": 2, "device": "nope"}, "FunctionalEnv needs a device of PyTorch's, but got 'nope'"),
        ({"num_envs": 2, "max_episode_steps": 1, "first_index": 3}, None),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    if match is None:
        assert FunctionalEnv(Walk(), **arguments).num_envs == 2
    else:
        with pytest.raises((ValueError, TypeError), match=match):
            FunctionalEnv(Walk(), **arguments)


@pytest.mark.parametrize("func_env", [None, Walk, 3, object()], ids=repr)
def test_what_holds_no_functions_of_an_env_is_refused(func_env):
    with pytest.raises(TypeError, match="FunctionalEnv needs functions with observation_space and action_space, but got"):
        FunctionalEnv(func_env, 2)


@pytest.mark.parametrize(
    "action, error, match",
    [
        (torch.zeros(2), ValueError, r"an action of shape \(2, 1\)"),
        (torch.zeros(2, 1, dtype=torch.float64), TypeError, "dtype torch.float32"),
        (torch.zeros(1, 1), ValueError, r"an action of shape \(2, 1\)"),
        (None, ValueError, r'needs td\["action"\], but got a TensorDict with keys \[\]'),
    ],
)
def test_a_bad_action_is_refused_and_nothing_has_changed(action, error, match):
    env = FunctionalEnv(Walk(), 2)
    env.reset(seed=0)
    before = buffers(env)
    with pytest.raises(error, match=match):
        env.step(TensorDict({} if action is None else {"action": action}, []))
    assert changed(env, before) == []


def test_a_bad_seed_is_refused_and_nothing_has_changed():
    env = FunctionalEnv(Noisy(), 2)
    env.reset(seed=0)
    before = buffers(env)
    for seed in (-1, 1.5, True, 2**64, "0"):
        with pytest.raises(ValueError, match=r"reset needs a seed that is an integer in \[0, 2\*\*64\), but got"):
            env.reset(seed=seed)
    assert changed(env, before) == []


def test_a_bad_mask_is_refused_and_nothing_has_changed():
    env = FunctionalEnv(Noisy(), 2)
    env.reset(seed=0)
    before = buffers(env)
    for mask in ([True, False], torch.ones(2), torch.ones(3, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"reset needs a mask of shape \(2,\) torch.bool on cpu, but got"):
            env.reset(seed=1, mask=mask)
    assert changed(env, before) == []


def test_step_and_a_partial_reset_need_a_reset_first():
    env = FunctionalEnv(Walk(), 2)
    with pytest.raises(RuntimeError, match=r"needs reset\(\) first, but got step"):
        env.step(TensorDict({"action": torch.zeros(2, 1)}, [2]))
    with pytest.raises(RuntimeError, match="needs a first reset of every env"):
        env.reset(mask=torch.tensor([True, False]))


def test_the_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    env = FunctionalEnv(Noisy(), 2, max_episode_steps=2)
    td = env.reset(seed=0)
    for _ in range(3):
        _, td = env.step(td.set("action", env.sample_action()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("func_env", [Noisy(), BroadcastNoisy()], ids=["vmap", "broadcast"])
def test_on_cuda_the_trajectory_is_that_of_the_cpu(func_env):
    env, same = FunctionalEnv(func_env, 8, device="cuda", max_episode_steps=9), FunctionalEnv(func_env, 8, max_episode_steps=9)
    actions = some_actions(same, 40)
    out, _ = play(env, env.reset(seed=11), actions.cuda())
    expected, _ = play(same, same.reset(seed=11), actions)
    assert equal(out["reward"].cpu(), expected["reward"])
    assert equal(out["done"].cpu(), expected["done"])
    assert torch.allclose(out["observation"].cpu(), expected["observation"], atol=1e-5)


class Constant(Walk):
    def __init__(self):
        super().__init__()
        self.goal = torch.zeros(2)

    def reward(self, state, action, next_state, rng, params=None):
        return torch.ones(())

    def terminal(self, state, rng, params=None):
        return torch.zeros((), dtype=torch.bool)

    def observation(self, state, rng, params=None):
        return self.goal


def test_what_functions_give_again_and_again_is_handed_out_as_new_tensors():
    env = FunctionalEnv(Constant(), 3)
    td = env.reset(seed=0)
    td["observation"].add_(5)
    transition, _ = env.step(td.set("action", env.sample_action()))
    following = transition["next"]
    for key in ("reward", "terminated", "observation"):
        following[key][0] = 1
        assert not following[key][1].any() or key == "reward"
    assert env.func_env.goal.tolist() == [0, 0] and following["observation"][1:].eq(0).all()


class BroadcastConstant(Constant):
    broadcasts = True

    def initial(self, rng, params=None, start=0.0):
        n = len(rng.env)
        self.goals = torch.zeros(n, 2)
        return {"place": torch.zeros(n, 2) + start, "count": torch.zeros(n, dtype=torch.int64)}

    def transition(self, state, action, rng, params=None):
        return {"place": state["place"] + action, "count": state["count"] + 1}

    def observation(self, state, rng, params=None):
        return self.goals

    def reward(self, state, action, next_state, rng, params=None):
        return torch.ones(len(action))

    def terminal(self, state, rng, params=None):
        return torch.zeros(len(state["count"]), dtype=torch.bool)


def test_a_tensor_that_an_env_keeps_and_gives_each_time_stays_its_own():
    env = FunctionalEnv(BroadcastConstant(), 3)
    td = env.reset(seed=0)
    goals = env.func_env.goals
    td["observation"].add_(5)
    transition, _ = env.step(td.set("action", env.sample_action()))
    transition["next", "observation"].add_(5)
    assert (goals == 0).all() and (env.func_env.goals == 0).all()


# Worlds that differ.


class Falling(FuncEnv):
    # One world; how fast it falls is its own.
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def initial(self, rng, params=None):
        return {"height": params["from"][0] + random.uniform(rng)}

    def transition(self, state, action, rng, params=None):
        return {"height": state["height"] - params["gravity"]}

    def observation(self, state, rng, params=None):
        return state["height"].reshape(1)

    def reward(self, state, action, next_state, rng, params=None):
        return params["gravity"]

    def terminal(self, state, rng, params=None):
        return state["height"] < 0


class BroadcastFalling(Falling):
    broadcasts = True

    def initial(self, rng, params=None):
        return {"height": params["from"][:, 0] + random.uniform(rng)}

    def observation(self, state, rng, params=None):
        return state["height"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params=None):
        return params["gravity"].clone()


def different(n, first=0):
    return {"gravity": torch.arange(first, first + n) + 1.0, "from": 10 * torch.ones(n, 1)}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("func_env", [Falling(), BroadcastFalling()], ids=["vmap", "broadcast"])
def test_each_world_has_params_of_its_own(func_env, compiled):
    env = FunctionalEnv(func_env, 4, params=different(4))
    alone = [FunctionalEnv(func_env, 1, first_index=row, params=different(1, row)) for row in range(4)]
    env = tw.compile(env, backend="aot_eager") if compiled else env
    actions = torch.zeros(20, 4, dtype=torch.int64)
    together, _ = play(env, env.reset(seed=1), actions)
    for row, one in enumerate(alone):
        assert equal(together[:, :, row], play(one, one.reset(seed=1), actions[:, [row]])[0][:, :, 0])
    assert together[0, 0]["reward"].flatten().tolist() == [1, 2, 3, 4]
    env.params["gravity"].fill_(7)
    assert play(env, env.reset(), actions[:1])[0][0, 0]["reward"].flatten().tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"params": {"gravity": 9.8}}, r"params\['gravity'\] as a tensor \(4, ...\), but got float"),
        ({"params": {"gravity": torch.ones(3)}}, r"params\['gravity'\] as a tensor \(4, ...\), but got \(3,\)"),
        ({"params": different(4), "reset_pool": 8}, "a reset_pool of 0 where worlds differ in params, but got both"),
        ({"reset_pool": -1}, "reset_pool of at least 0, but got -1"),
    ],
)
def test_wrong_params_and_pools_are_refused(arguments, words):
    with pytest.raises(ValueError, match=f"FunctionalEnv needs {words}"):
        FunctionalEnv(Falling(), 4, **arguments)


# First states that are held ready.


class Once(Walk):
    # First states are numbers that tell when they were drawn.
    def initial(self, rng, params=None):
        return {"place": random.uniform(rng, (2,)), "count": rng.episode * 1000 + rng.env}


@pytest.mark.parametrize("compiled", [False, True])
def test_episodes_begin_in_states_of_the_pool_which_are_drawn_anew(compiled):
    env = FunctionalEnv(Once(), 6, max_episode_steps=2, reset_pool=512)
    env = tw.compile(env, backend="aot_eager") if compiled else env
    td, begun = env.reset(seed=0), [env.state["count"].clone()]
    for _ in range(300):
        transition, td = env.step(td.set("action", torch.zeros(6, 1)))
        if transition["next", "done"].any():
            begun.append(env.state["count"].clone())
    begun = torch.stack(begun)
    turns, slots = begun // 1000, begun % 1000
    assert slots.max() < 512 and len(slots.unique()) > 400  # of 906 draws
    assert (turns[0] == 0).all() and turns[-1].unique().tolist() == [1, 2]  # two slots a step, so 256 steps for all
    assert env.pool.turns.sum() == 600


@pytest.mark.parametrize("compiled", [False, True])
def test_worlds_with_a_pool_do_not_depend_on_each_other(compiled):
    actions = some_actions(FunctionalEnv(Noisy(), 5), 30)
    whole = FunctionalEnv(Noisy(), 5, reset_pool=16)
    whole = tw.compile(whole, backend="aot_eager") if compiled else whole
    together, _ = play(whole, whole.reset(seed=3), actions)
    for row in range(5):
        one = FunctionalEnv(Noisy(), 1, reset_pool=16, first_index=row)
        assert equal(together[:, :, row], play(one, one.reset(seed=3), actions[:, [row]])[0][:, :, 0])


def test_a_pool_is_part_of_a_snapshot_and_begins_anew_with_a_seed():
    env = FunctionalEnv(Noisy(), 4, reset_pool=8)
    actions = some_actions(env, 40)
    once, _ = play(env, env.reset(seed=2), actions)
    _, td = play(env, env.reset(seed=2), actions[:9])
    snapshot = env.snapshot()
    play(env, td, actions)
    again, _ = play(env, env.restore(snapshot), actions[9:])
    assert equal(once[9:], again)
    other, _ = play(env, env.reset(seed=5), actions)
    assert not equal(once, other)


def test_options_go_past_the_pool():
    env = FunctionalEnv(Walk(), 3, reset_pool=4)
    assert equal(env.reset(options={"start": 2.0})["observation"], torch.full((3, 2), 20.0))


# What does not work is explained.


class GlobalNumbers(Walk):
    def transition(self, state, action, rng, params=None):
        return {**super().transition(state, action, rng), "place": torch.rand(2)}


class BroadcastGlobalNumbers(BroadcastWalk):
    def initial(self, rng, params=None):
        return {**super().initial(rng), "place": torch.rand(*rng.env.shape, 2)}


class Branching(Walk):
    def reward(self, state, action, next_state, rng, params=None):
        return torch.zeros(()) if state["place"][0] > 0 else torch.ones(())


@pytest.mark.parametrize(
    ("func_env", "words"),
    [
        (GlobalNumbers, "GlobalNumbers.transition needs to draw from its rng, but got RuntimeError"),
        (BroadcastGlobalNumbers, "BroadcastGlobalNumbers.initial needs to draw from its rng, but got PyTorch's global"),
        (Branching, "Branching.reward needs tensor operators, torch.where instead of `if`, but got RuntimeError"),
    ],
)
def test_what_cannot_be_batched_is_explained_at_construction(func_env, words):
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=words):
        FunctionalEnv(func_env(), 3)
    assert torch.equal(torch.get_rng_state(), before)
