"""`tw.deploy`: the actions of `evaluate` from raw observations, in eager mode and exported."""

import copy
import functools
import json
import pickle
import threading

import numpy as np
import pytest
import torch
from catalogue import COMPILED, DICT, IMAGE, UNCAPTURED, AddNoise, StatefulRnn
from gymnasium import spaces
from helpers import load_example
from holders import HOLDERS, Holder, on_host
from tensordict import TensorDict
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.random import Stream
from torchwrap.spaces import sample
from torchwrap.testing import ScriptedEnv

NUM_ENVS = 5
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
full = pytest.mark.full


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


def assert_parity(module, run, log, **tolerances):
    """`run`, the module or a program made from it, computes the actions that were recorded."""
    state = module.initial_state(NUM_ENVS)
    assert len(log) > 8
    assert any(bool(first.any()) for _, first, _ in log[1:])
    for raw, first, expected in log:
        if state:
            action, state = run(plain(raw), {**state, "is_first": first})
        else:
            action = run(plain(raw))
        torch.testing.assert_close(action, plain(expected), **tolerances)


def export(module):
    shapes = module.dynamic_shapes()
    return torch.export.export(module, module.example_inputs(), dynamic_shapes=shapes)


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


@full
@pytest.mark.parametrize("name", sorted(CATALOGUE.keys() - DRAWS))
def test_deployed_transform_acts_as_in_evaluate(name):
    env, policy = catalogued(name)
    module = tw.deploy(env, policy)
    assert_parity(module, module, evaluated(env, policy), **EXACT)
    json.dumps(module.metadata, allow_nan=False)


@full
@pytest.mark.parametrize("name", sorted(DRAWS))
def test_transform_that_draws_is_refused(name):
    with pytest.raises(ValueError, match="AddNoise|" + name.partition(" ")[0].strip(",")):
        tw.deploy(*catalogued(name))


# Stacks.


def box(low, high):
    return spaces.Box(*(np.broadcast_to(np.float32(bound), 2) for bound in (low, high)))


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
        return signature.replace(single_observation_space=spaces.Box(-torch.inf, torch.inf, (2, 3)))

    def step(self, td):
        self.average.lerp_(td["observation"], 0.5)
        return td.set("observation", torch.stack([self.average, td["observation"]], 1))

    def reset(self, td, mask):
        mask.assign_(self.average, td["observation"])
        mask.fill_(self.previous, 0)
        return td.set("observation", td["observation"].unsqueeze(1).expand(-1, 2, -1))

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
        *(T.NormalizeObservation(), T.ClipObservation(-1, 1), T.FrameStackObservation(3)),
        T.NormalizeReward(),
    ]


def several_layers(num_envs):
    inner = Recorder(continuous(num_envs))
    return tw.TransformedEnv(inner, T.ClipAction(), T.DelayObservation(1))


def recurrent():
    timed = [T.TimeLimit(4), T.TimeAwareObservation(), T.DiscretizeAction(3)]
    hidden = tw.PolicyState({"hidden": (3,)})
    return [hidden, *timed, tw.PolicyState({"count": ()}, torch.int64, -1)]


def frames(number):
    return T.FrameStackObservation(number)


STACKS = {
    "control": (continuous, control),
    "several layers": (several_layers, lambda: [T.NormalizeObservation(), frames(2)]),
    "images": (pixels, lambda: [T.atari("cleanrl"), T.TimeLimit(9)]),
    "a user's state": (continuous, lambda: [T.ClipAction(), Smooth(), frames(2), frames(2)]),
    "no state": (continuous, lambda: [T.ClipAction(), T.NormalizeObservation(), T.TimeLimit(3)]),
    "initial observations": (continuous, lambda: [T.NormalizeObservation(), MarkInitial()]),
    "delays": (continuous, lambda: [T.ClipAction(), T.DelayAction(1), T.DelayObservation(2)]),
    "a recurrent policy": (functools.partial(ScriptedEnv, observation_space=DICT), recurrent),
}
FAST = ("control", "delays", "a recurrent policy")
SLOW = ("images", "a user's state")
exports = pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=full) for name in SLOW)]
)


@functools.cache
def deployed(name):
    """A module, the record of its env, and the raw observation space."""
    make_env, transforms = STACKS[name]
    env = stack(make_env, *transforms())
    policy = Network(env)
    return tw.deploy(env, policy), evaluated(env, policy), env.unwrapped.single_observation_space


@functools.cache
def exported(name):
    return export(deployed(name)[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=full if name == "images" else ()) for name in STACKS]
)
def test_deployed_stack_acts_as_in_evaluate(name):
    module, log, _ = deployed(name)
    assert len({repr(action) for _, _, action in log}) > 5
    assert_parity(module, module, log, **EXACT)


def assert_equal_everywhere(name, run):
    """`run` gives the recorded actions, and those of the module for several batch sizes."""
    module, log, space = deployed(name)
    large = 50 if name == "images" else 1000  # among more images, some scores are nearly equal
    for batch_size in (1, 2, large):
        stream = Stream(batch_size, seed=batch_size)
        generator = torch.Generator().manual_seed(batch_size)
        state = module.example_inputs(batch_size)[1:]
        for _ in range(4):
            inputs = (plain(sample(space, stream)), *state)
            expected = module(*inputs)
            torch.testing.assert_close(run(*inputs), expected)
            if state:
                first = torch.rand(batch_size, 1, generator=generator) < 0.3
                state = ({**expected[1], "is_first": first},)
    assert_parity(module, run, log)


@pytest.mark.compiles
@exports
def test_exported_program_takes_any_batch_size(name):
    assert_equal_everywhere(name, exported(name).module())


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["control"])
def test_exported_program_for_float32_computes_nothing_in_float64(name):
    values = [node.meta.get("val") for node in exported(name).graph.nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert tensors
    assert torch.float64 not in {value.dtype for value in tensors}


@pytest.mark.compiles
@full
@exports
@pytest.mark.filterwarnings("ignore")  # PyTorch's exporter uses deprecated code
def test_onnx_model_gives_the_same_results_in_onnx_runtime(name, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    module = deployed(name)[0]
    names = module.onnx_names()
    path = tmp_path / "policy.onnx"
    torch.onnx.export(exported(name), dynamo=True, verbose=False, **names).save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == names["input_names"]
    structure = tree_structure(module(*module.example_inputs()))

    def run(*inputs):
        values = [leaf.numpy() for leaf in tree_leaves(inputs)]
        feed = dict(zip(names["input_names"], values, strict=True))
        results = map(torch.from_numpy, session.run(names["output_names"], feed))
        return tree_unflatten(list(results), structure)

    assert_equal_everywhere(name, run)


@pytest.mark.compiles
@pytest.mark.long
@full
@pytest.mark.filterwarnings("ignore")
def test_aot_inductor_compiles_the_same_program(tmp_path):
    name = "a recurrent policy"
    path = str(tmp_path / "policy.pt2")
    path = torch._inductor.aoti_compile_and_package(exported(name), package_path=path)
    assert_equal_everywhere(name, torch._inductor.aoti_load_package(path))


# Copies.


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, td):
        return self.layer(td["observation"])


NETWORK = nn.Linear(3, 2)


def global_act(td, scale=2):
    return NETWORK(td["observation"]) * scale


def encoder_in_a_transform(actor):
    bounds = spaces.Box(-9, 9, (3,))
    return T.TransformObservation(lambda given: actor.layer(given).repeat(1, 2)[:, :3], bounds)


POLICIES = {
    "module": lambda actor: actor,
    "function": lambda actor: lambda td: actor.layer(td["observation"]),
    "method": lambda actor: actor.forward,
    "global function": lambda actor: global_act,
    "transform": lambda actor: lambda td: td["observation"][:, :2],
}
PICKLED = ("module", "method", "global function")  # Python pickles functions by their names


def deploy_with(kind, actor):
    transform = encoder_in_a_transform(actor) if kind == "transform" else T.NormalizeObservation()
    with torch.no_grad():
        env = stack(continuous, transform)
        return env, tw.deploy(env, POLICIES[kind](actor))


@pytest.mark.compiles
@torch.no_grad()
@pytest.mark.parametrize("kind", POLICIES)
def test_later_training_does_not_change_a_deployed_module(kind):
    actor = Actor()
    raw = torch.randn(4, 3)
    env, module = deploy_with(kind, actor)
    before = module(raw)
    for parameter in (actor.layer.weight, NETWORK.weight):
        parameter.add_(1)
    tw.rollout(env, None, 9)  # learns
    assert torch.equal(module(raw), before)
    assert actor.training
    assert actor.layer.weight.requires_grad
    torch.testing.assert_close(export(module).module()(raw), before)
    assert any(key.endswith("weight") for key in module.state_dict())
    assert module.to("meta").example_inputs()[0].device.type == "meta"
    assert actor.layer.weight.device.type == "cpu"


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "replicate"),
    [
        *((kind, copy.deepcopy) for kind in POLICIES),
        *((kind, lambda module: pickle.loads(pickle.dumps(module))) for kind in PICKLED),
    ],
)
def test_copy_of_a_deployed_module_has_its_own_weights(kind, replicate):
    _, module = deploy_with(kind, Actor())
    raw = torch.randn(4, 3)
    before = module(raw)
    twin = replicate(module)
    assert torch.equal(twin(raw), before)
    twin.load_state_dict({key: value + 1 for key, value in twin.state_dict().items()})
    assert not torch.equal(twin(raw), before)
    assert torch.equal(module(raw), before)


def test_policy_that_holds_a_graph_of_gradients_is_copied():
    env = tw.make("Pendulum-v1", 2)
    network = nn.Linear(3, 1)
    mean = network(env.reset(seed=0)["observation"])
    network.latest = torch.distributions.Normal(mean, 1.0)  # as rsl_rl's models keep
    observation = torch.randn(4, 3)
    expected = network(observation).detach()
    module = tw.deploy(env, lambda td: network(td["observation"]))
    assert (module(observation) == expected).all()
    assert network.latest.loc.grad_fn is not None


def network():
    layers = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("reads", [False, True], ids=["", "reads on the host"])
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@torch.no_grad()
def test_module_that_a_function_reaches_is_copied(hold, reads):
    net = network()
    policy = hold(net)
    raw = torch.randn(4, 3)
    expected = policy({"observation": raw})
    module = tw.deploy(stack(continuous), on_host(policy) if reads else policy)
    net[0].weight.add_(1)
    torch.testing.assert_close(module(raw), expected, **EXACT)
    assert any(key.endswith("0.weight") for key in module.state_dict())


def learn(net):
    net.train()
    net(torch.randn(8, 3))


CHANGES = {
    "statistics": learn,
    "mode": nn.Module.train,
    "appended layer": lambda net: net.append(nn.Tanh()),
    "replaced layer": lambda net: setattr(net, "0", nn.Linear(3, 2)),
    "hook": lambda net: net.register_forward_hook(lambda module, args, output: output + 1),
    "attribute": lambda net: setattr(net[1], "eps", 9.0),
    "forward": lambda net: setattr(net, "forward", torch.zeros_like),
}
CHANGED = ("variable", "object", "dict")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("holder", CHANGED)
@torch.no_grad()
def test_later_change_of_a_module_does_not_reach_a_deployed_function(holder, change):
    net = network()
    policy = HOLDERS[holder](net)
    raw = torch.randn(4, 3)
    expected = policy({"observation": raw})
    module = tw.deploy(stack(continuous), policy)
    weights = copy.deepcopy(module.state_dict())
    change(net)
    torch.testing.assert_close(module(raw), expected, **EXACT)
    torch.testing.assert_close(module(raw), expected, **EXACT)
    torch.testing.assert_close(module.state_dict(), weights, **EXACT)


class Moments:
    """Those of a plain object, as of CleanRL and SB3."""

    def __init__(self, number):
        self.mean = np.array([number])
        self.owner = self

    def __getitem__(self, index):
        return self.mean[index]

    def __setitem__(self, index, value):
        self.mean = np.array([value])


DATA = {
    "tensor": lambda number: torch.tensor([number]),
    "array": lambda number: np.array([number]),
    "list": lambda number: [number, None],
    "dict": lambda number: {0: number, "name": "scale"},
    "list of tuples": lambda number: [(number,)],
    "object": Moments,
}


@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_later_value_in_an_object_with_a_module_does_not_reach_a_deployed_function(make):
    agent = Holder(network())
    agent.lock = threading.Lock()  # cannot be copied
    agent.scale = make(2.0)

    raw = torch.ones(4, 3)
    expected = agent.act({"observation": raw}) * torch.as_tensor(agent.scale[0])
    policy = lambda td: agent.act(td) * torch.as_tensor(agent.scale[0])  # noqa: E731
    module = tw.deploy(stack(continuous), policy)
    agent.scale[0] = make(3.0)[0]
    torch.testing.assert_close(module(raw), expected, **EXACT)


def test_later_value_of_a_variable_does_not_reach_a_deployed_function():
    scale = 2
    module = tw.deploy(stack(continuous), lambda td: td["observation"][:, :2] * scale)
    scale = 3
    assert (module(torch.ones(4, 3)) == 2).all()


def test_predict_of_stable_baselines3_is_deployed_with_its_weights():
    sb3 = pytest.importorskip("stable_baselines3")
    model = sb3.PPO("MlpPolicy", "Pendulum-v1", n_steps=8, batch_size=8, device="cpu", verbose=1)
    model.set_logger(sb3.common.logger.configure(None, ["stdout"]))  # which cannot be copied
    raw = torch.randn(5, 3)
    expected, _ = model.predict(raw.numpy(), deterministic=True)

    def act(td):
        action, _ = model.predict(td["observation"].numpy(), deterministic=True)
        return torch.as_tensor(action)

    module = tw.deploy(tw.make("Pendulum-v1", 2), act)
    with torch.no_grad():
        model.policy.action_net.bias.add_(1)
    np.testing.assert_array_equal(module(raw), expected)
    assert any(key.endswith("action_net.bias") for key in module.state_dict())


class Shared:
    network = nn.Linear(3, 2)


def of_a_lock():
    agent = Holder(None)
    agent.lock = threading.Lock()
    return lambda td: agent.part or td["observation"][:, :2]


FUNCTIONS = [global_act]  # copy.deepcopy leaves functions as they are


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        pytest.param(lambda td: FUNCTIONS[0](td), "module.*bound method", id="list of functions"),
        pytest.param(of_a_lock(), "Holder.*lock.*bound method", id="lock"),
        pytest.param(
            lambda td: Shared.network(td["observation"]), "module.*bound method", id="class"
        ),
    ],
)
def test_function_whose_variables_cannot_be_copied_is_refused(policy, words):
    with pytest.raises(TypeError, match=words):
        tw.deploy(stack(continuous), policy)


@pytest.mark.parametrize("name", ["no state", "control"])
@pytest.mark.parametrize("wrap", [lambda module: module, nn.Sequential], ids=["alone", "inside"])
def test_torchscript_is_refused(name, wrap):
    module = deployed(name)[0]
    with pytest.raises(TypeError, match=r"torch\.jit"):
        torch.jit.trace(wrap(module), module.example_inputs()[:1])


class ReadsCritic(nn.Module):
    """Computes with dtype, device and shape of a critic, but not with its values."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(3, 2)
        self.critic = nn.Linear(7, 2, dtype=torch.float64)

    def forward(self, td):
        weight = next(self.critic.parameters())
        scale = torch.ones(weight.shape[:1], dtype=weight.dtype, device=self.critic.bias.device)
        return self.actor(td["observation"]) * scale.float()


def in_a_function(module):
    return lambda td: module(td)


@pytest.mark.compiles
@pytest.mark.parametrize("hold", [lambda module: module, in_a_function], ids=["module", "function"])
@torch.no_grad()
def test_weights_whose_values_no_action_depends_on_stay(hold):
    policy = ReadsCritic()
    module = tw.deploy(stack(continuous), hold(policy))
    raw = torch.randn(4, 3)
    expected = policy({"observation": raw})
    torch.testing.assert_close(module(raw), expected, **EXACT)
    torch.testing.assert_close(export(module).module()(raw), expected)


# Observations that the policy reads.

SENSORS = spaces.Dict(
    own=spaces.Box(-9, 9, (3,)),
    privileged=spaces.Box(-9, 9, (5,)),
    gear=spaces.Discrete(2, start=1),
)
STACKED = "ObservationGroups.parts.actor.FrameStackObservation.histories.0.frames"


def grouped_env():
    actor = [T.FilterObservation(["own"]), T.FlattenObservation(), frames(2)]
    critic = [T.FilterObservation(["privileged"]), T.FlattenObservation(), AddNoise()]
    make = functools.partial(ScriptedEnv, observation_space=SENSORS, action_space=box(-3, (1, 2)))
    groups = T.ObservationGroups({"actor": actor, "critic": critic})
    return stack(make, T.ClipAction(), groups)


def act_on_group(td):
    return NETWORK(td["observation", "actor"].flatten(1)[:, -3:])


def test_groups_that_the_policy_does_not_read_are_left_out():
    env = grouped_env()
    module = tw.deploy(env, act_on_group, observations=["actor"])
    raw, state = module.example_inputs()
    assert list(raw) == list(module.metadata["observation"]["spaces"]) == ["own"]
    assert list(state) == [STACKED, "is_first"]
    log = evaluated(env, act_on_group)
    log = [(given.select("own"), first, action) for given, first, action in log]
    assert_parity(module, module, log, **EXACT)


@pytest.mark.compiles
def test_exported_file_holds_no_weights_of_a_critic_that_is_not_deployed(tmp_path):
    agent = nn.ModuleDict({"actor": nn.Linear(3, 2), "critic": nn.Linear(5, 1)})
    actor = agent["actor"]
    module = tw.deploy(
        grouped_env(),
        lambda td: actor(td["observation", "actor"][:, -1]),
        observations=["actor"],
    )
    path = tmp_path / "policy.pt2"
    torch.export.save(export(module), path)
    weights = [part.weight.detach().numpy().tobytes() for part in agent.values()]
    assert [weight in path.read_bytes() for weight in weights] == [True, False]


def test_raw_entries_of_a_dict_that_the_policy_does_not_read_are_left_out():
    make = functools.partial(ScriptedEnv, observation_space=SENSORS, action_space=box(-3, (1, 2)))
    module = tw.deploy(
        stack(make), lambda td: td["observation", "own"][:, :2], observations=["own"]
    )
    action = module({"own": torch.full((2, 3), 0.5)})
    assert (action == 0.5).all()


def test_transformed_entries_of_a_dict_that_the_policy_does_not_read_are_left_out():
    make = functools.partial(ScriptedEnv, observation_space=SENSORS, action_space=box(-3, (1, 2)))
    keys = {"own": [T.ClipObservation(-1, 1)], "privileged": [T.ClipObservation(-2, 2)]}
    env = stack(make, T.ObservationKeys(keys))
    module = tw.deploy(env, lambda td: td["observation", "own"][:, :2], observations=["own"])
    assert list(module.example_inputs()[0]) == ["own"]
    assert (module({"own": torch.full((2, 3), 1.5)}) == 1).all()


def test_history_of_an_entry_that_the_policy_does_not_read_is_left_out():
    make = functools.partial(ScriptedEnv, observation_space=SENSORS, action_space=box(-3, (1, 2)))
    clip = T.ObservationKeys({"own": [T.ClipObservation(-1, 1)]})
    env = stack(make, T.ObservationKeys({"privileged": [frames(4)]}), clip)
    module = tw.deploy(env, lambda td: td["observation", "own"][:, :2], observations=["own"])
    assert list(module.example_inputs()[0]) == ["own"]
    assert module.initial_state(1) == {}


def test_transformed_entry_that_another_one_depends_on_is_kept():
    class Join(T.ObservationTransform):
        def observation(self, observation):
            own = observation["own"] + observation["privileged"][..., :1]
            return observation.copy().set("own", own)

    make = functools.partial(ScriptedEnv, observation_space=SENSORS, action_space=box(-3, (1, 2)))
    keys = {"own": [T.ClipObservation(-1, 1)], "privileged": [T.ClipObservation(-2, 2)]}
    env = stack(make, T.ObservationKeys(keys), Join())
    module = tw.deploy(env, lambda td: td["observation", "own"][:, :2], observations=["own"])
    assert sorted(module.example_inputs()[0]) == ["own", "privileged"]


@pytest.mark.parametrize("observations", ["own", [], ["other"]], ids=["text", "none", "unknown"])
def test_observations_that_the_env_does_not_have_are_refused(observations):
    with pytest.raises(ValueError, match="observations"):
        tw.deploy(grouped_env(), act_on_group, observations=observations)


def test_policy_that_reads_other_observations_is_refused():
    with pytest.raises(ValueError, match=r"policy .*actor"):
        tw.deploy(grouped_env(), act_on_group, observations=["critic"], without=[AddNoise])


# What users write.


def act_plainly(td):
    return td["observation"][:, :2]


class SetGain(T.ActionTransform):
    gain = tw.EnvBuffer((1,), fill=1)

    def setup(self, signature):
        self.gain.fill_(3.0)
        return signature

    def action(self, action):
        return action * self.gain


class RegisteredGain(T.ActionTransform):
    def setup(self, signature):
        self.register_env_buffer("gain", torch.full((signature.num_envs, 1), 3.0))
        return signature

    def action(self, action):
        return action * self.gain


@pytest.mark.parametrize("kind", [SetGain, RegisteredGain])
def test_rows_begin_as_setup_leaves_them(kind):
    module = tw.deploy(stack(continuous, kind()), act_plainly)
    action, _ = module(torch.ones(1, 3), module.initial_state(1))
    assert action.tolist() == [[3, 3]]


def test_action_transform_that_writes_to_its_input_leaves_the_state_of_the_policy():
    double = T.TransformAction(lambda action: action.mul_(2))
    env = stack(continuous, tw.PolicyState({"last": (2,)}), double)

    def act(td):
        td["next", "last"] = action = td["last"] + 1
        return td.set("action", action)

    module = tw.deploy(env, act)
    action, state = module(torch.ones(1, 3), module.initial_state(1))
    action.zero_()
    assert state["last"].tolist() == [[1, 1]]
    assert module(torch.ones(1, 3), state)[0].tolist() == [[4, 4]]


def test_fixed_delay_starts_over_from_any_state():
    module = tw.deploy(stack(continuous, T.DelayObservation(2)), act_plainly)
    zeros = {name: torch.zeros_like(row) for name, row in module.initial_state(1).items()}
    zeros["is_first"] = ~zeros["is_first"]
    states = [zeros, module.initial_state(1)]
    for number in range(5):
        raw = torch.full((1, 3), float(number))
        (action, states[0]), (expected, states[1]) = (module(raw, state) for state in states)
        assert action.equal(expected)


def test_module_stays_in_eval_mode_inside_of_another_one():
    network = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    module = tw.deploy(continuous(), lambda td: network(td["observation"]))
    nn.ModuleList([module]).train()
    assert not any(part.training for part in module.modules())


class Minimum(T.ObservationTransform):
    def setup(self, signature):
        return signature.replace(single_observation_space=spaces.Box(0, 20, (2,)))

    def observation(self, observation):
        return torch.stack(list(observation.values())).amin(0)


class Joined(Minimum):
    def setup(self, signature):
        return signature.replace(single_observation_space=spaces.Box(-torch.inf, torch.inf, (8,)))

    def observation(self, observation):
        return torch.cat(list(observation.values()), 1)


ENTRIES = {
    "seldom the least": ({"front": (1, 2), "rear": (20, 2)}, Minimum),
    "of several shapes": ({"front": (1, 3), "rear": (1, 5)}, Joined),
}


@pytest.mark.parametrize("bounds, kind", ENTRIES.values(), ids=ENTRIES)
def test_entry_that_a_transform_reads_without_its_name_is_kept(bounds, kind):
    space = {name: spaces.Box(0, high, (size,)) for name, (high, size) in bounds.items()}
    make = functools.partial(ScriptedEnv, observation_space=spaces.Dict(space))
    make = functools.partial(make, action_space=box(-3, 2))
    env = stack(make, T.ObservationGroups({"actor": [kind()], "critic": []}))
    act = lambda td: td["observation", "actor"][:, :2]  # noqa: E731
    module = tw.deploy(env, act, observations=["actor"])
    assert list(module.example_inputs()[0]) == ["front", "rear"]


def test_groups_below_others_of_the_same_names_are_kept():
    names = {"actor": [], "critic": []}
    join = T.TransformObservation(
        lambda both: both["actor"] + both["critic"], spaces.Box(-torch.inf, torch.inf, (3,))
    )
    env = stack(continuous, T.ObservationGroups(names), join, T.ObservationGroups(names))
    act = lambda td: td["observation", "actor"][:, :2]  # noqa: E731
    module = tw.deploy(env, act, observations=["actor"])
    assert module(torch.ones(1, 3)).tolist() == [[2, 2]]  # groups alone need no state


def test_groups_whose_entries_a_function_above_joins_are_kept():
    def join(both):
        return TensorDict({"actor": both["actor"] + both["critic"]}, both.batch_size)

    space = spaces.Dict(actor=spaces.Box(-torch.inf, torch.inf, (3,)))
    groups = T.ObservationGroups({"actor": [], "critic": []})
    env = stack(continuous, groups, T.TransformObservation(join, space))
    act = lambda td: td["observation", "actor"][:, :2]  # noqa: E731
    module = tw.deploy(env, act, observations=["actor"])
    assert module(torch.ones(1, 3)).tolist() == [[2, 2]]


def test_recurrent_policy_may_return_its_action_in_a_new_tensordict():
    env = stack(continuous, tw.PolicyState({"type": (2,)}))  # the name of a module's method

    def act(td):
        td["next", "type"] = td["type"] + 1
        return TensorDict({"action": td["observation"][:, :2] + td["type"]}, td.batch_size)

    module = tw.deploy(env, act)
    assert_parity(module, module, evaluated(env, act), **EXACT)


def test_function_reads_its_attributes_and_its_keyword_defaults():
    network = nn.Linear(3, 2)

    def push(observation):
        return network(observation)

    def act(td, *, function=push):
        return function(td["observation"]) * act.scale * push.scale

    act.scale = push.scale = 2.0
    module = tw.deploy(continuous(), act)
    expected = module(torch.ones(1, 3))
    with torch.no_grad():
        network.weight.zero_()
    assert module(torch.ones(1, 3)).equal(expected)


# Refusals.


class ClippedNormalization(T.NormalizeObservation):
    def step(self, td):
        td = super().step(td)
        return td.set("observation", td["observation"].clamp(-1, 1))


class Penalized(T.RewardTransform):
    def step(self, td):
        return td.set("observation", td["observation"] / 2)


@pytest.mark.parametrize("kind", [ClippedNormalization, Penalized])
def test_hook_of_a_subclass_needs_its_own_replacement(kind):
    env = stack(continuous, kind())
    with pytest.raises(ValueError, match=rf"{kind.__name__}, because .*'step'.*deployed\(\)"):
        tw.deploy(env, act_plainly)


def in_a_list():
    shift = torch.ones(3)
    functions = [lambda observation: observation + shift]

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.functions = functions

        def forward(self, td):
            return self.functions[0](td["observation"])[:, :2]

    return Listed()


def in_a_plain_object():
    class Shift:
        def __init__(self):
            self.value = torch.ones(3)
            self.lock = threading.Lock()

    class Agent:
        def __init__(self):
            self.network = nn.Linear(3, 2)
            self.shift = Shift()

        def act(self, td):
            return self.network(td["observation"] + self.shift.value)

    return Agent().act


@pytest.mark.parametrize("value", [torch.device("cpu"), torch.float32, {1}, range(2), nn.Tanh])
def test_tensor_of_a_plain_object_with_constants_is_frozen(value):
    agent = in_a_plain_object().__self__
    agent.shift.lock = value
    module = tw.deploy(continuous(), agent.act)
    expected = module(torch.ones(1, 3))
    agent.shift.value.add_(5)
    assert module(torch.ones(1, 3)).equal(expected)


@pytest.mark.parametrize("make", [in_a_list, in_a_plain_object])
def test_tensor_that_would_not_be_frozen_is_refused(make):
    with pytest.raises(TypeError, match=r"\(3,\) torch.float32.* not copied"):
        tw.deploy(continuous(), make())


def test_policy_whose_state_is_an_array_is_refused():
    class Difference(nn.Module):
        last = None

        def forward(self, td):
            current = td["observation"][:, :2].numpy()
            if self.last is None:
                self.last = current
            change = current - self.last
            self.last = current.copy()
            return torch.from_numpy(change)

    with pytest.raises(ValueError, match="PolicyState"):
        tw.deploy(continuous(), Difference())


@pytest.mark.parametrize("batch_size", [-1, 2.5, "2"])
def test_batch_size_of_an_initial_state_is_checked(batch_size):
    module = tw.deploy(stack(continuous, frames(2)), lambda td: td["observation"][:, 0, :2])
    with pytest.raises((TypeError, ValueError), match="batch_size"):
        module.initial_state(batch_size)


def test_state_that_is_no_dict_is_refused():
    module = tw.deploy(stack(continuous, frames(2)), lambda td: td["observation"][:, 0, :2])
    with pytest.raises(TypeError, match="state"):
        module(torch.ones(1, 3), [torch.ones(1)])


def test_transform_that_cannot_be_deployed_is_part_of_a_group():
    class Drawing(T.ObservationTransform):
        def observation(self, observation):
            return observation

        def deployed(self):
            raise ValueError("it draws")

    tw.TransformedEnv(continuous(), T.ObservationGroups({"actor": [Drawing()]})).reset()


class ReadsReward(T.Transform):
    def step(self, td):
        return td.set("observation", td["observation"] + td["reward"])


class SharesState(T.Transform):
    def setup(self, signature):
        self.register_buffer("total", torch.zeros(3))
        return signature

    def step(self, td):
        self.total += td["observation"].sum(0)
        return td.set("observation", td["observation"] - self.total)


class Counts(nn.Module):
    last = 0

    def forward(self, td):
        self.last = self.last + 1
        return td["observation"][:, :2] * self.last


ENV = continuous()


def zero(td):
    return torch.zeros(td.batch_size[0], 2)


def double_state(td):
    td["next", "hidden"] = td["hidden"].double()
    return td.set("action", zero(td))


@pytest.mark.parametrize(
    ("policy", "kind", "words"),
    [
        pytest.param(Counts(), ValueError, "same", id="keeps state"),
        pytest.param(
            lambda td: torch.normal(td["observation"][:, :2]), TypeError, "generator", id="draws"
        ),
        pytest.param(lambda td: td["observation"], ValueError, "shape", id="shape"),
        pytest.param(StatefulRnn(3, 2), ValueError, "PolicyState", id="lstm"),
        pytest.param(StatefulRnn(3, 2, nn.GRU), ValueError, "PolicyState", id="gru"),
        pytest.param(lambda td: ENV.sample_action(), TypeError, "policy", id="env"),
        pytest.param(lambda td: td["observation"].numpy(), TypeError, "ndarray", id="array"),
        pytest.param(nn.Linear(4, 1), TypeError, 'policy.*"observation"', id="takes no TensorDict"),
    ],
)
def test_policy_is_refused(policy, kind, words):
    with pytest.raises(kind, match=words):
        tw.deploy(stack(continuous), policy)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["lstm", "gru"])
def test_policy_whose_state_has_the_rows_of_its_training_is_refused(kind):
    policy = StatefulRnn(3, 2, kind)
    policy(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
    with pytest.raises(ValueError, match=r"got \[1, 5, 2\].*PolicyState"):
        tw.deploy(stack(continuous), policy)


@pytest.mark.parametrize(
    ("transform", "policy", "words"),
    [
        pytest.param(ReadsReward, zero, "ReadsReward.*reward", id="reads the reward"),
        pytest.param(
            lambda: T.DelayObservation(torch.arange(NUM_ENVS)), zero, "DelayObservation", id="delay"
        ),
        pytest.param(SharesState, zero, "SharesState.total", id="rows share state"),
        pytest.param(lambda: tw.PolicyState({"hidden": (1,)}), zero, "hidden", id="unset state"),
        pytest.param(
            lambda: tw.PolicyState({"hidden": (1,)}), double_state, "hidden", id="state's dtype"
        ),
    ],
)
def test_transform_is_refused_by_name(transform, policy, words):
    with pytest.raises(ValueError, match=words):
        tw.deploy(stack(continuous, transform()), policy)


def test_everything_that_cannot_be_deployed_is_named_at_once():
    groups = T.ObservationGroups({"a": [AddNoise()], "b": []})
    delay = T.DelayObservation(torch.arange(NUM_ENVS))
    repeating = W.RepeatAction(continuous(), 3)
    env = tw.TransformedEnv(repeating, T.StickyAction(0.5), delay, groups)
    with pytest.raises(ValueError, match="without") as raised:
        tw.deploy(env, zero)
    text = str(raised.value)
    names = json.loads(text[text.index("without=") + 8 : text.index("`,")])
    assert set(names) == {"AddNoise", "StickyAction", "DelayObservation", "RepeatAction"}


def test_wrapper_that_drives_the_env_is_refused_by_name():
    with pytest.raises(ValueError, match="RepeatAction"):
        tw.deploy(W.RepeatAction(ENV, 3), zero)


def test_env_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="env"):
        tw.deploy(None, zero)


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "words"),
    [
        ("control", lambda raw, state: (raw.double(), state), TypeError, "observation"),
        ("control", lambda raw, state: (raw[0, 0], state), ValueError, r"shape.*\[None\]"),
        ("control", lambda raw, state: (raw.numpy(), state), TypeError, r"ndarray.*as_tensor"),
        ("control", lambda raw, state: (raw,), ValueError, "state"),
        (
            "control",
            lambda raw, state: (raw, {key: row[:1] for key, row in state.items()}),
            ValueError,
            "state",
        ),
        ("a recurrent policy", lambda raw, state: ({"image": raw}, {}), TypeError, "image"),
        ("no state", lambda raw, state: (raw, state), ValueError, "state"),
    ],
    ids=["dtype", "shape", "array", "no state", "batch of the state", "keys", "needless state"],
)
def test_wrong_input_of_a_module_is_refused(name, arguments, kind, words):
    raw, state = deployed("control")[0].example_inputs()
    with pytest.raises(kind, match=words):
        deployed(name)[0](*arguments(raw, state))


# Parts that are left out.


def test_without_leaves_out_named_parts_also_inside_of_groups():
    quiet_groups = {"a": [frames(2)], "b": []}
    noisy = stack(
        continuous,
        T.StickyAction(0.5),
        T.ObservationGroups({"a": [AddNoise(), frames(2)], "b": []}),
    )
    quiet = stack(continuous, T.ObservationGroups(quiet_groups))
    policy = Network(quiet)
    module = tw.deploy(noisy, policy, without=["StickyAction", AddNoise])
    assert_parity(module, module, evaluated(quiet, policy), **EXACT)


@pytest.mark.parametrize(
    "transform",
    [T.DelayAction(1), T.LowPassAction(0.5), T.RateLimitAction(0.25)],
    ids=["delay", "low pass", "rate limit"],
)
def test_transform_that_counts_repeated_actions_has_to_be_left_out_too(transform):
    env = W.RepeatAction(tw.TransformedEnv(continuous(), T.ClipAction(), transform), 3)
    with pytest.raises(ValueError, match="RepeatAction"):
        tw.deploy(env, zero, without=["RepeatAction"])
    module = tw.deploy(env, zero, without=["RepeatAction", type(transform)])
    assert module.metadata["transforms"] == ["ClipAction()"]


def test_transform_in_a_group_that_changes_the_space_cannot_be_left_out():
    command = T.CommandObservation(-1, 1, None)
    env = stack(continuous, T.ObservationGroups({"actor": [command], "critic": []}))
    with pytest.raises(ValueError, match="CommandObservation"):
        tw.deploy(env, zero, without=["CommandObservation"])


def test_noise_that_is_left_out_keeps_the_transforms_below():
    env = stack(continuous, T.ClipObservation(-1, 1), T.AddNoise(0.1))
    module = tw.deploy(env, lambda td: td["observation"][:, :2], without=["AddNoise"])
    assert module(torch.full((1, 3), 5.0)).tolist() == [[1, 1]]


def gray_env():
    transforms = (T.GrayscaleObservation(), T.DtypeObservation("float32"), frames(2))
    return stack(functools.partial(ScriptedEnv, observation_space=IMAGE), *transforms)


def test_without_a_transform_the_module_takes_the_space_above_it():
    env = gray_env()
    described = tw.deploy(env, Network(env), without=["GrayscaleObservation"]).metadata
    assert described["observation"]["shape"] == [4, 4]
    assert described["observation"]["high"] == 255


@pytest.mark.parametrize(
    ("without", "kind"),
    [(["DtypeObservation"], ValueError), ("AddNoise", TypeError), (["Clip"], ValueError)],
    ids=["space changed below", "text", "unknown"],
)
def test_without_parts_that_cannot_be_left_out_is_refused(without, kind):
    env = gray_env()
    with pytest.raises(kind, match="without"):
        tw.deploy(env, Network(env), without=without)


def test_noise_in_training_alone_is_left_out():
    env = tw.TransformedEnv(ScriptedEnv(2, observation_shape=(1,)), T.AddNoise(1.0, in_eval=False))
    policy = nn.Linear(1, env.single_action_space.shape[0])
    module = tw.deploy(env, lambda td: policy(td["observation"]))
    assert (module(torch.ones(3, 1)) == policy(torch.ones(3, 1))).all()
    assert not module.initial_state(3)


def test_statistics_without_samples_are_reported():
    env = tw.TransformedEnv(continuous(), T.NormalizeObservation())
    with pytest.warns(UserWarning, match="no samples"):
        tw.deploy(env, lambda td: td["observation"][:, :2])


# Metadata.


def test_metadata_names_the_state_with_shapes_and_dtypes():
    assert deployed("a recurrent policy")[0].metadata["state"] == {
        "TimeAwareObservation.elapsed": {"shape": [1], "dtype": "int64"},
        "hidden": {"shape": [3], "dtype": "float32"},
        "count": {"shape": [], "dtype": "int64"},
        "is_first": {"shape": [1], "dtype": "bool"},
    }


def test_metadata_describes_spaces():
    metadata = deployed("a recurrent policy")[0].metadata
    parts = metadata["observation"]["spaces"]
    discrete = {"type": "Discrete", "shape": [], "dtype": "int64", "n": 3, "start": 1}
    assert parts["position"] == discrete
    numbers = {"type": "MultiDiscrete", "shape": [2], "dtype": "int64", "nvec": [2, 3], "start": 0}
    assert parts["rest"]["spaces"]["1"] == numbers
    action = {"type": "Box", "shape": [6], "dtype": "float32", "low": -1.0, "high": 1.0}
    assert metadata["action"] == action


def test_metadata_lists_the_transforms_that_are_kept():
    names = [
        text.partition("(")[0] for text in deployed("a recurrent policy")[0].metadata["transforms"]
    ]
    assert names == ["TimeAwareObservation", "DiscretizeAction"]


def test_metadata_leaves_out_transforms_and_groups_that_are_not_deployed():
    actor = [AddNoise(), T.ClipObservation(-9, 9), T.AddNoise(0.1, in_eval=False)]
    critic = [T.ClipObservation(-1, 1)]
    env = stack(
        continuous,
        T.AddNoise(0.1, in_eval=False),
        T.ObservationGroups({"actor": actor, "critic": critic}),
    )
    policy = lambda td: td["observation", "actor"][:, :2]  # noqa: E731
    module = tw.deploy(env, policy, observations=["actor"], without=[AddNoise])
    clip = repr(actor[1])
    groups = f"ObservationGroups(groups={{'actor': [{clip}]}})"
    assert module.metadata["transforms"] == [groups]


def test_initial_state_of_a_policy_is_its_fill():
    assert deployed("a recurrent policy")[0].initial_state(2)["count"].tolist() == [-1, -1]


@pytest.mark.compiles
@pytest.mark.long
@full
def test_example_plays_the_same_episodes_in_a_process_that_imports_only_torch(tmp_path):
    threads = torch.get_num_threads()
    load_example("ppo")  # the script imports it from its own folder
    script = load_example("deploy")
    here, there = script.main(script.Args(total_timesteps=4096, num_episodes=3, out=tmp_path))
    torch.set_num_threads(threads)
    assert here == there
    assert len(there) == 3


def test_deployed_policy_takes_the_command_from_the_caller():
    command = T.CommandObservation([-1.0], [1.0], None, flatten=False)
    env = tw.TransformedEnv(ScriptedEnv(2, (2,)), command, T.FlattenObservation())
    act = lambda td: td["observation"][:, -1:].expand(-1, 6)  # noqa: E731
    module = tw.deploy(env, act, without=["CommandObservation"])
    given = torch.tensor([[0.25], [-0.5]])
    action = module({"obs": torch.zeros(2, 2), "command": given})
    assert torch.equal(action, given.expand(-1, 6))
