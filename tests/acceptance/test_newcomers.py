"""What newcomers write out of habit: each call raises, changes nothing, and the lines of code in its message work."""

import collections.abc
import copy
import re
import sys
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import assert_same, buffers
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Case(NamedTuple):
    """Code of a newcomer. `before` leads to the call; `mend` and the lines of the message lead to what `then` states."""

    call: str
    error: type[Exception]
    message: str
    then: str
    before: str = ""
    mend: str = ""


def namespace():
    """What the code of the cases can use."""
    env = tw.make("CartPole-v1", 2)
    names = {name: getattr(tw, name) for name in tw.__all__}
    names |= {"T": T, "nn": nn, "np": np, "torch": torch, "gymnasium": gymnasium}
    return names | {
        "env": env,
        "td": env.reset(seed=0),
        "network": nn.Linear(4, 2),
        "collect": tw.Collector(env, None, 3),
    }


def run(code, names):
    """Runs code. `_` is then its value, if it has one."""
    try:
        names["_"] = eval(code, names)
    except SyntaxError:
        exec(code, names)


def check(case):
    names = namespace()
    run(case.before, names)
    before = [(value, buffers(value)) for value in names.values() if isinstance(value, tw.Env)]
    with pytest.raises(case.error, match=case.message) as raised:
        run(case.call, names)
    assert type(raised.value) is case.error
    for env, state in before:
        assert_same(buffers(env), state)
    lines = re.findall(r"`(.+?)`", str(raised.value))
    assert lines, raised.value
    run(case.mend, names)
    for line in lines:
        run(line, names)
    assert eval(case.then, names), case.then


# Making envs and transforms.


def wraps(line):
    return rf" takes no env, but got FunctionalEnv: write `env = TransformedEnv\(env, {re.escape(line)}\)`\.$"


INSTANCE = r"Compose needs Transforms, but got the class {0} at transforms\[0\]: pass an instance, `T\.{0}\({1}\)`\.$"
NO_ID = "make needs an id string or an env's spec, but got "
NO_SEED = r"make needs arguments that the env's constructor takes, but got seed=0: pass it to reset, `td = env\.reset\(seed=0\)`\.$"
VECTOR_ENV = (
    "gymnasium.make_vec('CartPole-v1', 2, 'sync', vector_kwargs={'autoreset_mode': 'Disabled'})"
)

WRAPPED = "TransformedEnv(env, _).transforms[0] is _"
TAKES_ONE = "len(env.transforms) == 1"
THREE = "max_episode_steps = 3"
CONSTRUCTION = [
    Case("T.NormalizeObservation(env)", TypeError, wraps("T.NormalizeObservation()"), TAKES_ONE),
    Case(
        "T.NormalizeReward(gamma=0.9, env=env)",
        TypeError,
        wraps("T.NormalizeReward(gamma=0.9)"),
        TAKES_ONE,
    ),
    Case(
        "T.FrameStackObservation(env, 4)", TypeError, wraps("T.FrameStackObservation(4)"), TAKES_ONE
    ),
    Case("T.TimeLimit(env)", TypeError, wraps("T.TimeLimit(max_episode_steps)"), TAKES_ONE, THREE),
    Case(
        "Compose(env)",
        TypeError,
        wraps("T.Compose(transforms)"),
        TAKES_ONE,
        "transforms = [T.TimeLimit(3)]",
    ),
    Case(
        "TransformedEnv(env, T.NormalizeReward)",
        TypeError,
        INSTANCE.format("NormalizeReward", ""),
        WRAPPED,
    ),
    Case(
        "Compose([T.TimeLimit])",
        TypeError,
        INSTANCE.format("TimeLimit", "max_episode_steps"),
        WRAPPED,
        THREE,
    ),
    Case(
        "make(env)",
        TypeError,
        NO_ID + r"<CartPole.*: make another env with `make\(env\.spec\)`",
        "True",
    ),
    Case("make('CartPole-v1', seed=0)", ValueError, NO_SEED, "env.np_random_seed == 0"),
    Case(
        "make('CartPole-v1', backend='gymnasium', seed=0)",
        ValueError,
        NO_SEED,
        "env.np_random_seed == 0",
    ),
]


TRANSFORMS = [
    kind
    for kind in map(T.__dict__.get, T.__all__)
    if isinstance(kind, type) and issubclass(kind, T.Transform)
]


def test_every_transform_refuses_every_kind_of_env():
    for env in (ScriptedEnv(2), gymnasium.make("CartPole-v1"), eval(VECTOR_ENV)):
        for kind in TRANSFORMS:
            message = rf"^{kind.__name__} is a transform and takes no env, .* TransformedEnv\(env, T\.{kind.__name__}\("
            for arguments, keywords in (((env,), {}), ((env, 3), {}), ((), {"env": env})):
                with pytest.raises(TypeError, match=message):
                    kind(*arguments, **keywords)
        env.close()


# Policies.

NEEDED = 'CartPole-v1 needs a policy that takes a TensorDict, and returns the action or the TensorDict with "action", but got '
CALLED = r', which raised .*: wrap a network as `lambda td: network\(td\["observation"\]\)\.argmax\(-1\)`\.$'
RETURNED = r', which returned {}: wrap a network as `lambda td: network\(td\["observation"\]\)\.argmax\(-1\)`\.$'
CONTINUOUS = r'wrap a network as `lambda td: network\(td\["observation"\]\)`\.$'
PENDULUM = "env = make('Pendulum-v1', 2); td = env.reset(); network = nn.Linear(3, 1)"
SCORES = r"needs an action of shape \(2,\) .*, but got \(2, 2\): turn scores into actions with `scores\.argmax\(-1\)`\.$"
SCORED = "scores = network(td['observation'])"
COLLECTS = "rollout(env, _, 3)[0].shape == (2, 3)"

POLICIES = [
    Case("rollout(env, network, 3, td)", TypeError, NEEDED + "Linear" + CALLED, COLLECTS),
    Case(
        "Collector(env, nn.Sequential(network, nn.Tanh()), 3)(td)",
        TypeError,
        NEEDED + "Sequential" + CALLED,
        COLLECTS,
    ),
    Case(
        "evaluate(env, network, 2, seed=0)",
        TypeError,
        NEEDED + "Linear" + CALLED,
        "evaluate(env, _, 2).shape == (2,)",
    ),
    Case(
        "compile(Collector(env, network, 3), backend='eager')",
        TypeError,
        NEEDED + "Linear" + CALLED,
        COLLECTS,
    ),
    Case("rollout(env, network, 3, td)", TypeError, CONTINUOUS, COLLECTS, PENDULUM),
    Case(
        "rollout(env, lambda td: None, 3, td)",
        TypeError,
        NEEDED + "<lambda>" + RETURNED.format("None.*"),
        COLLECTS,
    ),
    Case(
        "rollout(env, lambda td: (td, 0), 3, td)",
        TypeError,
        NEEDED + "<lambda>" + RETURNED.format("tuple"),
        COLLECTS,
    ),
    Case(
        "rollout(env, lambda td: scores, 3, td)",
        ValueError,
        SCORES,
        "len(env.step(_)) == 2",
        SCORED,
        "env.reset()",
    ),
]


def test_policy_that_raises_for_a_reason_of_its_own_raises_that():
    with pytest.raises(TypeError, match=r"^unsupported operand type\(s\) for \+: 'int' and 'str'$"):
        tw.rollout(ScriptedEnv(2), lambda td: 1 + "1", 3)


def test_env_without_len_is_true_and_a_with_statement_closes_it():
    env = tw.make("CartPole-v1", 2, backend="gymnasium")
    outer = tw.TransformedEnv(env, T.TimeLimit(3))
    assert outer and not isinstance(outer, collections.abc.Iterable)
    assert np.array([outer, None], dtype=object).tolist() == [outer, None]
    with pytest.raises(KeyError), outer as inside:
        assert inside is outer and not env.vector_env.closed
        inside.reset(seed=0)
        raise KeyError
    assert env.vector_env.closed


# Results of steps and resets, mixed up.

SECOND = r"pass the second result of the last step, `transition, td = env\.step\(td\)`\.$"
SECOND_OF_COLLECT = (
    r"pass the second result of the last step or collection, `data, td = collect\(td\)`\.$"
)
STEPPED = (
    r'CartPole-v1\.step needs a root, but got a TensorDict with "next", which has been stepped: '
    + SECOND
)
COLLECTED = (
    'Collector needs a root, but got a TensorDict with "next", which has been stepped: '
    + SECOND_OF_COLLECT
)
STALE = (
    "Collector needs the root that the last .* returned, but got a stale one, with another observation: "
    + SECOND_OF_COLLECT
)
ACT = "td['action'] = env.sample_action()"
AGAIN = f"td = env.reset(); {ACT}"
NEXT = "'next' in transition and set(td.keys()) == {'observation'}"
DATA = "data.shape == (2, 3) and set(td.keys()) == {'observation'}"
NUMPY = r"but got ndarray: call `env\.step\(torch\.as_tensor\(action\)\)`\.$"

RESET = "td = env.reset()"
SLIPS = [
    Case(
        "env.step(td)",
        ValueError,
        STEPPED,
        NEXT,
        f"{ACT}; td, transition = env.step(td); {ACT}",
        AGAIN,
    ),
    Case(
        "env.step(td)",
        ValueError,
        STEPPED,
        NEXT,
        f"{ACT}; transition, _ = env.step(td); {ACT}",
        AGAIN,
    ),
    Case(
        "env.step(td)",
        TypeError,
        "action as a tensor, but got tuple: " + SECOND,
        NEXT,
        f"{ACT}; td = env.step(td)",
        AGAIN,
    ),
    Case("collect(td)", ValueError, COLLECTED, DATA, f"{ACT}; env.step(td)", RESET),
    Case("collect(td)", ValueError, COLLECTED, DATA, "td, data = collect(td)", RESET),
    Case("collect(td)", ValueError, STALE, DATA, "data, _ = collect(td)", RESET),
    Case(
        "collect(td)",
        TypeError,
        "to start from, but got tuple: " + SECOND_OF_COLLECT,
        DATA,
        "td = collect(td)",
        RESET,
    ),
    Case(
        "rollout(env, None, 3, td)", ValueError, STALE, DATA, "env.step(env.sample_action())", RESET
    ),
    Case("rollout(env, None, 3, td)", ValueError, STALE, DATA, "env.reset()", RESET),
    Case("env.step(action)", TypeError, NUMPY, "len(_) == 2", "action = env.action_space.sample()"),
]


NESTED = spaces.Dict(position=spaces.Box(-9, 9, (2,)), gear=spaces.Tuple([spaces.Discrete(3)]))


@pytest.mark.parametrize("values", ["as they are", "changed in place", "NaN"])
def test_collector_starts_from_the_last_root_as_it_was_left_and_from_copies_but_not_from_another(
    values,
):
    env = ScriptedEnv(2, episode_lengths=None, observation_space=NESTED)
    collect = tw.Collector(env, None, 3)
    for replicate in (
        lambda td: td,
        TensorDict.clone,
        copy.deepcopy,
        lambda td: td.select("observation"),
    ):
        td = env.reset()
        for leaf in td.values(True, True):
            if values == "changed in place":
                leaf += 1
            elif values == "NaN" and leaf.is_floating_point():
                leaf[0] = torch.nan
        data, _ = collect(replicate(td))
        assert_same(data[:, 0].select("observation"), td.select("observation"))
    for index in range(2):  # one row of one leaf differs
        td = env.reset().clone()
        leaf = list(td.values(True, True))[index]
        leaf[1] = 1 - leaf[1]
        with pytest.raises(ValueError, match="but got a stale one, with another observation"):
            tw.rollout(env, None, 3, td)


def test_collector_starts_from_a_restored_root_and_not_from_the_one_before():
    env = ScriptedEnv(2)
    td = env.reset()
    snapshot, (_, following) = env.snapshot(), env.step(env.sample_action())
    env.restore(snapshot)
    with pytest.raises(ValueError, match="but got a stale one"):
        tw.rollout(env, None, 3, following)
    assert_same(
        tw.rollout(env, None, 3, td)[0][:, 0].select("observation"), td.select("observation")
    )


@pytest.mark.parametrize("case", [*CONSTRUCTION, *POLICIES, *SLIPS], ids=lambda case: case.call)
def test_call_of_a_newcomer_raises_and_names_the_line_that_works(case):
    check(case)


def test_make_of_an_id_of_another_package_names_the_package(monkeypatch, tmp_path):
    pytest.importorskip("ale_py")
    (tmp_path / "package.py").write_text(
        'import gymnasium\ngymnasium.register("Maze/Walk-v0", "gymnasium.envs.classic_control:CartPoleEnv")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = {name: spec for name, spec in gymnasium.registry.items() if spec.namespace != "ALE"}
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry)
    message = r"make needs a registered id, but got 'Maze/Walk-v0'.* `make\(\"package:Maze/Walk-v0\"\)` imports it\.$"
    try:
        check(Case("make('Maze/Walk-v0')", ValueError, message, "_.spec.id == 'Maze/Walk-v0'"))
    finally:
        sys.modules.pop("package", None)
    with pytest.raises(
        ValueError, match=r"Namespace ALE not found.*`make\(\"ale_py:ALE/Pong-v5\"\)` imports it\.$"
    ):
        tw.make("ALE/Pong-v5")


# Gradients.


class Echo(ScriptedEnv):
    """Returns the action itself."""

    def _step(self, action):
        return super()._step(action).set("info", TensorDict({"action": action}, [self.num_envs]))


DIFFERENTIABLE = {
    "Pendulum": lambda: tw.make("Pendulum-v1", 2),
    "Gymnasium": lambda: tw.make("Pendulum-v1", 2, backend="gymnasium"),
    "transforms": lambda: tw.TransformedEnv(
        tw.make("Pendulum-v1", 2), T.ClipAction(), T.StickyAction(0.5)
    ),
    "compiled": lambda: tw.compile(
        ScriptedEnv(2, action_space=spaces.Box(-2, 2, (1,))), backend="aot_eager"
    ),
    "an env that returns the action": lambda: Echo(2, action_space=spaces.Box(-2, 2, (1,))),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_step_takes_the_values_of_an_action_that_requires_grad(name):
    env, other = DIFFERENTIABLE[name](), DIFFERENTIABLE[name]()
    td, other_td = env.reset(seed=0), other.reset(seed=0)
    for bare in (False, True):
        action = torch.zeros(2, 1, requires_grad=True).tanh() + 0.5
        transition, td = env.step(action if bare else td.set("action", action))
        expected, other_td = other.step(other_td.set("action", action.detach()))
        assert transition["action"] is action and action.requires_grad
        assert_same(transition["next"], expected["next"])
        assert not any(
            leaf.requires_grad
            for leaf in (*transition["next"].values(True, True), *td.values(True, True))
        )


# Without `return`.
Forgetful = type("Forgetful", (T.RewardTransform,), {"reward": lambda self, reward: None})
Silent = type("Silent", (T.Transform,), {"setup": lambda self, signature: None})
LAMBDA = "T.TransformObservation(lambda obs: obs[:, :2])"
SLIPS = {
    "env.reset(mask=torch.ones(2, 1, dtype=torch.bool))": r"but got \(2, 1\) torch\.bool on cpu: use `mask\.squeeze\(-1\)`",
    "TransformedEnv(env, [T.TimeLimit(3)])": r"Compose needs Transforms, but got list at .*: write `\*transforms`",
    "Collector(to_gymnasium(env), None, 1)": "needs an Env, but got TorchwrapVectorEnv: pass its `.env`",
    "TransformedEnv(env, Silent())": r"\(Silent\)\.setup needs to return the signature, but got NoneType",
    f"TransformedEnv(env, {LAMBDA})": r"observations of shape \(2, 4\) .*, but got \(2, 2\): pass the new space too",
    "make('CartPole-v1', 2, backend='gymnasium').reset(options={'reset_mask': [True, False]})": "pass mask=torch.as_tensor",
    "rollout(TransformedEnv(env, T.RecordEpisodeStatistics(metrics={'wins': 'max'})), None, 1)": "the argument info_keys",
    "rollout(TransformedEnv(env, Forgetful()), None, 1)": r"step needs to return \['reward'\] too, but got",
}


def test_slips_of_the_sessions_of_new_users_name_their_remedy():
    for line, message in SLIPS.items():
        with pytest.raises((TypeError, ValueError), match=message):
            eval(
                line,
                {
                    **vars(tw),
                    "T": T,
                    "torch": torch,
                    "Forgetful": Forgetful,
                    "Silent": Silent,
                    "env": tw.make("CartPole-v1", 2),
                },
            )
