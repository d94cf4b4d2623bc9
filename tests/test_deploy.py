"""`tw.deploy`: the actions of `evaluate` from raw observations, as an exported program."""

import functools
import io
import json

import numpy as np
import pytest
import torch
from catalogue import COMPILED, DICT, UNCAPTURED, AddNoise, StatefulRnn
from gymnasium import spaces
from helpers import load_example, mostly_full
from holders import HOLDERS
from tensordict import TensorDict
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv

NUM_ENVS = 5
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
full = pytest.mark.full
pytestmark = [pytest.mark.compiles, pytest.mark.newest]


class Recorder(tw.Wrapper):
    """Keeps the raw observation and the received action of each step."""

    def __init__(self, env):
        super().__init__(env)
        self.start()

    def deployed(self):
        return None

    def start(self):
        self.raw = None
        self.first = torch.zeros(self.num_envs, 1, dtype=torch.bool)
        self.log = []

    def _step(self, action):
        self.log.append((self.raw, self.first, action.clone()))
        successor = self.env._step(action)
        self.raw = successor["observation"].clone()
        self.first = torch.zeros_like(self.first)
        return successor

    def _reset(self, mask, options=None):
        td = self.env._reset(mask, options)
        initial = td["observation"]
        self.raw = initial.clone() if self.raw is None else mask.where(initial, self.raw)
        self.first = self.first | mask.column
        return td


class Network(nn.Module):
    """A deterministic policy for any spaces, whose actions differ between rows and steps."""

    def __init__(self, env):
        super().__init__()
        self.space = env.single_action_space
        self.recurrent = env.signature.policy_state
        size = spaces.flatdim(self.space) if isinstance(self.space, spaces.Box) else 1
        inputs = self.features(env.reset()["observation"]).shape[1]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(inputs, size)

    def features(self, observation):
        leaves = [observation]
        if isinstance(observation, TensorDict):
            leaves = observation.values(True, True)
        return torch.cat([leaf.reshape(leaf.shape[0], -1).float() for leaf in leaves], 1)

    def forward(self, td):
        features = self.features(td["observation"])
        features = features.sign() * features.abs().log1p()  # of similar size for all transforms
        for name in self.recurrent:
            features = features + td[name].reshape(features.shape[0], -1)[:, :1].float()
            td["next", name] = td[name] + 1
        push = torch.sin(self.layer(features))
        if isinstance(self.space, spaces.Box):
            scale = 1.0 if self.space.is_bounded() else 1.5  # beyond the bounds, for ClipAction
            return td.set("action", scale * push.view(-1, *self.space.shape))
        number = (push[:, 0].abs() * 300).long() % int(self.space.n)
        return td.set("action", number + int(self.space.start))


def stack(make_env, *transforms):
    env = tw.TransformedEnv(Recorder(make_env(NUM_ENVS)), *transforms)
    tw.rollout(env, None, 7)  # so that there are statistics to freeze
    return env


def evaluated(env, policy):
    """The raw observations, first steps and actions of whole episodes."""
    recorder = [module for module in env.modules() if isinstance(module, Recorder)][-1]
    recorder.start()
    tw.evaluate(env, policy, 15, seed=3)
    return recorder.log


def plain(value):
    return value if isinstance(value, torch.Tensor) else value.to_dict()


def assert_parity(deployed, run, log, **tolerances):
    """`run`, the deployed policy or a file of it, computes the actions that were recorded."""
    # First steps start over from any state.
    state = tree_map(torch.zeros_like, deployed.initial_state(NUM_ENVS))
    assert len(log) > 8
    assert any(bool(first.any()) for _, first, _ in log[1:])
    for raw, first, expected in log:
        if state:
            action, state = run(plain(raw), {**state, "is_first": first})
        else:
            action = run(plain(raw))
        torch.testing.assert_close(action, plain(expected), **tolerances)


# Every transform.

CATALOGUE = {**COMPILED, **UNCAPTURED}
DRAWS = {
    *("AddWhiteNoise", "ObstructView", "StickyAction", "AddNoise", "AddNoise of torchwrap"),
    *("ObservationGroups", "ObservationKeys", "DelayObservation, drawn", "DelayAction"),
    *("AddNoise for an episode", "AddNoise for two steps", "CommandObservation"),
}


def act_in_dict(td):
    push = torch.sin(td["observation", "image"][:, 0].float())
    gear = td["observation", "position"] - 2
    return TensorDict({"push": push, "gear": gear}, td.batch_size)


def catalogued(name):
    make, make_env = CATALOGUE[name]
    env = stack(make_env, make())
    is_dict = isinstance(env.single_action_space, spaces.Dict)
    return env, act_in_dict if is_dict else Network(env)


# CI deploys these. The others are deployed before a release.
SOME = {
    *("RecordEpisodeStatistics", "NormalizeObservation of a Dict", "FrameStackObservation"),
    *("DelayObservation of a Dict", "LastActionObservation of Dicts", "LowPassAction"),
    *("TimeAwareObservation", "FilterObservation", "ResizeObservation", "DiscretizeAction"),
    *("PolicyState", "Compose of none", "on CartPole", "PassiveEnvChecker"),
    *("AddNoise", "AddWhiteNoise", "DelayAction", "ObservationGroups"),
}


def catalogue_cases(names):
    return mostly_full(sorted(names), long={*names} - SOME)


@pytest.mark.parametrize("name", catalogue_cases(CATALOGUE.keys() - DRAWS))
def test_deployed_transform_acts_as_in_evaluate(name):
    env, policy = catalogued(name)
    deployed = tw.deploy(env, policy)
    assert_parity(deployed, deployed, evaluated(env, policy), **EXACT)
    json.dumps(deployed.metadata, allow_nan=False)


@pytest.mark.parametrize("name", catalogue_cases(DRAWS))
def test_transform_that_draws_is_refused(name):
    kind = name.partition(" ")[0].strip(",")
    with pytest.raises(ValueError, match=f"AddNoise|{kind}"):
        tw.deploy(*catalogued(name))


# Stacks.


def box(low, high):
    low = np.broadcast_to(np.float32(low), 2)
    high = np.broadcast_to(np.float32(high), 2)
    return spaces.Box(low, high)


def continuous(num_envs=NUM_ENVS):
    return ScriptedEnv(num_envs, (3,), action_space=box(-3, (1, 2)))


def pixels(num_envs):
    frames = spaces.Box(0, 255, (90, 100, 3), "uint8")
    return ScriptedEnv(num_envs, observation_space=frames, action_space=spaces.Discrete(9))


class Smooth(T.Transform):
    """A user's transform with state, which changes observations and actions."""

    average = tw.EnvBuffer((3,), fill=5)
    previous = tw.EnvBuffer((2,))

    def setup(self, signature):
        return signature.replace(
            single_observation_space=spaces.Box(-torch.inf, torch.inf, (2, 3)),
        )

    def step(self, td):
        self.average.lerp_(td["observation"], 0.5)
        return td.set("observation", torch.stack([self.average, td["observation"]], 1))

    def reset(self, td, mask):
        mask.assign_(self.average, td["observation"])
        mask.fill_(self.previous, 0)
        return td.set(
            "observation",
            td["observation"].unsqueeze(1).expand(-1, 2, -1),
        )

    def action(self, action):
        self.previous.copy_(0.5 * self.previous + 0.5 * action)
        return self.previous.clone()


class MarkInitial(T.Transform):
    """Stateless, but a reset computes something else than a step."""

    def step(self, td):
        return td.set("observation", td["observation"] * 0.5)

    def reset(self, td, mask):
        return td.set("observation", torch.ones_like(td["observation"]))


def control():
    return [
        *(T.RescaleAction(-1, 1), T.ClipAction(), T.RecordEpisodeStatistics()),
        T.NormalizeObservation(),
        T.ClipObservation(-1, 1),
        T.FrameStackObservation(3),
        T.NormalizeReward(),
    ]


def several_layers(num_envs):
    inner = Recorder(continuous(num_envs))
    return tw.TransformedEnv(inner, T.ClipAction(), T.DelayObservation(1))


def recurrent():
    timed = [T.TimeLimit(4), T.TimeAwareObservation(), T.DiscretizeAction(3)]
    hidden = tw.PolicyState({"hidden": (3,)})
    return [
        hidden,
        *timed,
        tw.PolicyState({"count": ()}, torch.int64, -1),
    ]


def frames(number):
    return T.FrameStackObservation(number)


STACKS = {
    "control": (continuous, control),
    "several layers": (several_layers, lambda: [T.NormalizeObservation(), frames(2)]),
    "images": (pixels, lambda: [T.atari("cleanrl"), T.TimeLimit(9)]),
    "a user's state": (
        continuous,
        lambda: [T.ClipAction(), Smooth(), frames(2), frames(2)],
    ),
    "no state": (
        continuous,
        lambda: [T.ClipAction(), T.NormalizeObservation(), T.TimeLimit(3)],
    ),
    "initial observations": (continuous, lambda: [T.NormalizeObservation(), MarkInitial()]),
    "delays": (
        continuous,
        lambda: [T.ClipAction(), T.DelayAction(1), T.DelayObservation(2)],
    ),
    "a recurrent policy": (functools.partial(ScriptedEnv, observation_space=DICT), recurrent),
}
FAST = ("control", "no state")
exports = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else full) for name in STACKS]
)


@functools.cache
def deployed_stack(name):
    """A deployed policy, and the record of its env."""
    make_env, transforms = STACKS[name]
    env = stack(make_env, *transforms())
    policy = Network(env)
    return tw.deploy(env, policy), evaluated(env, policy)


@exports
def test_deployed_stack_acts_as_in_evaluate(name):
    deployed, log = deployed_stack(name)
    assert len({repr(action) for _, _, action in log}) > 5
    assert_parity(deployed, deployed, log, **EXACT)


@pytest.mark.full
@exports
def test_program_of_a_file_takes_any_batch_size(name):
    deployed, log = deployed_stack(name)
    file = io.BytesIO()
    torch.export.save(deployed.program, file)
    file.seek(0)
    program = torch.export.load(file).module()

    def run_rows(*inputs):
        results = []
        for row in torch.arange(NUM_ENVS).split(1):
            results.append(program(*tree_map(functools.partial(take, row), inputs)))
        return tree_map(lambda *parts: torch.cat(parts), *results)

    assert_parity(deployed, run_rows, log)


def take(row, value):
    return value[row]


def test_program_for_float32_computes_nothing_in_float64():
    nodes = deployed_stack("control")[0].program.graph.nodes
    values = [node.meta.get("val") for node in nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    assert torch.float32 in dtypes
    assert torch.float64 not in dtypes


@full
@exports
@pytest.mark.filterwarnings("ignore")  # PyTorch's exporter uses deprecated code
def test_onnx_model_gives_the_same_results_in_onnx_runtime(name, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    deployed, log = deployed_stack(name)
    names = deployed.onnx_names()
    path = tmp_path / "policy.onnx"
    torch.onnx.export(
        deployed.program,
        dynamo=True,
        verbose=False,
        **names,
    ).save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == names["input_names"]
    inputs, _ = deployed.program.example_inputs
    structure = tree_structure(deployed(*inputs))

    def run(*inputs):
        values = [leaf.numpy() for leaf in tree_leaves(inputs)]
        feed = dict(zip(names["input_names"], values, strict=True))
        results = map(torch.from_numpy, session.run(names["output_names"], feed))
        return tree_unflatten(list(results), structure)

    assert_parity(deployed, run, log)


@pytest.mark.long
@full
@pytest.mark.filterwarnings("ignore")
def test_aot_inductor_compiles_the_same_program(tmp_path):
    deployed, log = deployed_stack("a recurrent policy")
    path = str(tmp_path / "policy.pt2")
    path = torch._inductor.aoti_compile_and_package(deployed.program, package_path=path)
    assert_parity(deployed, torch._inductor.aoti_load_package(path), log)


@pytest.mark.long
@full
def test_example_plays_the_same_episodes_in_a_process_that_imports_only_torch(tmp_path):
    threads = torch.get_num_threads()
    ppo = load_example("ppo")  # the script imports it from its own folder
    script = load_example("deploy")
    args = ppo.Args(total_timesteps=4096, normalize=True, out=tmp_path)
    here, there = script.main(args, num_episodes=3)
    torch.set_num_threads(threads)
    assert here == there
    assert len(there) == 3


# Frozen.


def network():
    return nn.Sequential(
        nn.Linear(3, 2),
        nn.BatchNorm1d(2),
        nn.Dropout(0.5),
    ).eval()


def change(net):
    with torch.no_grad():
        net[0].weight.add_(1)
    net.train()
    net(torch.randn(8, 3))
    net[1].eps = 9.0
    net.register_forward_hook(lambda module, args, output: output + 1)
    net.append(nn.Tanh())


def test_later_change_does_not_reach_what_deploy_returned():
    networks = [network() for _ in HOLDERS]
    pairs = zip(HOLDERS.values(), networks, strict=True)
    functions = [hold(net) for hold, net in pairs]
    scales = {
        "number": 2.0,
        "tensor": torch.ones(1),
        "computed": torch.ones(1, requires_grad=True),
    }
    scales["computed"] = scales["computed"] * 2  # with a graph of gradients

    def act(td):
        return sum(function(td) for function in functions) * sum(scales.values())

    env = stack(continuous, T.NormalizeObservation())
    raw = torch.randn(4, 3)
    deployed = tw.deploy(env, act)
    expected = act({"observation": env.transforms[0].observation(raw)}).detach()
    for net in networks:
        change(net)
    scales["number"] = 5
    scales["tensor"].add_(1)
    tw.rollout(env, None, 9)  # learns
    torch.testing.assert_close(deployed(raw), expected)
    assert not deployed(raw).requires_grad


class Remembers(nn.Module):
    """Keeps features, as rsl_rl's models keep their last distribution, and a mask."""

    mask = None

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.Dropout())

    def forward(self, td):
        if self.mask is None:
            self.mask = torch.ones(2)
        self.features = self.layers(td["observation"])
        return self.features * self.mask


def test_policy_is_put_into_eval_mode_and_back_and_keeps_real_tensors():
    policy = Remembers()
    policy.layers[0].eval()
    deployed = tw.deploy(stack(continuous), policy)
    assert [part.training for part in policy.layers] == [False, True]
    assert (policy.features + policy.mask).tolist()  # a tensor of the tracer has no values
    raw = torch.randn(4, 3)
    torch.testing.assert_close(deployed(raw), policy.layers[0](raw).detach())


# What the action depends on.

SENSORS = spaces.Dict(
    own=spaces.Box(-9, 9, (3,)),
    privileged=spaces.Box(-9, 9, (5,)),
    gear=spaces.Discrete(2, start=1),
)
sensing = functools.partial(
    ScriptedEnv,
    observation_space=SENSORS,
    action_space=box(-3, (1, 2)),
)
STACKED = "ObservationGroups.parts.actor.FrameStackObservation.histories.0.frames"


class ActorCritic(nn.Module):
    """Computes values, too, of which no action depends."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(3, 2)
        self.critic = nn.Linear(5, 1)

    def forward(self, td):
        self.critic(td["observation", "critic"].double().float())
        return self.actor(td["observation", "actor"][:, 0])


def grouped_env():
    actor = [T.FilterObservation(["own"]), T.FlattenObservation(), T.NormalizeObservation()]
    critic = [T.FilterObservation(["privileged"]), T.FlattenObservation(), AddNoise()]
    groups = {"actor": [*actor, frames(2)], "critic": critic}
    return stack(sensing, T.ClipAction(), T.ObservationGroups(groups))


@pytest.mark.full
def test_actor_beside_a_critic_is_deployed_alone():
    env = grouped_env()
    policy = ActorCritic()
    deployed = tw.deploy(env, policy)
    assert list(deployed.metadata["observation"]["spaces"]) == ["own"]
    assert list(deployed.initial_state(1)) == [STACKED, "is_first"]
    log = evaluated(env, policy)
    assert_parity(deployed, deployed, log, **EXACT)  # the other entries may be given, too
    log = [(given.select("own"), first, action) for given, first, action in log]
    assert_parity(deployed, deployed, log, **EXACT)
    file = io.BytesIO()
    torch.export.save(deployed.program, file)
    weights = [part.weight.detach().numpy().tobytes() for part in policy.children()]
    assert [weight in file.getvalue() for weight in weights] == [True, False]


class Worst(T.ObservationTransform):
    """Tells whether the larger of two sensors is nearly at its limit."""

    def setup(self, signature):
        return signature.replace(
            single_observation_space=spaces.Dict(actor=spaces.Box(0, 1, (1,))),
        )

    def observation(self, observation):
        worst = torch.stack(list(observation.values())).amax(0)
        return TensorDict({"actor": (worst > 0.9999).float()}, observation.batch_size)


class WorstInPlace(Worst):
    def observation(self, observation):
        worst = torch.zeros_like(observation["alarm"])
        for value in observation.values():
            worst[:, :1].copy_(torch.maximum(worst, value))
        return TensorDict({"actor": (worst > 0.9999).float()}, observation.batch_size)


@pytest.mark.full
@pytest.mark.parametrize("kind", [Worst, WorstInPlace])
def test_sensor_whose_effect_is_rare_is_kept(kind):
    names = ("front", "alarm", "unread")
    space = spaces.Dict({name: spaces.Box(0, 1, (1,)) for name in names})
    make = functools.partial(ScriptedEnv, observation_space=space, action_space=box(-1, 1))
    env = stack(make, T.FilterObservation(["front", "alarm"]), kind())
    deployed = tw.deploy(
        env,
        lambda td: td["observation", "actor"].expand(-1, 2),
    )
    assert list(deployed.metadata["observation"]["spaces"]) == ["alarm", "front"]
    raw = {"front": torch.tensor([[1.0], [0.5]]), "alarm": torch.zeros(2, 1)}
    assert deployed(raw).tolist() == [[1, 1], [0, 0]]


@pytest.mark.full
def test_history_that_the_action_does_not_depend_on_is_left_out():
    noise = T.AddNoise(1.0, in_eval=False)
    keys = {"privileged": [frames(4)], "own": [T.ClipObservation(-1, 1), noise]}
    env = stack(sensing, tw.PolicyState({"unread": (2,)}), T.ObservationKeys(keys))

    def act(td):
        td["next", "unread"] = td["unread"] + 1
        return td["observation", "own"][:, :2]

    deployed = tw.deploy(env, act)
    assert deployed.initial_state(1) == {}
    assert deployed({"own": torch.full((2, 3), 1.5)}).tolist() == [[1, 1], [1, 1]]


@pytest.mark.full
def test_entry_that_a_later_action_depends_on_is_kept():
    env = stack(sensing, tw.PolicyState({"last": (2,), "before": (2,)}))

    def act(td):
        td["next", "last"] = td["observation", "own"][:, :2]
        td["next", "before"] = td["last"] * 1
        return td["before"] * 1

    deployed = tw.deploy(env, act)
    state = deployed.initial_state(1)
    actions = []
    for number in (1.0, 2.0, 3.0, 4.0):
        action, state = deployed({"own": torch.full((1, 3), number)}, state)
        actions.append(action[0, 0].item())
    assert actions == [0, 0, 1, 2]


# State.


@pytest.mark.full
def test_metadata_describes_spaces_and_the_state():
    deployed, _ = deployed_stack("a recurrent policy")
    assert deployed.metadata["state"] == {
        "TimeAwareObservation.elapsed": {"shape": [1], "dtype": "int64"},
        "hidden": {"shape": [3], "dtype": "float32"},
        "count": {"shape": [], "dtype": "int64"},
        "is_first": {"shape": [1], "dtype": "bool"},
    }
    assert deployed.initial_state(2)["count"].tolist() == [-1, -1]
    parts = deployed.metadata["observation"]["spaces"]
    discrete = {"type": "Discrete", "shape": [], "dtype": "int64", "n": 3, "start": 1}
    assert parts["position"] == discrete
    numbers = {"type": "MultiDiscrete", "shape": [2], "dtype": "int64", "nvec": [2, 3], "start": 0}
    assert parts["rest"]["spaces"]["1"] == numbers
    action = {"type": "Box", "shape": [6], "dtype": "float32", "low": -1.0, "high": 1.0}
    assert deployed.metadata["action"] == action


class SetGain(T.ActionTransform):
    gain = tw.EnvBuffer((1,), fill=1)

    def setup(self, signature):
        self.gain.fill_(3.0)
        return signature

    def action(self, action):
        return action.mul_(self.gain)


def test_rows_begin_as_setup_leaves_them_and_actions_do_not_share_memory_with_the_state():
    env = stack(continuous, tw.PolicyState({"last": (2,)}), SetGain())

    def act(td):
        td["next", "last"] = action = td["last"] + 1
        return td.set("action", action)

    deployed = tw.deploy(env, act)
    action, state = deployed(torch.ones(1, 3), deployed.initial_state(1))
    assert action.tolist() == [[3, 3]]
    action.zero_()
    assert state["last"].tolist() == [[1, 1]]


# Refusals.


class ClippedNormalization(T.NormalizeObservation):
    def step(self, td):
        td = super().step(td)
        return td.set("observation", td["observation"].clamp(-1, 1))


class Drawing(T.ObservationTransform):
    def observation(self, observation):
        return observation

    def deployed(self):
        raise ValueError("it draws")


def zero(td):
    return torch.zeros(td.batch_size[0], 2)


def grouped(*transforms):
    return T.ObservationGroups({"actor": [*transforms], "critic": []})


@pytest.mark.parametrize(
    ("transforms", "policy", "words"),
    [
        ([ClippedNormalization()], zero, r"ClippedNormalization, .*'step'.*deployed\(\)"),
        ([grouped(ClippedNormalization())], zero, r"ClippedNormalization, .*deployed\(\)"),
        ([grouped(Drawing())], zero, "Drawing, because it draws"),
        ([T.DelayObservation(torch.arange(NUM_ENVS))], zero, "DelayObservation, .*delay"),
        ([tw.PolicyState({"hidden": (1,)})], zero, "hidden"),
    ],
    ids=["hook", "hook in a group", "own", "delays of envs", "unset"],
)
def test_transform_is_refused_by_name(transforms, policy, words):
    with pytest.raises(ValueError, match=words):
        tw.deploy(stack(continuous, *transforms), policy)


class Counts(nn.Module):
    last = 0

    def forward(self, td):
        self.last = self.last + 1
        return td["observation"][:, :2] * self.last


def draw(td):
    return torch.normal(td["observation"][:, :2])


def on_the_host(td):
    return torch.from_numpy(td["observation"].numpy()[:, :2])


SCRIPT = torch.jit.script(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("policy", "kind", "words"),
    [
        (Counts(), ValueError, "same.*PolicyState"),
        (StatefulRnn(3, 2), ValueError, "same.*PolicyState"),
        (draw, TypeError, "policy.*generator.*mode"),
        (on_the_host, ValueError, r"torch\.export.*policy"),
        (lambda td: SCRIPT(td["observation"]), ValueError, "TorchScript"),
        (lambda td: td["info", "speed"], ValueError, "'observation'"),
        (lambda td: td.set("acton", td["observation"][:, :2]), TypeError, "the policy's action"),
        (lambda td: td["observation"], ValueError, "shape"),
        (None, TypeError, "policy"),
    ],
    ids=[
        "counts",
        "lstm",
        "draws",
        "host",
        "script",
        "info",
        "no action",
        "shape",
        "none",
    ],
)
def test_policy_is_refused(policy, kind, words):
    with pytest.raises(kind, match=words):
        tw.deploy(stack(continuous), policy)


def test_wrapper_that_drives_the_env_is_refused_by_name():
    with pytest.raises(ValueError, match="RepeatAction"):
        tw.deploy(W.RepeatAction(continuous(), 3), zero)


def test_env_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="env"):
        tw.deploy(None, zero)


def test_older_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.10.1"))
    with pytest.raises(RuntimeError, match=r"2\.11.*2\.10\.1"):
        tw.deploy(continuous(), zero)


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "words"),
    [
        ("control", lambda raw, state: (raw.double(), state), TypeError, "observation"),
        ("control", lambda raw, state: (raw,), ValueError, "state"),
        ("control", lambda raw, state: (raw, list(state)), TypeError, "state"),
        (
            "control",
            lambda raw, state: (raw, {key: row[:1] for key, row in state.items()}),
            ValueError,
            "state",
        ),
        pytest.param(
            "a recurrent policy",
            lambda raw, state: ({"image": raw}, {}),
            ValueError,
            "image",
            marks=full,
        ),
        ("no state", lambda raw, state: (raw, state), ValueError, "state"),
    ],
    ids=["dtype", "no state", "list", "batch", "keys", "needless state"],
)
def test_wrong_input_is_refused(name, arguments, kind, words):
    deployed, _ = deployed_stack("control")
    inputs, _ = deployed.program.example_inputs
    with pytest.raises(kind, match=words):
        deployed_stack(name)[0](*arguments(*inputs))


@pytest.mark.parametrize("batch_size", [-1, 2.5, "2"])
def test_batch_size_of_an_initial_state_is_checked(batch_size):
    with pytest.raises((TypeError, ValueError), match="batch_size"):
        deployed_stack("control")[0].initial_state(batch_size)


def test_statistics_without_samples_are_reported():
    env = tw.TransformedEnv(continuous(), T.NormalizeObservation())
    with pytest.warns(UserWarning, match="no samples"):
        tw.deploy(env, lambda td: td["observation"][:, :2])
