"""`tw.deploy`: the actions of `evaluate` from raw observations, in eager mode and exported; and what it refuses, by name."""

import copy
import functools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from catalogue import COMPILED, DICT, IMAGE, UNCAPTURED, AddNoise
from gymnasium import spaces
from helpers import load_example
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.random import Stream
from torchwrap.spaces import sample
from torchwrap.testing import ScriptedEnv

NUM_ENVS = 5


class Recorder(tw.Wrapper):
    """Keeps what a deployed policy would be given at each step, and the action that the env received."""

    is_passive = True

    def __init__(self, env):
        super().__init__(env)
        self.start()

    def start(self):
        self.raw, self.first, self.log = None, torch.zeros(self.num_envs, 1, dtype=torch.bool), []

    def _step(self, action):
        self.log.append((self.raw, self.first, action.clone()))
        successor = self.env._step(action)
        self.raw, self.first = successor["observation"].clone(), torch.zeros_like(self.first)
        return successor

    def _reset(self, mask, options=None):
        td = self.env._reset(mask, options)
        self.raw = (
            td["observation"].clone()
            if self.raw is None
            else mask.where(td["observation"], self.raw)
        )
        self.first = self.first | mask.column
        return td


class Network(nn.Module):
    """A deterministic policy for any spaces, whose actions differ from row to row and from step to step."""

    def __init__(self, env):
        super().__init__()
        self.space, self.recurrent = env.single_action_space, env.signature.policy_state
        size = spaces.flatdim(self.space) if isinstance(self.space, spaces.Box) else 1
        inputs = self.features(env.reset().exclude("action")["observation"]).shape[1]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(inputs, size)

    def features(self, observation):
        leaves = (
            observation.values(True, True) if isinstance(observation, TensorDict) else [observation]
        )
        return torch.cat([leaf.reshape(leaf.shape[0], -1).float() for leaf in leaves], 1)

    def forward(self, td):
        features = self.features(td["observation"])
        features = (
            features.sign() * features.abs().log1p()
        )  # of similar size, whatever the transforms are
        for name in self.recurrent:
            features = features + td[name].reshape(features.shape[0], -1)[:, :1].float()
            td["next", name] = td[name] + 1
        push = torch.sin(self.layer(features))
        if isinstance(self.space, spaces.Box):
            scale = 1.0 if self.space.is_bounded() else 1.5  # what ClipAction is for
            return td.set("action", scale * push.view(-1, *self.space.shape))
        return td.set(
            "action", (push[:, 0].abs() * 300).long() % int(self.space.n) + int(self.space.start)
        )


def stack(make_env, *transforms):
    env = tw.TransformedEnv(Recorder(make_env(NUM_ENVS)), *transforms)
    tw.rollout(env, None, 7)  # so that statistics have something to freeze
    return env


def recorder_of(env):
    return [module for module in env.modules() if isinstance(module, Recorder)][-1]  # the innermost


def evaluated(env, policy, episodes=15):
    """What the env and the policy did in whole episodes: raw observations, first steps, actions."""
    recorder_of(env).start()
    tw.evaluate(env, policy, episodes, seed=3)
    return recorder_of(env).log


def plain(value):
    return value if isinstance(value, torch.Tensor) else value.to_dict()


def assert_parity(module, run, log, **tolerances):
    """`run`, the module or a program made from it, computes the actions that were recorded."""
    state = module.initial_state(NUM_ENVS)
    assert len(log) > 8 and any(bool(first.any()) for _, first, _ in log[1:])
    for raw, first, expected in log:
        result = run(plain(raw), {**state, "is_first": first}) if state else run(plain(raw))
        action, state = result if state else (result, state)
        torch.testing.assert_close(action, plain(expected), **tolerances)


EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
REFUSED = {
    **{name: name for name in ("AddWhiteNoise", "ObstructView", "StickyAction", "AddNoise")},
    **dict.fromkeys(("ObservationGroups", "ObservationKeys"), "AddNoise"),
    "AddNoise of torchwrap": "AddNoise",
    "DelayObservation, drawn": "DelayObservation",
    "DelayAction": "DelayAction",
}


def of_dicts(td):
    push, gear = (
        torch.sin(td["observation", "image"][:, 0].float()),
        td["observation", "position"] - 2,
    )
    return TensorDict({"push": push, "gear": gear}, td.batch_size)


@pytest.mark.full
def test_every_transform_is_deployed_with_the_actions_of_evaluate_or_refused_by_name():
    for name, (make, make_env) in {**COMPILED, **UNCAPTURED}.items():
        env = stack(make_env, make())
        policy = of_dicts if isinstance(env.single_action_space, spaces.Dict) else Network(env)
        if name in REFUSED:
            with pytest.raises(
                ValueError,
                match=rf"^deploy cannot use {REFUSED[name]}, because it draws random numbers",
            ):
                tw.deploy(env, policy)
            continue
        module = tw.deploy(env, policy)
        assert_parity(
            module,
            module,
            evaluated(env, policy),
            msg=lambda text, name=name: f"{name}: {text}",
            **EXACT,
        )
        json.dumps(module.metadata, allow_nan=False)


def box(low, high):
    return spaces.Box(*(np.broadcast_to(np.float32(bound), 2) for bound in (low, high)))


def continuous(num_envs=NUM_ENVS):
    return ScriptedEnv(num_envs, (3,), action_space=box(-3, (1, 2)))


class Smooth(T.Transform):
    """A user's transform with state, which changes observations and actions."""

    average = tw.EnvBuffer((3,), fill=5)
    previous = tw.EnvBuffer((2,))

    def step(self, td):
        self.average.lerp_(td["observation"], 0.5)
        return td.set("observation", torch.stack([self.average, td["observation"]], 1))

    def reset(self, td, mask):
        mask.assign_(self.average, td["observation"])
        mask.fill_(self.previous, 0)
        return td.set("observation", td["observation"].unsqueeze(1).expand(-1, 2, -1))

    def setup(self, signature):
        return signature.replace(single_observation_space=spaces.Box(-torch.inf, torch.inf, (2, 3)))

    def action(self, action):
        self.previous.copy_(0.5 * self.previous + 0.5 * action)
        return self.previous.clone()


class MarkInitial(T.Transform):
    """Stateless, but a reset computes another thing than a step."""

    def step(self, td):
        return td.set("observation", td["observation"] * 0.5)

    def reset(self, td, mask):
        return td.set("observation", torch.ones_like(td["observation"]))


def control():
    normal = [T.NormalizeObservation(), T.ClipObservation(-1, 1), T.FrameStackObservation(3)]
    return [
        T.RescaleAction(-1, 1),
        T.ClipAction(),
        T.RecordEpisodeStatistics(),
        *normal,
        T.NormalizeReward(),
    ]


def timed():
    return [T.TimeLimit(4), T.TimeAwareObservation(), T.DiscretizeAction(3)]


STACKS = {
    "control": (continuous, control),
    "several layers": (
        lambda n: tw.TransformedEnv(Recorder(continuous(n)), T.ClipAction(), T.DelayObservation(1)),
        lambda: [T.NormalizeObservation(), T.FrameStackObservation(2)],
    ),
    "images": (
        lambda n: ScriptedEnv(
            n,
            observation_space=spaces.Box(0, 255, (90, 100, 3), "uint8"),
            action_space=spaces.Discrete(9),
        ),
        lambda: [T.atari("cleanrl"), T.TimeLimit(9)],
    ),
    "a user's state": (
        continuous,
        lambda: [T.ClipAction(), Smooth(), T.FrameStackObservation(2), T.FrameStackObservation(2)],
    ),
    "no state": (
        continuous,
        lambda: [T.ClipAction(), T.NormalizeObservation(), T.TimeLimit(3), T.ClipReward(-1, 1)],
    ),
    "initial observations": (continuous, lambda: [T.NormalizeObservation(), MarkInitial()]),
    "a recurrent policy": (
        functools.partial(ScriptedEnv, observation_space=DICT),
        lambda: [
            tw.PolicyState({"hidden": (3,)}),
            *timed(),
            tw.PolicyState({"count": ()}, torch.int64, -1),
        ],
    ),
}
FAST = ("control", "a recurrent policy")
EXPORTED = [
    *FAST,
    *(pytest.param(name, marks=pytest.mark.full) for name in ("images", "a user's state")),
]


@functools.cache
def deployed(name):
    """A module, what was recorded of its env, and the raw observation space."""
    make_env, transforms = STACKS[name]
    env = stack(make_env, *transforms())
    policy = Network(env)
    return tw.deploy(env, policy), evaluated(env, policy), env.unwrapped.single_observation_space


@functools.cache
def exported(name):
    module = deployed(name)[0]
    return torch.export.export(
        module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes()
    )


@pytest.mark.parametrize("name", [name for name in STACKS if name != "images"] + EXPORTED[2:3])
def test_stacks_are_deployed_with_the_actions_of_evaluate(name):
    module, log, _ = deployed(name)
    assert len({repr(action) for _, _, action in log}) > 5
    assert_parity(module, module, log, **EXACT)


def assert_equal_everywhere(name, run):
    """`run` gives the recorded actions, and what the module gives for several batch sizes, with initial steps in between."""
    module, log, space = deployed(name)
    for batch_size in (
        1,
        2,
        50 if name == "images" else 1000,
    ):  # of whose scores a few of a thousand are nearly equal
        stream, generator = (
            Stream(batch_size, seed=batch_size),
            torch.Generator().manual_seed(batch_size),
        )
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
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_take_any_batch_size(name):
    assert_equal_everywhere(name, exported(name).module())
    if name not in ("images", "a recurrent policy"):  # float32 observations
        values = [node.meta.get("val") for node in exported(name).graph.nodes]
        assert [
            value
            for value in values
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64
        ] == []


@pytest.mark.compiles
@pytest.mark.full
@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.filterwarnings("ignore")  # PyTorch's exporter uses what it has deprecated
def test_onnx_models_give_the_same_results_in_onnx_runtime(name, tmp_path):
    _, _, onnxruntime = (
        pytest.importorskip(library) for library in ("onnx", "onnxscript", "onnxruntime")
    )
    module = deployed(name)[0]
    names = module.onnx_names()
    program = torch.onnx.export(exported(name), dynamo=True, verbose=False, **names)
    program.save(tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "policy.onnx", providers=["CPUExecutionProvider"]
    )
    assert [value.name for value in session.get_inputs()] == names["input_names"]
    structure = torch.utils._pytree.tree_structure(module(*module.example_inputs()))

    def run(*inputs):
        values = [leaf.numpy() for leaf in torch.utils._pytree.tree_leaves(inputs)]
        results = session.run(
            names["output_names"], dict(zip(names["input_names"], values, strict=True))
        )
        return torch.utils._pytree.tree_unflatten(list(map(torch.from_numpy, results)), structure)

    assert_equal_everywhere(name, run)


@pytest.mark.compiles
@pytest.mark.long
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_aot_inductor_compiles_the_same_program(tmp_path):
    name = "a recurrent policy"
    path = torch._inductor.aoti_compile_and_package(
        exported(name), package_path=str(tmp_path / "policy.pt2")
    )
    assert_equal_everywhere(name, torch._inductor.aoti_load_package(path))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, td):
        return self.layer(td["observation"])


NETWORK = nn.Linear(3, 2)


def global_act(td, scale=2):
    return NETWORK(td["observation"]) * scale


@pytest.mark.compiles
@torch.no_grad()
def test_later_training_and_other_weights_of_a_copy_change_no_deployed_module():
    env, actor, encoder, raw = (
        stack(continuous, T.NormalizeObservation()),
        Actor(),
        nn.Linear(3, 3),
        torch.randn(4, 3),
    )
    encoded = stack(
        continuous,
        T.TransformObservation(lambda given: encoder(given).detach(), spaces.Box(-9, 9, (3,))),
    )
    made = {
        "module": tw.deploy(env, actor),
        "function": tw.deploy(env, lambda td: actor.layer(td["observation"])),
        "default": tw.deploy(env, lambda td, layer=actor.layer: layer(td["observation"])),
        "method": tw.deploy(env, actor.forward),
        "global function": tw.deploy(env, global_act),
        "transform": tw.deploy(encoded, lambda td: td["observation"][:, :2]),
    }
    before = {name: module(raw) for name, module in made.items()}
    for network in (actor, encoder, NETWORK):
        next(network.parameters()).add_(1)
    tw.rollout(env, None, 9)  # the statistics are frozen
    for name, module in made.items():
        duplicates = [copy.deepcopy(module)]
        if name in (
            "module",
            "method",
            "global function",
        ):  # Python pickles functions by their names
            duplicates.append(pickle.loads(pickle.dumps(module)))
        for duplicate in duplicates:
            assert torch.equal(duplicate(raw), before[name]), name
            duplicate.load_state_dict(
                {key: value + 1 for key, value in duplicate.state_dict().items()}
            )
            assert not torch.equal(duplicate(raw), before[name]), name
        assert (
            torch.equal(module(raw), before[name])
            and actor.training
            and actor.layer.weight.requires_grad
        )
        assert any(key.endswith("weight") for key in module.state_dict())
        program = torch.export.export(
            module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes()
        )
        torch.testing.assert_close(program.module()(raw), module(raw))
    assert (
        made["function"].to("meta").example_inputs()[0].device.type
        == "meta"
        != actor.layer.weight.device.type
    )


def test_torchscript_is_refused_by_name():
    for name in ("no state", "control"):
        module = deployed(name)[0]
        for outer in (module, nn.Sequential(module)):
            with pytest.raises(
                TypeError, match=r"^This deployed policy cannot be .* by torch.jit.* `torch.export"
            ):
                torch.jit.trace(outer, module.example_inputs()[:1])


class ActorCritic(nn.Module):
    """With a critic that is called, or is not, and its own recurrent network."""

    def __init__(self, calls_critic):
        super().__init__()
        self.actor, self.critic, self.calls_critic = nn.Linear(3, 2), nn.Linear(4, 1), calls_critic
        self.memory = nn.GRU(5, 4, batch_first=True)

    def forward(self, td):
        if self.calls_critic:
            td["value"] = self.critic(
                self.memory(td["observation", "critic"].unsqueeze(1))[0][:, 0]
            )
        return td.set("action", self.actor(td["observation", "actor"].flatten(1)[:, -3:]))


@pytest.mark.compiles
def test_what_no_action_depends_on_is_neither_an_input_nor_in_the_file(tmp_path):
    groups = {
        "actor": [T.FilterObservation(["own"]), T.FlattenObservation(), T.FrameStackObservation(2)],
        "critic": [
            T.FilterObservation(["privileged"]),
            T.FlattenObservation(),
            T.NormalizeObservation(),
        ],
    }
    space = spaces.Dict(
        own=spaces.Box(-9, 9, (3,)),
        privileged=spaces.Box(-9, 9, (5,)),
        gear=spaces.Discrete(2, start=1),
    )
    make_env = functools.partial(ScriptedEnv, observation_space=space, action_space=box(-3, (1, 2)))
    env = stack(make_env, T.ClipAction(), T.ObservationGroups(groups))
    for calls_critic in (False, True):
        agent = ActorCritic(calls_critic)
        for policy in (agent, lambda td, agent=agent: agent(td)["action"]):
            module, log = tw.deploy(env, policy), evaluated(env, policy)
            raw, state = module.example_inputs()
            assert list(raw) == list(module.metadata["observation"]["spaces"]) == ["own"]
            assert list(state) == [
                "ObservationGroups.parts.actor.FrameStackObservation.histories.0.frames",
                "is_first",
            ]
            assert {name.split(".")[-2] for name in module.state_dict()} == {"actor"}
            log = [(given.select("own"), first, action) for given, first, action in log]
            assert_parity(module, module, log, **EXACT)
    program = torch.export.export(module, (raw, state), dynamic_shapes=module.dynamic_shapes())
    assert_parity(module, program.module(), log)
    torch.export.save(program, tmp_path / "policy.pt2")
    weights = [agent.actor.weight, agent.critic.weight, agent.memory.weight_ih_l0]
    in_file = [
        weight.detach().numpy().tobytes() in (tmp_path / "policy.pt2").read_bytes()
        for weight in weights
    ]
    assert in_file == [True, False, False]


def relay(td):  # the observation reaches the action two steps later
    for name, value in (("a", td["observation", "own"]), ("b", td["a"]), ("unread", td["b"])):
        td["next", name] = value.clone()
    return td.set("action", td["b"][:, :2])


def test_what_reaches_an_action_through_other_states_only_is_an_input():
    space = spaces.Dict(own=spaces.Box(-9, 9, (3,)), unread=spaces.Box(-9, 9, (5,)))
    make_env = functools.partial(ScriptedEnv, observation_space=space, action_space=box(-9, 9))
    env = stack(make_env, tw.PolicyState({"a": (3,), "b": (3,), "unread": (3,)}))
    raw, state = tw.deploy(env, relay).example_inputs()
    assert list(raw) == ["own"] and list(state) == ["a", "b", "is_first"]


class Reads(T.Transform):
    def step(self, td):
        return td.set("observation", td["observation"] + td["reward"])


class SharesState(T.Transform):
    def setup(self, signature):
        self.register_buffer("total", torch.zeros(3))
        return signature

    def step(self, td):
        self.total += td["observation"].sum(0)
        return td.set("observation", td["observation"] - self.total)


class Remembers(nn.Module):
    last = 0

    def forward(self, td):
        self.last = self.last + 1
        return td["observation"][:, :2] * self.last


def zero(td):
    return torch.zeros(td.batch_size[0], 2)


def doubled(td):
    return zero(td) * FACTOR


FACTOR, LAYERS = torch.ones(1), [nn.Linear(3, 2)]
ENV, CLIP = continuous(), T.ClipAction
HIDDEN = functools.partial(tw.PolicyState, {"hidden": (1,)})


def test_what_cannot_be_deployed_and_wrong_inputs_are_refused_by_name():
    def on(*transforms, policy=zero, **arguments):
        return lambda: tw.deploy(stack(continuous, *transforms), policy, **arguments)

    def double(td):
        return td.set(("next", "hidden"), td["hidden"].double()).set("action", zero(td))

    module, nested, stateless = (
        deployed(name)[0] for name in ("control", "a recurrent policy", "no state")
    )
    raw, state = module.example_inputs()
    for call, kind, message in [
        (on(policy=Remembers()), ValueError, "two calls differ.* Declare state with PolicyState"),
        (
            on(policy=lambda td: torch.normal(td["observation"][:, :2])),
            TypeError,
            "drew from .*generator: take the mode",
        ),
        (
            on(policy=lambda td: td["observation"]),
            ValueError,
            r"the env's actions of shape \(2, 2\) .*got \(2, 3\)",
        ),
        (on(policy=lambda td: LAYERS[0](td["observation"])), TypeError, "such as one in a list"),
        (on(policy=doubled), TypeError, "the tensor 'FACTOR': make the policy an nn.Module"),
        (
            on(policy=lambda td: ENV.sample_action()),
            TypeError,
            "^deploy needs a callable policy that contains no Env",
        ),
        (
            on(policy=lambda td: td["observation"].numpy()),
            TypeError,
            "a policy that returns tensors, but got ndarray",
        ),
        (
            on(policy=nn.Linear(4, 1)),
            TypeError,
            "needs a policy that takes a TensorDict, .* but got Linear, which raised",
        ),
        (
            lambda: tw.deploy(None, zero),
            TypeError,
            "an Env as its first argument, but got NoneType",
        ),
        (on(Reads()), ValueError, r"Reads, because it reads .*reward.* Set `is_passive = True`"),
        (
            on(T.DelayObservation(torch.arange(5))),
            ValueError,
            "DelayObservation, because its delay depends on the env",
        ),
        (on(SharesState()), ValueError, r"they change \['transforms.SharesState.total'\]"),
        (
            lambda: tw.deploy(W.RepeatAction(ENV, 3), zero),
            ValueError,
            r"RepeatAction, because it drives.*without=",
        ),
        (
            on(HIDDEN()),
            ValueError,
            r'the state of the policy in \("next", "hidden"\), but got None',
        ),
        (
            on(HIDDEN(), policy=double),
            ValueError,
            r'"hidden"\) of shape \(5, 1\) torch.float32, but got .*torch.float64',
        ),
        (
            on(CLIP(), without="ClipAction"),
            TypeError,
            "without as a list of names or classes, but got 'ClipAction'",
        ),
        (on(CLIP(), without=["Clip"]), ValueError, r"\['ClipAction', 'Recorder'\], but got 'Clip'"),
        (lambda: module(raw.double(), state), TypeError, "an observation of dtype torch.float32"),
        (lambda: module(raw[0, 0], state), ValueError, r"an observation of shape .* but got \(\)"),
        (
            lambda: nested({"image": raw}, {}),
            TypeError,
            r"with keys \['image', 'position', 'rest'\], but got",
        ),
        (
            lambda: module(raw, module.initial_state(1)),
            ValueError,
            r"\(2, 3, 3\).*but got .*\(1, 3, 3\)",
        ),
        (lambda: module(raw), TypeError, "got no state: start with `module.initial_state"),
        (lambda: stateless(raw, state), ValueError, "needs a state with {}, but got"),
    ]:
        with pytest.raises(kind, match=message):
            call()


def test_without_leaves_out_what_is_named_also_inside_of_groups():
    groups = T.ObservationGroups({"a": [AddNoise(), T.FrameStackObservation(2)], "b": []})
    noisy = stack(continuous, T.StickyAction(0.5), groups)
    quiet = stack(continuous, T.ObservationGroups({"a": [T.FrameStackObservation(2)], "b": []}))
    policy = Network(quiet)
    module = tw.deploy(noisy, policy, without=["StickyAction", AddNoise])
    assert_parity(module, module, evaluated(quiet, policy), **EXACT)


def test_parts_that_change_spaces_can_be_left_out_where_nothing_below_them_does():
    pixels = functools.partial(ScriptedEnv, observation_space=IMAGE)
    env = stack(
        pixels, T.GrayscaleObservation(), T.DtypeObservation("float32"), T.FrameStackObservation(2)
    )
    module = tw.deploy(env, Network(env), without=["GrayscaleObservation"])
    assert (
        module.metadata["observation"]["shape"] == [4, 4]
        and module.metadata["observation"]["high"] == 255
    )
    message = r"cannot leave out DtypeObservation, because a transform below it changes the observation: leave that one out"
    with pytest.raises(ValueError, match=message):
        tw.deploy(env, Network(env), without=["DtypeObservation"])


def test_metadata_describes_spaces_state_and_transforms():
    metadata = deployed("a recurrent policy")[0].metadata
    assert metadata["state"] == {
        "TimeAwareObservation.elapsed": {"shape": [1], "dtype": "int64"},
        "hidden": {"shape": [3], "dtype": "float32"},
        "count": {"shape": [], "dtype": "int64"},
        "is_first": {"shape": [1], "dtype": "bool"},
    }
    parts = metadata["observation"]["spaces"]
    assert parts["position"] == {
        "type": "Discrete",
        "shape": [],
        "dtype": "int64",
        "n": 3,
        "start": 1,
    }
    numbers = {"type": "MultiDiscrete", "shape": [2], "dtype": "int64", "nvec": [2, 3], "start": 0}
    assert parts["rest"]["spaces"]["1"] == numbers
    assert metadata["action"] == {
        "type": "Box",
        "shape": [6],
        "dtype": "float32",
        "low": -1.0,
        "high": 1.0,
    }
    assert [text.partition("(")[0] for text in metadata["transforms"]] == [
        "TimeAwareObservation",
        "DiscretizeAction",
    ]
    assert list(deployed("a recurrent policy")[0].initial_state(2)["count"]) == [-1, -1]
    assert list(deployed("a user's state")[0].metadata["state"]) == [
        *("Smooth.average", "Smooth.previous", "FrameStackObservation.histories.0.frames"),
        *("FrameStackObservation_2.histories.0.frames", "is_first"),
    ]


@pytest.mark.compiles
@pytest.mark.full
def test_the_example_plays_the_same_episodes_in_a_process_that_imports_only_torch(tmp_path):
    threads = torch.get_num_threads()
    load_example("ppo")  # the script imports it from its own folder
    script = load_example("deploy")
    assert len(Path(script.__file__).read_text().splitlines()) < 120
    here, there = script.main(script.Args(total_timesteps=4096, num_episodes=3, out=tmp_path))
    torch.set_num_threads(threads)
    assert here == there and len(there) == 3


def test_a_policy_that_holds_a_graph_of_gradients_is_copied():
    env, network = tw.make("Pendulum-v1", 2), nn.Linear(3, 1)
    network.latest = torch.distributions.Normal(
        network(env.reset(seed=0)["observation"]), 1.0
    )  # as rsl_rl's models keep
    observation = torch.randn(4, 3)
    expected = network(observation).detach()
    module = tw.deploy(env, lambda td: network(td["observation"]))
    assert (module(observation) == expected).all() and network.latest.loc.grad_fn is not None


def test_noise_in_training_alone_is_left_out():
    env = tw.TransformedEnv(ScriptedEnv(2, observation_shape=(1,)), T.AddNoise(1.0, in_eval=False))
    policy = nn.Linear(1, env.single_action_space.shape[0])
    module = tw.deploy(env, lambda td: policy(td["observation"]))
    assert (module(torch.ones(3, 1)) == policy(torch.ones(3, 1))).all()
    assert [*dict(module.named_buffers())] == ["start.is_first"]
