"""PolicyState: the state of a recurrent policy in steps, chunks, graphs, evaluations and snapshots."""

import pytest
import torch
from catalogue import NUM_ENVS
from helpers import through_file
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

SIZE = 4


class Recurrent(nn.Module):
    """A GRU whose action and state depend on everything since the start of the episode."""

    def __init__(self, env):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(env.single_observation_space.shape[0], SIZE)
        self.head = nn.Linear(SIZE, env.single_action_space.shape[0])

    def forward(self, td):
        hidden = self.cell(td["observation"] / 1000, td["hidden"])
        td["action"] = self.head(hidden).tanh()
        td["next", "hidden"] = hidden
        return td


def make(num_envs=NUM_ENVS, **kwargs):
    # Lengths 5, 3, 1, 4 are staggered and end in all three ways; the first index shifts them.
    transforms = T.NormalizeObservation(), tw.PolicyState({"hidden": (SIZE,)})
    return tw.TransformedEnv(ScriptedEnv(num_envs, (2,), **kwargs), *transforms)


def by_hand(policy, num_steps, first_index):
    """One env at a time, with a bare env, a Python loop, and a state that the loop carries itself."""
    env = tw.TransformedEnv(ScriptedEnv(1, (2,), first_index=first_index)).eval()
    hidden, observation = torch.zeros(1, SIZE), env.reset(seed=0)["observation"]
    rows, is_init = [], True
    for _ in range(num_steps):
        td = policy(TensorDict({"observation": observation, "hidden": hidden}, [1]))
        transition, root = env.step(td["action"])
        done = bool(transition["next", "done"])
        rows.append((td["action"], hidden, td["next", "hidden"], is_init))
        hidden = torch.zeros(1, SIZE) if done else td["next", "hidden"]
        observation, is_init = root["observation"], done
    action, before, after, first = zip(*rows, strict=True)
    return torch.cat(action), torch.cat(before), torch.cat(after), torch.tensor(first)


@pytest.mark.parametrize(
    "unroll",
    [None, 1, pytest.param(3, marks=pytest.mark.full)],
    ids=["eager", "compiled", "unrolled"],
)
@torch.no_grad()
def test_chunks_equal_a_python_loop_over_single_envs(unroll):
    env = tw.TransformedEnv(ScriptedEnv(NUM_ENVS, (2,)), tw.PolicyState({"hidden": (SIZE,)}))
    policy = Recurrent(env)
    collect = tw.Collector(env, policy, num_steps=7)
    if unroll:
        tw.compile(collect, backend="aot_eager", unroll=unroll)
    td = env.reset(seed=0)
    chunks = []
    for _ in range(3):
        start = td["hidden"].clone()
        data, td = collect(td)
        assert (data["hidden"][:, 0] == start).all()  # the state at the boundary of the chunk
        chunks.append(data.clone())
    data = torch.cat([chunk.contiguous() for chunk in chunks], 1)
    assert data["next", "done"].any(1).all() and data["next", "done"].float().mean() < 0.9
    for row in range(NUM_ENVS):
        action, before, after, first = by_hand(policy, 21, row)
        torch.testing.assert_close(data["action"][row], action)
        torch.testing.assert_close(data["hidden"][row], before)
        torch.testing.assert_close(data["next", "hidden"][row], after)
        assert (data["is_init"][row, :, 0] == first).all()


@torch.no_grad()
def test_evaluate_carries_the_state():
    class Counts(nn.Module):
        def forward(self, td):
            td["next", "count"] = td["count"] + 1
            return td.set("action", td["count"].unsqueeze(-1))

    transforms = (
        tw.PolicyState({"count": ()}),
        T.TransformReward(lambda reward: 0 * reward),
        AddAction(),
    )
    env = tw.TransformedEnv(
        ScriptedEnv(3, action_space=tw.make("Pendulum-v1").single_action_space), *transforms
    )
    found = tw.evaluate(env, Counts(), 6, seed=0)
    lengths = found["episode_length"]
    assert len(set(lengths.tolist())) > 1
    assert (
        found["episode_return"] == (lengths * (lengths - 1) / 2).float()
    ).all()  # 0 + 1 + ... + (length - 1)


class AddAction(T.Transform):
    taken = tw.EnvBuffer((1,))

    def action(self, action):
        self.taken.copy_(action)
        return action

    def step(self, td):
        return td.set("reward", td["reward"] + self.taken)


@torch.no_grad()
def test_partial_reset_starts_the_state_over_in_its_rows():
    env = make(3, episode_lengths=None)
    policy = Recurrent(env)
    _, td = env.step(policy(env.reset(seed=0)))
    before = td["hidden"].clone()
    assert not td["is_init"].any()
    td = env.reset(mask=torch.tensor([False, True, False]))
    assert (td["hidden"][1] == 0).all() and (td["hidden"][[0, 2]] == before[[0, 2]]).all()
    assert td["is_init"].flatten().tolist() == [False, True, False]


@torch.no_grad()
def test_transition_without_reset_keeps_the_state_until_the_reset():
    env = make(2, episode_lengths=1)
    policy = Recurrent(env)
    transition, td = env.step_without_reset(policy(env.reset(seed=0)))
    assert (td["hidden"] == transition["next", "hidden"]).all() and (td["hidden"] != 0).any()
    td = env.reset(mask=transition["next", "done"].squeeze(-1))
    assert (td["hidden"] == 0).all() and td["is_init"].all()


@torch.no_grad()
def test_snapshot_continues_the_state():
    env = make()
    policy = Recurrent(env)
    _, td = tw.rollout(env, policy, 5, env.reset(seed=0))
    snapshot = through_file(env.snapshot())
    expected, _ = tw.rollout(env, policy, 5, td)
    other = make()
    other.restore(snapshot)["hidden"].fill_(9)  # which is the caller's
    found, _ = tw.rollout(other, policy, 5, other.restore(snapshot))
    for key in ("hidden", "is_init", "action", ("next", "observation")):
        assert (found[key] == expected[key]).all()
    for name, size, message in (
        ("other", SIZE, r"differs in \['hidden', 'other'\]"),
        ("hidden", 2, "hidden of shape"),
    ):
        another = tw.TransformedEnv(
            ScriptedEnv(NUM_ENVS, (2,)), T.NormalizeObservation(), tw.PolicyState({name: (size,)})
        )
        with pytest.raises(ValueError, match=message):
            another.restore(env.snapshot())


def test_state_with_gradient_does_not_reach_the_root():
    env = make()
    transition, td = env.step(Recurrent(env)(env.reset(seed=0)))
    assert not td["hidden"].requires_grad and not transition["next", "hidden"].requires_grad


def test_bare_and_random_actions_leave_the_state_as_it_is():
    env = make(2, episode_lengths=None)
    td = env.reset(seed=0)
    td["hidden"].fill_(3)
    transition, td = env.step(env.sample_action())
    assert (td["hidden"] == 3).all()
    td["is_init"].fill_(True)  # which is the caller's
    assert not transition["next", "done"].any()
    data, td = tw.rollout(env, None, 2, td)
    assert (data["next", "hidden"] == 3).all() and (td["hidden"] == 3).all()


# Refusals.


def test_name_declared_twice_raises():
    with pytest.raises(ValueError, match=r"transforms\[1\].*\['hidden'\]"):
        tw.TransformedEnv(
            ScriptedEnv(2), tw.PolicyState({"hidden": (1,)}), tw.PolicyState({"hidden": (2,)})
        )


def test_wrong_state_raises_before_anything_changes():
    env, right = make(), torch.zeros(NUM_ENVS, SIZE)
    td = env.reset(seed=0).set("action", env.sample_action())
    before = env.snapshot()
    for following, message in (
        ({}, r'set it with `td\["next", "hidden"\] = ...`'),
        (
            {"hidden": torch.zeros(NUM_ENVS, SIZE + 1)},
            r"of shape \(5, 4\) torch.float32, but got \(5, 5\)",
        ),
        ({"hidden": right.double()}, "torch.float64"),
        ({"hidden": right, "cell": right}, r"\['cell', 'hidden'\].*PolicyState"),
    ):
        update = {
            "action": td["action"],
            **({"next": TensorDict(following, [NUM_ENVS])} if following else {}),
        }
        with pytest.raises(ValueError, match=message):
            env.step(td.exclude("next").update(update))
        assert (env.snapshot() == before).all(), message
        with pytest.raises(ValueError, match=message):
            tw.Collector(make(), lambda given, update=update: given.update(update), 2)()


def test_policy_of_an_env_without_declaration_is_told_to_declare():
    env = ScriptedEnv(NUM_ENVS, (2,))
    with pytest.raises(TypeError, match=r"hidden.*with PolicyState"):
        tw.Collector(env, Recurrent(env), 2)()
    with pytest.raises(ValueError, match=r"\['hidden'\].*no step would carry on.*PolicyState"):
        tw.Collector(env, None, 2)(env.reset().set("hidden", torch.zeros(NUM_ENVS, SIZE)))
    with pytest.raises(ValueError, match=r"\['hidden'\].*PolicyState"):
        tw.Collector(
            env,
            lambda td: td.update(
                {"action": env.sample_action(), "next": {"hidden": td["observation"]}}
            ),
            2,
        )()


def test_state_starts_over_at_its_own_fill_and_keeps_its_dtype():
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 1, max_episode_steps=2),
        tw.PolicyState({"count": (2,)}, torch.int64, -3),
    )
    env = tw.make(env.spec)
    td, seen = env.reset(), []
    for _ in range(4):
        seen.append(td["count"][0].tolist())
        td["action"], td["next", "count"] = env.sample_action(), td["count"] + 1
        _, td = env.step(td)
    assert seen == [[-3, -3], [-2, -2], [-3, -3], [-2, -2]] and td["count"].dtype == torch.int64


def test_adapters_refuse_an_env_that_carries_the_state_of_a_policy():
    with pytest.raises(
        ValueError,
        match="to_gymnasium needs an env without PolicyState, because trainers carry the state",
    ):
        tw.to_gymnasium(make())


@torch.no_grad()
@pytest.mark.parametrize("unroll", [None, pytest.param(2, marks=pytest.mark.full)])
def test_state_travels_without_being_kept(unroll):
    env, other = make(), make()
    policy, keys = Recurrent(env), ["action", ("next", "done")]
    collect = tw.Collector(env, policy, 5, keys=keys)
    if unroll:
        tw.compile(collect, backend="eager", unroll=unroll)
    td, other_td = env.reset(seed=0), other.reset(seed=0)
    for _ in range(3):
        data, td = collect(td)
        expected, other_td = tw.rollout(other, policy, 5, other_td)
        assert set(data.keys(True, True)) == set(keys)
        torch.testing.assert_close(data["action"], expected["action"])
        torch.testing.assert_close(td["hidden"], other_td["hidden"])
        assert (td["is_init"] == other_td["is_init"]).all()
