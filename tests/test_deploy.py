"""`tw.deploy`: the actions of `evaluate` from raw observations, in eager mode and exported; and what it refuses, by name."""

import functools
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from catalogue import COMPILED, DICT, IMAGE, UNCAPTURED, AddNoise
from gymnasium import spaces
from helpers import load_example
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap._deploy import checks
from torchwrap.testing import ScriptedEnv

NUM_ENVS = 5


class Recorder(tw.Wrapper):
    """Keeps what a deployed policy would be given at each step, and the action that the env received."""

    is_passive = True

    def __init__(self, env):
        super().__init__(env)
        self.raw, self.first, self.log = None, torch.zeros(env.num_envs, 1, dtype=torch.bool), []

    def _step(self, action):
        self.log.append((self.raw, self.first, action.clone()))
        successor = self.env._step(action)
        self.raw, self.first = successor["observation"].clone(), torch.zeros_like(self.first)
        return successor

    def _reset(self, mask, options=None):
        td = self.env._reset(mask, options)
        initial = td["observation"].clone()
        self.raw = initial if self.raw is None else mask.where(initial, self.raw)
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
        leaves = observation.values(True, True) if isinstance(observation, TensorDict) else [observation]
        return torch.cat([leaf.reshape(leaf.shape[0], -1).float() for leaf in leaves], 1)

    def forward(self, td):
        features = self.features(td["observation"])
        features = features.sign() * features.abs().log1p()  # of similar size, whatever the transforms are
        for name in self.recurrent:
            features = features + td[name].reshape(features.shape[0], -1)[:, :1].float()
            td["next", name] = td[name] + 1
        push = torch.sin(self.layer(features))
        if isinstance(self.space, spaces.Box):
            scale = 1.0 if self.space.is_bounded() else 1.5  # what ClipAction is for
            return td.set("action", scale * push.view(-1, *self.space.shape))
        return td.set("action", (push[:, 0].abs() * 300).long() % int(self.space.n) + int(self.space.start))


def stack(make_env, *transforms, num_envs=NUM_ENVS):
    env = tw.TransformedEnv(Recorder(make_env(num_envs)), *transforms)
    tw.rollout(env, None, 7)  # so that statistics have something to freeze
    return env


def recorder_of(env):
    return [module for module in env.modules() if isinstance(module, Recorder)][-1]  # the innermost


def evaluated(env, policy, episodes=20):
    """What the env and the policy did in whole episodes: raw observations, first steps, actions."""
    recorder = recorder_of(env)
    recorder.raw, recorder.log = None, []
    recorder.first.zero_()
    tw.evaluate(env, policy, episodes, seed=3)
    return recorder.log


def plain(value):
    return value if isinstance(value, torch.Tensor) else value.to_dict()


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return set(first) == set(second) and all(equal(first[key], second[key]) for key in first)


def actions_of(module, log, state):
    """The actions of a module, or of a program made from it, for what was recorded."""
    actions = []
    for raw, first, _ in log:
        if state:
            action, state = module(plain(raw), {**state, "is_first": first})
        else:
            action = module(plain(raw))
        actions.append(action)
    return actions


def assert_parity(module, log, exactly=True):
    state = module.initial_state(NUM_ENVS)
    assert len(log) > 8 and any(bool(first.any()) for _, first, _ in log[1:])
    for action, (_, _, expected) in zip(actions_of(module, log, state), log, strict=True):
        if exactly:
            assert equal(action, plain(expected))
        else:
            torch.testing.assert_close(action, plain(expected))


REFUSED = {
    "AddWhiteNoise": "AddWhiteNoise",
    "ObstructView": "ObstructView",
    "StickyAction": "StickyAction",
    "AddNoise": "AddNoise",
    "ObservationGroups": "AddNoise",
}
CATALOGUE = {**COMPILED, **UNCAPTURED}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_transform_is_deployed_with_the_actions_of_evaluate_or_refused_by_name(name):
    make, make_env = CATALOGUE[name]
    env = stack(make_env, make())
    if isinstance(env.single_action_space, spaces.Dict):
        policy = lambda td: TensorDict(  # noqa: E731
            {"push": torch.sin(td["observation"]["image"][:, 0].float()), "gear": td["observation"]["position"] - 2},
            td.batch_size,
        )
    else:
        policy = Network(env)
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"^deploy needs .* but got {REFUSED[name]}\(.*draws random numbers"):
            tw.deploy(env, policy)
        return
    module = tw.deploy(env, policy)
    assert_parity(module, evaluated(env, policy))
    json.dumps(module.metadata, allow_nan=False)


def box(low, high):
    return spaces.Box(*(np.broadcast_to(np.float32(bound), 2) for bound in (low, high)))


def continuous(num_envs):
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
    return [T.RescaleAction(-1, 1), T.ClipAction(), T.RecordEpisodeStatistics(), *normal, T.NormalizeReward()]


STACKS = {
    "control": (continuous, control),
    "several layers": (
        lambda n: tw.TransformedEnv(
            W.Wrapper(tw.TransformedEnv(Recorder(continuous(n)), T.ClipAction(), T.DelayObservation(1)))
        ),
        lambda: [T.NormalizeObservation(), T.FrameStackObservation(2)],
    ),
    "images": (
        lambda n: ScriptedEnv(n, observation_space=spaces.Box(0, 255, (90, 100, 3), "uint8"), action_space=spaces.Discrete(9)),
        lambda: [T.atari("cleanrl"), T.TimeLimit(30)],
    ),
    "a user's state": (continuous, lambda: [T.ClipAction(), Smooth(), T.FrameStackObservation(2), T.FrameStackObservation(2)]),
    "no state": (continuous, lambda: [T.ClipAction(), T.NormalizeObservation(), T.TimeLimit(3), T.ClipReward(-1, 1)]),
    "initial observations": (continuous, lambda: [T.NormalizeObservation(), MarkInitial()]),
    "a recurrent policy": (
        functools.partial(ScriptedEnv, observation_space=DICT),
        lambda: [
            T.PolicyState({"hidden": (3,)}),
            T.TimeLimit(4),
            T.TimeAwareObservation(),
            T.PolicyState({"count": ()}, torch.int64, -1),
            T.DiscretizeAction(3),
        ],
    ),
    "numbers": (
        lambda n: ScriptedEnv(n, observation_space=box(0, (0.3, 7)), action_space=box(-1, 2)),
        lambda: [T.DiscretizeAction((3, 7), multidiscrete=False), T.DiscretizeObservation((10, 7), multidiscrete=True)],
    ),
}


@functools.cache
def deployed(name):
    """A module, and what was recorded of its env."""
    make_env, transforms = STACKS[name]
    env = stack(make_env, *transforms())
    policy = Network(env)
    return tw.deploy(env, policy), evaluated(env, policy)


@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_deployed_with_the_actions_of_evaluate(name):
    module, log = deployed(name)
    assert len({repr(action) for _, _, action in log}) > 5
    assert_parity(module, log)


def exported(module):
    return torch.export.export(module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes())


def assert_equal_for_batches(module, run):
    """`run(inputs)` gives what the module gives, for several batch sizes, over a few steps with initial ones in between."""
    for batch_size in (1, 2, 7):
        generator = torch.Generator().manual_seed(batch_size)
        inputs = module.example_inputs(batch_size)
        for _ in range(4):
            observation = torch.utils._pytree.tree_map(functools.partial(noise_like, generator), inputs[0])
            inputs = (observation, *inputs[1:])
            expected, found = module(*inputs), run(inputs)
            torch.testing.assert_close(found, expected)
            if len(inputs) == 2:
                first = torch.rand(batch_size, 1, generator=generator) < 0.3
                inputs = (observation, {**expected[1], "is_first": first})


def noise_like(generator, leaf):
    if leaf.dtype.is_floating_point:
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
    return torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.dtype) + (leaf > 0).to(leaf.dtype)


EXPORTED = [
    "control",
    "a recurrent policy",
    *(pytest.param(name, marks=pytest.mark.full) for name in STACKS if name not in ("control", "a recurrent policy")),
]


@pytest.mark.compiles
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_take_any_batch_size(name):
    module, log = deployed(name)
    program = exported(module)
    assert_equal_for_batches(module, lambda inputs: program.module()(*inputs))
    state = module.initial_state(NUM_ENVS)
    for action, (_, _, expected) in zip(actions_of(program.module(), log, state), log, strict=True):
        torch.testing.assert_close(action, plain(expected))
    if name not in ("images", "a recurrent policy"):  # float32 observations
        values = [node.meta.get("val") for node in program.graph.nodes]
        assert [value for value in values if isinstance(value, torch.Tensor) and value.dtype == torch.float64] == []


@pytest.mark.compiles
@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.filterwarnings("ignore")  # PyTorch's exporter uses what it has deprecated
def test_onnx_models_give_the_same_results_in_onnx_runtime(name, tmp_path):
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library)
    import onnxruntime

    module, log = deployed(name)
    names = module.onnx_names()
    program = torch.onnx.export(exported(module), dynamo=True, verbose=False, **names)
    program.model.metadata_props["torchwrap"] = json.dumps(module.metadata)
    program.save(tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == names["input_names"]
    assert json.loads(session.get_modelmeta().custom_metadata_map["torchwrap"]) == module.metadata
    structure = torch.utils._pytree.tree_structure(module(*module.example_inputs()))

    def run(*inputs):
        values = [leaf.numpy() for leaf in torch.utils._pytree.tree_leaves(inputs)]
        results = session.run(names["output_names"], dict(zip(names["input_names"], values, strict=True)))
        return torch.utils._pytree.tree_unflatten(list(map(torch.from_numpy, results)), structure)

    assert_equal_for_batches(module, lambda inputs: run(*inputs))
    state = module.initial_state(NUM_ENVS)
    for action, (_, _, expected) in zip(actions_of(run, log, state), log, strict=True):
        torch.testing.assert_close(action, plain(expected))


@pytest.mark.compiles
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["control", "images", "a recurrent policy"])
def test_aot_inductor_compiles_the_same_program(name, tmp_path):
    module, log = deployed(name)
    path = torch._inductor.aoti_compile_and_package(exported(module), package_path=str(tmp_path / "policy.pt2"))
    run = torch._inductor.aoti_load_package(path)
    assert_equal_for_batches(module, lambda inputs: run(*inputs))
    state = module.initial_state(NUM_ENVS)
    for action, (_, _, expected) in zip(actions_of(run, log, state), log, strict=True):
        torch.testing.assert_close(action, plain(expected))


LOADING = """
import json, sys, torch
files = {"metadata.json": ""}
module = torch.export.load(sys.argv[1], extra_files=files).module()
metadata = json.loads(files["metadata.json"])
log = torch.load(sys.argv[2])
state = {
    name: torch.zeros(log["raw"].shape[1], *entry["shape"], dtype=getattr(torch, entry["dtype"]))
    for name, entry in metadata["state"].items()
}
for raw, first, action in zip(log["raw"], log["first"], log["action"]):
    found, state = module(raw, {**state, "is_first": first})
    torch.testing.assert_close(found, action)
assert not {"torchwrap", "tensordict", "gymnasium"} & set(sys.modules), sys.modules.keys()
print(metadata["observation"]["shape"], metadata["action"]["high"])
"""


@pytest.mark.compiles
def test_a_process_that_imports_only_torch_loads_and_runs_the_program(tmp_path):
    module, log = deployed("control")
    files = {"metadata.json": json.dumps(module.metadata)}
    torch.export.save(exported(module), tmp_path / "policy.pt2", extra_files=files)
    values = {key: torch.stack(each) for key, each in zip(("raw", "first", "action"), zip(*log, strict=True), strict=True)}
    torch.save(values, tmp_path / "log.pt")
    command = [sys.executable, "-c", LOADING, str(tmp_path / "policy.pt2"), str(tmp_path / "log.pt")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "[3] [1.0, 2.0]\n"), result.stderr


def test_later_training_does_not_change_a_deployed_policy_and_its_parameters_are_in_the_state_dict():
    env = stack(continuous, T.NormalizeObservation())
    outer = nn.Linear(3, 2)

    class Holder:
        def __init__(self):
            self.network = nn.Linear(3, 2)

        def act(self, td):
            return self.network(td["observation"])

    holder, module = Holder(), nn.Sequential(nn.Linear(3, 2))
    policies = [
        lambda td: outer(td["observation"]),
        holder.act,
        functools.partial(lambda net, td: net(td["observation"]), module),
    ]
    for policy, layer in zip(policies, (outer, holder.network, module[0]), strict=True):
        made = tw.deploy(env, policy)
        raw = torch.randn(4, 3)
        before = made(raw)
        assert any(torch.equal(value, layer.weight) for value in made.state_dict().values())
        with torch.no_grad():
            layer.weight.add_(1)
        tw.rollout(env, None, 9)
        assert torch.equal(made(raw), before)
        assert not torch.equal(tw.deploy(env, policy)(raw), before)


GLOBAL = nn.Linear(3, 2)


class CallsGlobal:
    """Reaches a global module by a function in an attribute."""

    def __init__(self):
        self.head = lambda observation: GLOBAL(observation)

    def __call__(self, td):
        return self.head(td["observation"])


def keyword_default(td, *, network=GLOBAL):
    return network(td["observation"])


@torch.no_grad()
def decorated(td):
    return GLOBAL(td["observation"])


IN_FUNCTIONS = {
    "global": lambda td: GLOBAL(td["observation"]),
    "function in a function": lambda td: (lambda observation: GLOBAL(observation))(td["observation"]),
    "generator": lambda td: sum(GLOBAL(observation) for observation in [td["observation"]]),
    "keyword-only default": keyword_default,
    "decorated": decorated,
    "partial": functools.partial(lambda scale, td: scale * GLOBAL(td["observation"]), 2.0),
    "dict of functions": (lambda heads: lambda td: heads["a"](td["observation"]))({"a": lambda given: GLOBAL(given)}),
    "function in an object": CallsGlobal(),
    "function in a module": TensorDictModule(lambda observation: GLOBAL(observation), ["observation"], ["action"]),
}


@pytest.mark.parametrize("name", IN_FUNCTIONS)
def test_modules_in_functions_are_copied_too(name):
    made = tw.deploy(stack(continuous), IN_FUNCTIONS[name])
    raw = torch.randn(4, 3)
    before = made(raw)
    with torch.no_grad():
        GLOBAL.weight.add_(1)
    assert torch.equal(made(raw), before) and len(made.state_dict()) == 2
    assert GLOBAL.training and all(parameter.requires_grad for parameter in GLOBAL.parameters())
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_modules_in_functions_of_transforms_are_copied_too():
    encoder = nn.Linear(3, 3)
    env = stack(continuous, T.TransformObservation(lambda given: encoder(given).detach(), spaces.Box(-9, 9, (3,))))
    made = tw.deploy(env, lambda td: td["observation"][:, :2])
    raw = torch.randn(4, 3)
    before = made(raw)
    with torch.no_grad():
        encoder.weight.add_(1)
    assert torch.equal(made(raw), before) and len(made.state_dict()) == 2
    assert made.to("meta").example_inputs()[0].device.type == "meta"


class MethodOfAGlobal:
    def __call__(self, td):
        return GLOBAL(td["observation"])


def test_parameters_that_cannot_be_copied_are_refused_and_left_as_they_are():
    library = types.ModuleType("library")
    library.network = GLOBAL
    for policy in (MethodOfAGlobal(), lambda td: library.network(td["observation"])):
        with pytest.raises(
            ValueError, match=r"^deploy needs .* parameters that it could not, one of shape \(2, 3\) in aten.t"
        ):
            tw.deploy(stack(continuous), policy)
        assert GLOBAL.training and GLOBAL.weight.requires_grad


def test_a_policy_that_sets_its_state_may_return_a_bare_action():
    def policy(td):
        td["next", "count"] = td["count"] + 1
        return td["count"].expand(-1, 2)

    made = tw.deploy(stack(continuous, T.PolicyState({"count": (1,)})), policy)
    actions, state = [], made.initial_state(1)
    for _ in range(3):
        action, state = made(torch.zeros(1, 3), state)
        actions.append(action[0, 0].item())
    assert actions == [0, 1, 2]


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


class Draws(T.ObservationTransform):
    def observation(self, observation):
        return observation + torch.randn(3)


class ChangesReward(tw.Wrapper):
    def _step(self, action):
        return self.env._step(action)


class Remembers(nn.Module):
    last = 0

    def forward(self, td):
        self.last = self.last + 1
        return td["observation"][:, :2] * self.last


def zero(td):
    return torch.zeros(td.batch_size[0], 2)


REFUSALS = {
    "reads the reward": (
        lambda: stack(continuous, ReadsReward()),
        zero,
        r"ReadsReward\(\), which reads what only the env has \(key .reward",
    ),
    "shared state": (lambda: stack(continuous, SharesState()), zero, r"SharesState\(\), which writes the buffer 'total'"),
    "PyTorch's random numbers": (
        lambda: stack(continuous, Draws()),
        zero,
        r"Draws\(\), which draws random numbers by aten.randn",
    ),
    "RepeatAction": (
        lambda: stack(lambda n: W.RepeatAction(continuous(n), 3)),
        zero,
        r"RepeatAction\(num_repeats=3\), which dr",
    ),
    "a wrapper": (lambda: tw.TransformedEnv(ChangesReward(continuous(2))), zero, r"ChangesReward\(\), which drives the env"),
    "a policy that samples": (
        lambda: stack(continuous),
        lambda td: torch.normal(td["observation"][:, :2]),
        r"a deterministic policy, but got one that draws random numbers by aten.normal",
    ),
    "a policy with state": (lambda: stack(continuous), Remembers(), "a policy without state of its own, but got .*last"),
    "an action of another shape": (
        lambda: stack(continuous),
        lambda td: td["observation"],
        r"actions end up in Box\(-3.0, \[1. 2.\], .*got \(3,\) torch.float32",
    ),
    "a next state of another dtype": (
        lambda: stack(continuous, T.PolicyState({"hidden": (1,)})),
        lambda td: td.set(("next", "hidden"), td["hidden"].double()).set("action", zero(td)),
        r'sets \("next", "hidden"\) as PolicyState declares, but got \(2, 1\) torch.float64 for \(2, 1\) torch.float32',
    ),
    "no next state": (lambda: stack(continuous, T.PolicyState({"hidden": (1,)})), zero, r'sets \("next", "hidden"\)'),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_deployed_is_refused_by_name(name):
    make_env, policy, message = REFUSALS[name]
    with pytest.raises(ValueError, match=f"^deploy needs .*{message}"):
        tw.deploy(make_env(), policy)


def test_arguments_of_the_wrong_kind_are_refused():
    env = stack(continuous, T.ClipAction())
    for arguments, message in [
        ((None, zero), "an Env first, but got NoneType"),
        ((env, None), "a policy as an nn.Module .*, but got None"),
        ((env, lambda td: env.sample_action()), "a policy without an env, but got .*"),
        ((env, lambda td: td["observation"][:, :2].numpy()), "a policy that returns tensors, but got ndarray"),
        ((env, zero, "ClipAction"), "a list of names or classes as without, but got 'ClipAction'"),
        ((env, zero, [3]), "names or classes of transforms and wrappers in without, but got 3"),
    ]:
        with pytest.raises(TypeError, match=f"^deploy needs {message}"):
            tw.deploy(*arguments[:2], **dict(zip(["without"], arguments[2:], strict=False)))
    with pytest.raises(ValueError, match=r"among those of the env, \['ClipAction', 'Recorder'\], but got 'Clip'"):
        tw.deploy(env, zero, without=["Clip"])


def test_without_leaves_out_what_is_named_also_inside_of_groups():
    noisy = stack(
        continuous, T.StickyAction(0.5), T.ObservationGroups({"a": [AddNoise(), T.FrameStackObservation(2)], "b": []})
    )
    quiet = stack(continuous, T.ObservationGroups({"a": [T.FrameStackObservation(2)], "b": []}))
    policy = Network(quiet)
    module = tw.deploy(noisy, policy, without=["StickyAction", AddNoise])
    assert_parity(module, evaluated(quiet, policy))
    assert module.metadata["left_out"] == [
        "StickyAction(repeat_action_probability=0.5, repeat_action_duration=1)",
        "AddNoise()",
    ]


def test_parts_that_change_spaces_can_be_left_out_where_nothing_below_them_does():
    pixels = functools.partial(ScriptedEnv, observation_space=IMAGE)
    env = stack(pixels, T.GrayscaleObservation(), T.DtypeObservation("float32"), T.FrameStackObservation(2))
    module = tw.deploy(env, Network(env), without=["GrayscaleObservation"])
    assert module.metadata["observation"]["shape"] == [4, 4] and module.metadata["observation"]["high"] == 255
    with pytest.raises(ValueError, match=r"nearest to the env, but got DtypeObservation\(dtype='float32'\): it is above"):
        tw.deploy(env, Network(env), without=["DtypeObservation"])


def test_a_call_with_another_observation_or_state_raises():
    module, _ = deployed("control")
    observation, state = module.example_inputs()
    for inputs, message in [
        ((observation.double(), state), r"an observation of shape \(batch, 3\) torch.float32, but got \(2, 3\) torch.float64"),
        ((observation[:, :2], state), r"an observation of shape \(batch, 3\) torch.float32, but got \(2, 2\)"),
        ((None, state), "but got None"),
        ((observation[0, 0], state), r"an observation of shape \(batch, 3\) torch.float32, but got \(\)"),
        ((observation, module.initial_state(1)), "the same number of rows, but got {'observation': 2, .*'is_first': 1}"),
        (
            (observation, {**state, "is_first": state["is_first"][:, 0]}),
            r"the state 'is_first' of shape \(batch, 1\) torch.bool",
        ),
    ]:
        with pytest.raises(ValueError, match=f"^This deployed policy needs .*{message}"):
            module(*inputs)
    with pytest.raises(ValueError, match=r"an observation of shape \(batch\) torch.int64, but got \(\) torch.int64"):
        checks.tensor("an observation", torch.tensor(3), (), torch.int64)
    with pytest.raises(TypeError, match=r"a state with \['FrameStackObservation.frames', 'is_first'\], but got None"):
        module(observation)
    with pytest.raises(ValueError, match="needs no state, but got one with"):
        deployed("no state")[0](observation, state)


def test_metadata_describes_spaces_state_and_transforms():
    module, _ = deployed("a recurrent policy")
    assert module.metadata["state"] == {
        "TimeAwareObservation.elapsed": {"shape": [1], "dtype": "int64"},
        "hidden": {"shape": [3], "dtype": "float32"},
        "count": {"shape": [], "dtype": "int64"},
        "is_first": {"shape": [1], "dtype": "bool"},
    }
    parts = module.metadata["observation"]["spaces"]
    assert parts["position"] == {"type": "Discrete", "shape": [], "dtype": "int64", "n": 3, "start": 1}
    assert parts["rest"]["spaces"]["1"] == {
        **{"type": "MultiDiscrete", "shape": [2], "dtype": "int64"},
        **{"nvec": [2, 3], "start": [0, 0]},
    }
    assert module.metadata["action"] == {"type": "Box", "shape": [6], "dtype": "float32", "low": -1.0, "high": 1.0}
    assert [text.partition("(")[0] for text in module.metadata["transforms"]] == ["TimeAwareObservation", "DiscretizeAction"]
    assert list(module.initial_state(2)["count"]) == [-1, -1]


@pytest.mark.compiles
def test_the_example_plays_the_same_episodes_in_a_process_that_imports_only_torch(tmp_path):
    threads = torch.get_num_threads()
    load_example("ppo")  # the script imports it from its own folder
    script = load_example("deploy")
    assert len(Path(script.__file__).read_text().splitlines()) < 120
    here, there = script.main(script.Args(total_timesteps=4096, num_episodes=3, out=tmp_path))
    torch.set_num_threads(threads)
    assert here == there and len(there) == 3
