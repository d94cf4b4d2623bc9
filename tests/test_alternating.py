"""AlternatingCollector: what it collects is what each group's own Collector does, whatever the groups' steps take."""

from __future__ import annotations

import functools
import threading
import time
from _thread import interrupt_main

import pytest
import torch
from gymnasium import spaces
from helpers import Held, assert_same
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.alternating import AlternatingCollector
from torchwrap.testing import ScriptedEnv

PATIENCE = 10.0  # seconds, after which a test that waits for another thread fails


class Scripted(ScriptedEnv):
    """As if a simulator on the host stepped it."""

    host_stepped = True


def scripted(num_envs, first_index=0, **kwargs):
    return Scripted(num_envs, (3,), (2, 3), first_index=first_index, **kwargs)


def cartpole(num_envs, first_index=0):
    env = tw.make("CartPole-v1", num_envs, backend="gymnasium", first_index=first_index, max_episode_steps=7)
    return tw.TransformedEnv(env, T.StickyAction(0.3), T.TimeLimit(5), T.RecordEpisodeStatistics(), T.FrameStackObservation(2))


def nested(num_envs, first_index=0):
    space = spaces.Dict(where=spaces.Box(-9, 9, (2,)), rest=spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]))
    return scripted(num_envs, first_index, observation_space=space)


def groups(make, sizes):
    return [make(size, first_index=sum(sizes[:number])) for number, size in enumerate(sizes)]


def reset(envs, seed=0):
    return TensorDict.cat([env.reset(seed=seed) for env in envs])


def lean(td):
    """A deterministic policy of CartPole."""
    return (td["observation"][:, -1, 2] > 0).long()


def ones(td):
    return torch.ones(len(td), 6)


CASES = {"scripted": (scripted, ones), "CartPole-v1 with transforms": (cartpole, lean), "nested": (nested, ones)}


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_data_equal_those_of_a_collector_of_each_group_and_of_all_envs(case, sizes):
    make, policy = CASES[case]
    collect = AlternatingCollector(groups(make, sizes), policy, 6)
    alone = [tw.Collector(env, policy, 6) for env in groups(make, sizes)]
    whole = tw.Collector(make(sum(sizes)), policy, 6)
    td, roots, whole_td = reset(collect.envs), [each.env.reset(seed=0) for each in alone], whole.env.reset(seed=0)
    for _ in range(3):
        data, td = collect(td)
        parts, roots = zip(*[each(root) for each, root in zip(alone, roots, strict=True)], strict=True)
        expected, whole_td = whole(whole_td)
        assert data.shape == (sum(sizes), 6) and data.names == expected.names == [None, "time"]
        assert_same(data, torch.cat(parts))
        assert_same(td, torch.cat(roots))
        assert_same(data, expected)
        assert_same(td, whole_td)
        assert all(leaf.transpose(0, 1).is_contiguous() for leaf in data.values(True, True))
    assert data["next", "done"].any()


class Slow(Scripted):
    """Takes a while for some steps."""

    seconds = ()

    def _step(self, action):
        if self.seconds:
            time.sleep(self.seconds[int(self.elapsed[0]) % len(self.seconds)])
        return super()._step(action)


def test_sampled_actions_depend_on_seeds_and_not_on_timing():
    def collect(*seconds):
        envs, generator = groups(functools.partial(Slow, observation_shape=(2,)), (2, 2, 2)), torch.Generator().manual_seed(3)
        for env, each in zip(envs, seconds, strict=False):
            env.seconds = each
        collector = AlternatingCollector(envs, lambda td: torch.rand(len(td), 6, generator=generator), 8)
        first, td = collector(reset(envs))
        return torch.cat([first, collector(td)[0]], 1)

    expected = collect()
    assert_same(collect(), expected)
    assert_same(collect((0.01, 0.0), (0.0,), (0.0, 0.02, 0.0)), expected)
    assert_same(collect((0.0,), (0.02,)), expected)
    assert len(expected["action"].unique()) == 6 * 16 * 6


def test_policy_acts_for_one_group_after_the_other_in_the_thread_of_the_caller():
    calls = []

    def policy(td):
        calls.append((int(td["observation"][0, 0]) // 1000, threading.get_ident()))
        return ones(td)

    AlternatingCollector(groups(scripted, (2, 1, 2)), policy, 3)()
    assert calls == [(first, threading.get_ident()) for first in (0, 2, 3)] * 3


class Meets(Scripted):
    """Each step waits until another thread has come to a barrier."""

    barrier = None

    def _step(self, action):
        if self.barrier is not None:
            self.barrier.wait(PATIENCE)
        return super()._step(action)


def test_groups_step_at_the_same_time():
    envs = groups(Meets, (1, 1))
    envs[0].barrier = envs[1].barrier = threading.Barrier(2)
    data, _ = AlternatingCollector(envs, ones, 5)()
    assert data["next", "reward"].sum() > 0


def test_group_steps_while_the_policy_acts_for_another():
    envs = groups(Meets, (1, 1))
    envs[0].barrier = barrier = threading.Barrier(2)

    def policy(td):
        if td["observation"][0, 0] >= 1000:  # group 1
            barrier.wait(PATIENCE)
        return ones(td)

    data, _ = AlternatingCollector(envs, policy, 5)()
    assert data["next", "reward"].sum() > 0


# What the thread of a step has of the caller's.


class Reports(Scripted):
    """Reports the state of PyTorch in the thread that steps."""

    def _step(self, action):
        self.seen = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads())
        return super()._step(action)


@pytest.mark.parametrize("inference", [False, True])
def test_steps_record_no_gradient_and_run_in_the_mode_and_with_the_threads_of_the_caller(inference):
    before = torch.get_num_threads()
    with torch.inference_mode(inference):
        envs = groups(Reports, (2, 2))  # in inference mode, its buffers can be written to in this mode only
        collect = AlternatingCollector(envs, lambda td: ones(td).requires_grad_(), 3)
        td = reset(envs)
        try:
            for number in (1, 3):
                torch.set_num_threads(number)
                _, td = collect(td)
                assert [env.seen for env in envs] == [(False, inference, number)] * 2
        finally:
            torch.set_num_threads(before)


def test_results_under_autocast_and_another_default_device_are_the_same():
    def make(num_envs, first_index):
        env = Scripted(num_envs, first_index=first_index, observation_space=spaces.Box(0, 255, (16, 16), "uint8"))
        return tw.TransformedEnv(env, T.ResizeObservation((7, 7)), T.AddWhiteNoise(0.1), T.NormalizeReward())

    def collect():
        envs = groups(make, (2, 2))
        return AlternatingCollector(envs, lambda td: torch.ones(2, 6, device="cpu"), 5)(reset(envs))[0]

    expected = collect()
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        found = collect()
    assert_same(found, expected)


# Policies.


def test_policy_that_writes_into_the_same_memory_is_followed():
    actions, value = torch.zeros(2, 6), torch.zeros(2, 1)

    def policy(td):
        value.copy_(td["observation"][:, :1])
        return td.update({"action": actions.copy_(value.expand(2, 6)), "value": value})

    envs = groups(functools.partial(Slow, observation_shape=(2,)), (2, 2))
    envs[0].seconds = (0.02,)
    data, _ = AlternatingCollector(envs, policy, 4)()
    assert (data["value"] == data["observation"][..., :1]).all() and (data["action"] == data["value"]).all()
    assert (data["next", "info", "action"] == data["action"]).all()


def test_recurrent_policy_equals_that_of_a_collector():
    def make(num_envs, first_index=0):
        return tw.TransformedEnv(scripted(num_envs, first_index), T.PolicyState({"hidden": (2,)}))

    def policy(td):
        td["next", "hidden"] = td["hidden"] + td["observation"][:, :2]
        return td.set("action", td["hidden"][:, :1].expand(-1, 6))

    collect, whole = AlternatingCollector(groups(make, (2, 1)), policy, 5), tw.Collector(make(3), policy, 5)
    td, whole_td = reset(collect.envs), whole.env.reset(seed=0)
    for _ in range(3):
        (data, td), (expected, whole_td) = collect(td), whole(whole_td)
        assert_same(data, expected)
        assert_same(td, whole_td)
    assert set(td.keys()) == {"observation", "hidden", "is_init"}


def test_policy_and_its_keys_may_change_between_calls():
    collect = AlternatingCollector(groups(scripted, (2, 2)), None, 3)
    _, td = collect()
    for value in (torch.ones(2), torch.ones(2, 4), torch.zeros(2, 1).double()):
        collect.policy = lambda td, value=value: td.update({"action": ones(td), "value": value})
        data, td = collect(td)
        assert (data["value"] == value[0]).all() and data["value"].shape == (4, 3, *value.shape[1:])


def test_keys_restrict_what_is_kept():
    collect = AlternatingCollector(groups(scripted, (2, 2)), ones, 3, keys=[("next", "reward"), "action"])
    assert set(collect()[0].keys(True, True)) == {("next", "reward"), "action"}
    with pytest.raises(ValueError, match=r"needs keys among .*, but got \['value'\]"):
        AlternatingCollector(groups(scripted, (2, 2)), ones, 3, keys=["value"])()


def test_outputs_that_are_held_never_change():
    collect, held = AlternatingCollector(groups(scripted, (2, 2)), None, 3), Held()
    td = reset(collect.envs)
    for _ in range(5):
        data, td = collect(td)
        held.add(data, td)
    held.assert_unchanged()


# Compiled groups.


def test_compiled_groups_equal_eager_ones(graphs):
    def make(num_envs, first_index=0):
        env = tw.make("CartPole-v1", num_envs, backend="gymnasium", first_index=first_index)
        return tw.TransformedEnv(env, T.TimeLimit(4), T.RecordEpisodeStatistics(), T.NormalizeObservation())

    def collect(finish):
        envs = [finish(env) for env in groups(make, (2, 2))]
        collector, seen = AlternatingCollector(envs, lambda td: (td["observation"][:, 2] > 0).long(), 6), []
        td = reset(envs)
        for env in (*envs, None):
            data, td = collector(td)
            seen.append(data)
            if env is not None:
                env.eval()  # another graph, which a thread compiles
        for env in envs:
            env.close()
        return torch.stack(seen)

    assert_same(collect(functools.partial(tw.compile, backend="counting")), collect(lambda env: env), 2e-6)
    assert graphs


def test_collector_itself_cannot_be_compiled():
    with pytest.raises(TypeError, match="compile needs an Env or a Collector, but got AlternatingCollector"):
        tw.compile(AlternatingCollector(groups(scripted, (2, 2)), ones, 3))


# Roots.


def test_root_is_taken_as_it_was_left_or_as_a_copy_and_no_other():
    collect = AlternatingCollector(groups(scripted, (2, 2)), ones, 3)
    _, first = collect()
    first["observation"].add_(7)
    data, td = collect(first)
    assert (data["observation"][:, 0] == first["observation"]).all()
    data, td = collect(td.clone())
    before = [env.elapsed.clone() for env in collect.envs]
    with pytest.raises(ValueError, match="a stale one, with another observation"):
        collect(torch.cat([td[:2], first[2:]]))
    for other in (td[:2], (data, td), torch.cat([td, td])):
        with pytest.raises(TypeError, match=r"needs the root of all 4 envs, a TensorDict, but got .*: `torch.cat` makes it"):
            collect(other)
    assert all((env.elapsed == elapsed).all() for env, elapsed in zip(collect.envs, before, strict=True))
    collect(td)


def test_env_of_a_group_after_a_call_has_its_last_root():
    collect = AlternatingCollector(groups(functools.partial(Scripted, episode_lengths=None), (2, 2)), None, 4)
    _, td = collect()
    assert (collect.envs[1].snapshot()["observation"] == td["observation"][2:]).all()
    alone, _ = collect.envs[1].reset(mask=torch.tensor([False, True]))["observation"][:, 0].tolist(), td
    assert alone == [2004, 3000]
    data, _ = collect(torch.cat([td[:2], collect.envs[1].reset()]))
    assert data["observation"][:, 0, 0].tolist() == [4, 1004, 2000, 3000]


def test_root_before_the_first_reset_is_refused():
    collect = AlternatingCollector(groups(scripted, (2, 2)), ones, 3)
    with pytest.raises(RuntimeError, match=r"Call reset\(\) before a rollout of Scripted"):
        collect(reset(groups(scripted, (2, 2))))


# Faults.


class Fails(Slow):
    """Runs what it is given instead of a step."""

    failure = None

    def _step(self, action):
        failure, self.failure = self.failure, None
        if failure is not None:
            failure()
        successor = super()._step(action)
        self.finished = int(self.elapsed[0])
        return successor


def raises():
    raise ZeroDivisionError("in a step")


def interrupts():
    interrupt_main()
    time.sleep(0.05)


FAULTS = {  # where, and what the call raises
    "an exception in the first group": (0, raises, ZeroDivisionError),
    "an exception in the second group": (1, raises, ZeroDivisionError),
    "an interrupt while the first group steps": (0, interrupts, KeyboardInterrupt),
    "an interrupt while the second group steps": (1, interrupts, KeyboardInterrupt),
    "an exception in the policy": (None, raises, ZeroDivisionError),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_leaves_no_thread_and_the_next_call_asks_for_a_reset(name):
    where, failure, error = FAULTS[name]
    envs, other = (groups(functools.partial(Fails, observation_shape=(2,), episode_lengths=None), (2, 2)) for _ in range(2))
    collect, calls, threads = AlternatingCollector(envs, ones, 4), [], threading.active_count()
    td = collect(reset(envs))[1]
    for env in envs:
        env.seconds = (0.02,)
    if where is None:
        collect.policy = lambda td: calls.append(1) or ones(td) if len(calls) < 3 else raises()
    else:
        envs[where].failure = failure
    with pytest.raises(error):
        collect(td)
    assert threading.active_count() == threads
    assert all(env.finished == int(env.elapsed[0]) for env in envs)  # no step is left in the middle
    for env in envs:
        with pytest.raises(RuntimeError, match=r"needs reset\(\).*because an earlier collection did not finish"):
            env.step(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match=r"needs reset\(\).*because an earlier collection did not finish"):
        collect(td)
    for env in envs:
        env.seconds = ()
    collect.policy = ones
    assert_same(collect(reset(envs, 5))[0], AlternatingCollector(other, ones, 4)(reset(other, 5))[0])


def test_dead_worker_of_a_group_is_named():
    envs = [tw.make("CartPole-v1", 2, backend="gymnasium", vectorization_mode="async", first_index=n) for n in (0, 2)]
    try:
        collect = AlternatingCollector(envs, lambda td: torch.zeros(2, dtype=torch.int64), 5)
        _, td = collect(reset(envs))
        envs[1].vector_env.processes[1].kill()
        for given in (td, None):
            with pytest.raises(RuntimeError, match=r"process of env 1 was killed by signal 9.*make a new env"):
                collect(given)
    finally:
        for env in envs:
            env.close()


# Refusals.


def on_meta(num_envs, first_index):
    return scripted(num_envs, first_index).to("meta")


SAME = "needs envs of the same spaces, device and policy state"
REFUSALS = {
    "one env": (lambda: [scripted(2)], TypeError, "needs a list of at least two envs"),
    "an env alone": (lambda: scripted(2), TypeError, "needs a list of at least two envs"),
    "a transform": (lambda: [scripted(2), T.TimeLimit(3)], TypeError, "needs a list of at least two envs"),
    "a native env": (lambda: [scripted(2), tw.make("CartPole-v1", 2)], ValueError, "needs envs that a simulator outside of P"),
    "the same env twice": (lambda: [scripted(2)] * 2, ValueError, r"indices differ, but got first_index \[0, 0\]"),
    "overlap": (
        lambda: [scripted(3), scripted(2, 2)],
        ValueError,
        r"indices differ, but got first_index \[0, 2\]: make them with \[0, 3\]",
    ),
    "another observation space": (lambda: [scripted(2), Scripted(2, (4,), first_index=2)], ValueError, SAME),
    "another device": (lambda: [scripted(2), on_meta(2, 2)], ValueError, SAME),
    "state of a policy in one": (
        lambda: [tw.TransformedEnv(scripted(2), T.PolicyState({"hidden": (2,)})), scripted(2, 2)],
        ValueError,
        SAME,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_groups_that_do_not_fit_are_refused(name):
    make, error, message = REFUSALS[name]
    with pytest.raises(error, match=f"AlternatingCollector {message}|AlternatingCollector needs envs whose global {message}"):
        AlternatingCollector(make(), None, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("random", 3), TypeError, "needs a policy that can be called"),
        ((None, 0), ValueError, "needs num_steps of at least 1, but got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        AlternatingCollector(groups(scripted, (2, 2)), *arguments)


def test_compiled_group_on_cuda_is_refused(monkeypatch):
    envs = [tw.TransformedEnv(env, T.TimeLimit(3)) for env in groups(scripted, (2, 2))]
    tw.compile(envs[1], backend="eager")
    monkeypatch.setattr(tw.Env, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match="needs envs on CUDA that are not compiled"):
        AlternatingCollector(envs, ones, 3)


def test_repr_shows_groups_and_num_steps():
    text = "AlternatingCollector([<Scripted(num_envs=2, device=cpu)>, <Scripted(num_envs=1, device=cpu)>], num_steps=3)"
    collect = AlternatingCollector(groups(scripted, (2, 1)), None, 3)
    assert repr(collect) == text and (collect.num_envs, collect.num_steps) == (3, 3)
