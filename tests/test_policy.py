"""PolicyState: the state of a recurrent policy in steps, chunks, graphs and snapshots."""

import numpy as np
import pytest
import torch
from catalogue import NUM_ENVS, StatefulRnn
from helpers import assert_same, from_reset, through_file
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

SIZE = 4
HIDDEN = ("next", "hidden")


class Recurrent(nn.Module):
    """A GRU whose action and state depend on everything since the start of the episode."""

    def __init__(self, env):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(env.single_observation_space.shape[0], SIZE)
        self.head = nn.Linear(SIZE, env.single_action_space.shape[0])

    def forward(self, td):
        hidden = self.cell(td["observation"] / 1000, td["hidden"])
        return td.set(
            "action",
            self.head(hidden).tanh(),
        ).set(HIDDEN, hidden)


def make(num_envs=NUM_ENVS, **kwargs):
    # Lengths 5, 3, 1, 4 are staggered and end in all three ways; the first index shifts them.
    transforms = T.NormalizeObservation(), tw.PolicyState({"hidden": (SIZE,)})
    return tw.TransformedEnv(
        ScriptedEnv(num_envs, (2,), **kwargs),
        *transforms,
    )


def by_hand(policy, num_steps, first_index):
    """A bare env alone, in a Python loop that carries the state itself."""
    env = ScriptedEnv(1, (2,), first_index=first_index)
    td = env.reset(seed=0)
    hidden = torch.zeros(1, SIZE)
    is_init = torch.ones(1, 1, dtype=torch.bool)
    rows = []
    for _ in range(num_steps):
        td = policy(td.set("hidden", hidden))
        row = TensorDict(
            {"hidden": hidden, "is_init": is_init, "action": td["action"]},
            [1],
        )
        hidden = td.pop(HIDDEN)
        rows.append(row.set(HIDDEN, hidden))
        transition, td = env.step(td["action"])
        is_init = transition["next", "done"]
        hidden = torch.where(is_init, 0, hidden)
    return torch.cat(rows)


COMPILED = pytest.param(True, marks=pytest.mark.full, id="compiled")
eager_and_compiled = pytest.mark.parametrize("is_compiled", [False, COMPILED])


@eager_and_compiled
@torch.no_grad()
def test_chunks_equal_a_python_loop_over_single_envs(is_compiled):
    env = tw.TransformedEnv(
        ScriptedEnv(NUM_ENVS, (2,)),
        tw.PolicyState({"hidden": (SIZE,)}),
    )
    policy = Recurrent(env)
    collect = tw.Collector(env, policy, num_steps=7)
    if is_compiled:
        tw.compile(collect, backend="aot_eager")
    env.reset(seed=0)
    chunks = []
    for _ in range(3):
        start = env.root["hidden"].clone()
        data = collect()
        assert (data["hidden"][:, 0] == start).all()  # the state at the boundary of the chunk
        chunks.append(data.contiguous())
    data = torch.cat(chunks, 1)
    assert data["next", "done"].any(1).all() and data["next", "done"].float().mean() < 0.9
    for row in range(NUM_ENVS):
        expected = by_hand(policy, 21, row)
        assert_same(
            data[row].select("hidden", "is_init", "action", HIDDEN),
            expected,
            2e-6,
        )


class AddAction(T.Transform):
    taken = tw.EnvBuffer((1,))

    def action(self, action):
        self.taken.copy_(action)
        return action

    def step(self, td):
        return td.set("reward", self.taken.clone())


@torch.no_grad()
def test_evaluate_carries_the_state():
    def policy(td):
        td["next", "count"] = td["count"] + 1
        return td.set("action", td["count"].unsqueeze(-1))

    space = tw.make("Pendulum-v1").single_action_space
    env = ScriptedEnv(3, action_space=space)
    env = tw.TransformedEnv(
        env,
        tw.PolicyState({"count": ()}),
        AddAction(),
    )
    found = tw.evaluate(env, policy, 6, seed=0)
    lengths = found["episode_length"]
    assert len(set(lengths.tolist())) > 1
    sums = lengths * (lengths - 1) / 2  # 0 + 1 + ... + (length - 1)
    assert (found["episode_return"] == sums.float()).all()


@torch.no_grad()
def test_partial_reset_starts_the_state_over_in_its_rows():
    env = make(3, episode_lengths=None)
    _, td = env.step(Recurrent(env)(env.reset(seed=0)))
    before = td["hidden"].clone()
    assert not td["is_init"].any()
    td = env.reset(mask=torch.tensor([False, True, False]))
    assert (td["hidden"][1] == 0).all() and (td["hidden"][[0, 2]] == before[[0, 2]]).all()
    assert td["is_init"].flatten().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "compiled",
    [False, True],
    ids=["eager", "compiled"],
)
@torch.no_grad()
def test_step_without_reset_keeps_the_state_until_the_reset(compiled):
    env = make(2, episode_lengths=1)
    policy = Recurrent(env)
    if compiled:
        tw.compile(env, backend="eager")
    transition, td = env.step_without_reset(policy(env.reset(seed=0)))
    assert (td["hidden"] == transition[HIDDEN]).all() and (td["hidden"] != 0).any()
    assert not td["is_init"].any()
    td = env.reset(mask=transition["next", "done"].squeeze(-1))
    assert (td["hidden"] == 0).all() and td["is_init"].all()


@torch.no_grad()
def test_snapshot_continues_the_state():
    env = make()
    policy = Recurrent(env)
    from_reset(tw.Collector(env, policy, 5))
    snapshot = through_file(env.snapshot())
    expected = tw.rollout(env, policy, 5)
    other = make()
    other.restore(snapshot)["hidden"].fill_(9)
    other.restore(snapshot)
    found = tw.rollout(other, policy, 5)
    assert_same(found, expected)


def test_state_with_gradient_does_not_reach_the_root():
    env = make()
    transition, td = env.step(Recurrent(env)(env.reset(seed=0)))
    assert not td["hidden"].requires_grad and not transition[HIDDEN].requires_grad


def test_snapshot_of_a_root_with_a_learned_state_keeps_no_graph():
    env = tw.TransformedEnv(ScriptedEnv(2), tw.PolicyState({"hidden": (3,)}))
    td = env.reset()
    td["hidden"] = torch.nn.Parameter(torch.ones(3)).expand(2, 3)
    snapshot = env.snapshot()
    assert not snapshot["hidden"].requires_grad
    assert torch.equal(snapshot["hidden"], torch.ones(2, 3))


def test_bare_and_random_actions_leave_the_state_as_it_is():
    env = make(2, episode_lengths=None)
    td = env.reset(seed=0)
    td["hidden"].fill_(3)
    transition, td = env.step(env.sample_action())
    assert (td["hidden"] == 3).all()
    td["is_init"].fill_(True)
    assert not transition["next", "done"].any()
    data = tw.rollout(env, None, 2)
    assert (data[HIDDEN] == 3).all() and (env.root["hidden"] == 3).all()


def test_state_starts_over_at_its_own_fill_and_keeps_its_dtype():
    env = tw.make("CartPole-v1", 1, max_episode_steps=2)
    env = tw.TransformedEnv(
        env,
        tw.PolicyState(
            {"count": (2,)},
            torch.int64,
            -3,
        ),
    )
    env = tw.make(env.spec)
    td = env.reset()
    seen = []
    for _ in range(4):
        seen.append(td["count"][0].tolist())
        td["action"] = env.sample_action()
        td["next", "count"] = td["count"] + 1
        _, td = env.step(td)
    assert (
        seen
        == [
            [-3, -3],
            [-2, -2],
            [-3, -3],
            [-2, -2],
        ]
        and td["count"].dtype == torch.int64
    )


@torch.no_grad()
@eager_and_compiled
def test_state_travels_without_being_kept(is_compiled):
    env = make()
    other = make()
    policy = Recurrent(env)
    keys = ["action", ("next", "done")]
    collect = tw.Collector(env, policy, 5, keys=keys)
    if is_compiled:
        tw.compile(collect, backend="eager")
    env.reset(seed=0)
    other.reset(seed=0)
    for _ in range(3):
        data = collect()
        expected = tw.rollout(other, policy, 5)
        assert set(data.keys(True, True)) == set(keys)
        assert_same(data, expected.select(*keys), 2e-6)
        assert_same(env.root, other.root, 2e-6)


# Refusals.


def test_name_declared_twice_raises():
    states = tw.PolicyState({"hidden": (1,)}), tw.PolicyState({"hidden": (2,)})
    with pytest.raises(ValueError, match=r"transforms\[1\].*hidden"):
        tw.TransformedEnv(ScriptedEnv(2), *states)


RIGHT = torch.zeros(NUM_ENVS, SIZE)
WRONG_STATES = {
    "missing": {},
    "shape": {"hidden": torch.zeros(NUM_ENVS, SIZE + 1)},
    "dtype": {"hidden": RIGHT.double()},
    "sparse": {"hidden": RIGHT.to_sparse()},
    "undeclared": {"hidden": RIGHT, "cell": RIGHT},
}


@pytest.mark.parametrize("following", WRONG_STATES.values(), ids=WRONG_STATES)
def test_wrong_state_raises_before_anything_changes(following):
    env = make()
    td = env.reset(seed=0).set("action", env.sample_action())
    before = env.snapshot()
    update = {"action": td["action"]}
    if following:
        update["next"] = TensorDict(following, [NUM_ENVS])
    with pytest.raises(ValueError, match="hidden"):
        env.step(td.update(update))
    assert_same(env.snapshot(), before)
    with pytest.raises(ValueError, match="hidden"):
        tw.Collector(
            make(),
            lambda td: td.update(update),
            2,
        )()


def test_undeclared_state_in_a_root_or_of_a_policy_raises():
    env = ScriptedEnv(NUM_ENVS, (2,))

    def policy(td):
        return td.set("action", env.sample_action()).set(HIDDEN, td["observation"])

    with pytest.raises(ValueError, match=r"hidden.*PolicyState"):
        tw.Collector(env, policy, 2)()


# State that the policy keeps itself.


@torch.no_grad()
def test_evaluate_of_a_policy_with_state_of_its_own_raises():
    with pytest.raises(ValueError, match="PolicyState"):
        tw.evaluate(ScriptedEnv(NUM_ENVS, (2,)), StatefulRnn(2, 6), NUM_ENVS)


def layers(*modules):
    network = nn.Sequential(*modules)
    return nn.Sequential(Observed(), network)


class Observed(nn.Module):
    def forward(self, td):
        return td["observation"]


def sampling():
    """Draws its weights in the first call, and an action in each."""
    network = nn.LazyLinear(6)
    return lambda td: torch.normal(network(td["observation"]), 1.0)


STATELESS = {
    "batch norm": lambda: layers(nn.BatchNorm1d(2), nn.LazyLinear(6)),
    "samples": sampling,
}


@pytest.mark.parametrize("make_policy", STATELESS.values(), ids=STATELESS)
def test_evaluate_of_a_policy_without_state_of_an_episode_runs(make_policy):
    result = tw.evaluate(ScriptedEnv(NUM_ENVS, (2,)), make_policy(), NUM_ENVS)
    assert len(result) == NUM_ENVS


def test_collector_with_batch_norm_learns_its_statistics():
    policy = layers(nn.BatchNorm1d(2, momentum=None), nn.Linear(2, 6))
    data = tw.rollout(ScriptedEnv(NUM_ENVS, (2,)), policy, 5)
    mean = data["observation"].numpy().mean((0, 1), dtype=np.float64)
    np.testing.assert_allclose(policy[1][0].running_mean, mean, rtol=1e-6)
