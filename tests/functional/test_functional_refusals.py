"""Wrong functions, arguments and inputs, which are refused before anything has changed."""

import numpy as np
import pytest
import torch
from func_envs import BroadcastWalk, Walk, changed, odd, play, some_actions
from helpers import buffers

from torchwrap import FunctionalEnv


def on_position(function):
    """Functions with a reward of the position."""
    return odd(reward=lambda state, action, next_state, rng: function(state["position"]))


def test_function_that_does_not_fit_raises_at_construction():
    generator = torch.get_rng_state()
    needed = "Odd.{} needs to return "
    table = {
        "observation": [
            (
                Walk,
                lambda state, rng: state["position"][:1],
                ValueError,
                r"observations of shape \(3, 2\).*\(3, 1\)",
            ),
            (
                BroadcastWalk,
                lambda state, rng: state["position"][0],
                ValueError,
                r"observations .*\(3, 2\).*, but got \(2,\)",
            ),
            (
                Walk,
                lambda state, rng: state["position"].double(),
                TypeError,
                "observations of dtype torch.float32",
            ),
            (
                Walk,
                lambda state, rng: {"a": state["position"]},
                TypeError,
                "observations as a torch.Tensor",
            ),
        ],
        "reward": [
            (
                Walk,
                lambda state, action, next_state, rng: action,
                ValueError,
                r"one scalar per env.*\(3, 1\)",
            ),
            (
                BroadcastWalk,
                lambda state, action, next_state, rng: action.sum(),
                ValueError,
                "one scalar",
            ),
            (Walk, lambda state, action, next_state, rng: 1.0, TypeError, "tensors"),
            (BroadcastWalk, lambda state, action, next_state, rng: 1.0, TypeError, "tensors"),
        ],
        "terminal": [
            (Walk, lambda state, rng: state["count"], TypeError, "torch.bool, but got torch.int64"),
            (
                Walk,
                lambda state, rng: state["position"] > 3,
                ValueError,
                r"one scalar per env.*\(3, 2\)",
            ),
            (Walk, lambda state, rng: False, TypeError, "tensors"),
        ],
        "truncated": [
            (Walk, lambda state, rng: state["count"], TypeError, "torch.bool, but got torch.int64"),
            (
                Walk,
                lambda state, rng: state["position"] > 3,
                ValueError,
                r"one scalar per env.*\(3, 2\)",
            ),
        ],
        "transition": [
            (
                Walk,
                lambda state, action, rng: {"position": state["position"]},
                ValueError,
                "a state with fields",
            ),
            (
                Walk,
                lambda state, action, rng: {**state, "more": state["count"]},
                ValueError,
                "a state with fields .*'more'",
            ),
            (
                Walk,
                lambda state, action, rng: {**state, "count": state["count"] + 0.5},
                ValueError,
                "state.'count'. of shape",
            ),
            (
                Walk,
                lambda state, action, rng: state["position"],
                TypeError,
                "a state as a dict of tensors, .* but got Tensor",
            ),
            (
                Walk,
                lambda state, action, rng: {**state, "position": state["position"][:1]},
                ValueError,
                "state.'position'. of",
            ),
        ],
        "initial": [
            (Walk, lambda rng: torch.zeros(2), TypeError, "a dict of tensors"),
            (Walk, lambda rng: {"position": torch.zeros(2), "count": 0}, TypeError, "tensors"),
            (
                BroadcastWalk,
                lambda rng: {"position": torch.zeros(3, 2), "count": torch.tensor(0)},
                ValueError,
                "'count'",
            ),
            (
                BroadcastWalk,
                lambda rng: {"position": torch.zeros(3, 2), "count": torch.zeros(1)},
                ValueError,
                "'count'",
            ),
        ],
        "state_info": [
            (Walk, lambda state: state["count"], TypeError, "a dict of tensors, but got Tensor"),
            (Walk, lambda state: {"a": 1.0}, TypeError, r"tensors \(ValueError: "),
            (Walk, lambda state: {"a": {"b": state["count"]}}, TypeError, "'a' as a tensor.* dict"),
            (
                BroadcastWalk,
                lambda state: {"a": state["count"].sum()},
                ValueError,
                r"'a' of shape \(3, .*, but got \(\)",
            ),
        ],
        "transition_info": [(Walk, lambda state, action, next_state: None, TypeError, "")],
    }
    for name, cases in table.items():
        for base, function, error, words in cases:
            with pytest.raises(error, match=needed.format(name) + words):
                FunctionalEnv(odd(base, **{name: function}), 3)
    both = dict.fromkeys(("state_info", "transition_info"), lambda state, *_: {"a": state["count"]})
    draw, host = (
        ": draw from its rng, with torchwrap.random.$",
        "reward reads values on the host: use tensor operators",
    )
    drawing = odd(
        BroadcastWalk, initial=lambda rng: {"position": torch.rand(3, 2), "count": rng.env}
    )
    branching = odd(
        reward=lambda state, action, next_state, rng: (
            torch.zeros(()) if state["count"] > 0 else torch.ones(())
        )
    )
    for func_env, error, words in [
        (
            odd(state_info=lambda state: {3: state["count"]}),
            TypeError,
            "needs to return strings as names, but got 3",
        ),
        (
            odd(**both),
            ValueError,
            r"different names in transition_info and state_info, but got \['a'\] in both",
        ),
        (
            odd(step_info=lambda *_: {}),
            TypeError,
            "Odd defines step_info, .*: rename it to transition_info",
        ),
        (odd(truncated=lambda state: state["count"] > 3), TypeError, "Odd.truncated needs"),
        (
            odd(transition=lambda state, action, rng: {**state, "position": torch.rand(2)}),
            TypeError,
            f"Odd.transition .*{draw}",
        ),
        (drawing, TypeError, f"Odd.initial drew from PyTorch's global generator{draw}"),
        (
            odd(reward=lambda *_, **__: 1 / 0),
            TypeError,
            "^Odd.reward raised ZeroDivisionError: division by zero",
        ),
        (
            odd(reward=lambda state, action: 0),
            TypeError,
            "Odd.reward needs to take the arguments in the table of",
        ),
        (branching, TypeError, f"{host}, torch.where instead of `if`.$"),
        (on_position(lambda x: x[0] * x[1].item()), TypeError, host),
        (on_position(lambda x: torch.tensor(x.tolist())[0]), TypeError, host),
        (on_position(lambda x: torch.as_tensor(np.sin(x)[0])), TypeError, host),
        (
            on_position(lambda x: x[x > 0].sum()),
            TypeError,
            "reward makes a tensor whose shape depends on values: use",
        ),
        (
            on_position(lambda x: torch.zeros(2).add_(x)[0]),
            TypeError,
            "reward writes in place to a tensor that all envs share",
        ),
        (
            on_position(lambda x: x[0] + torch.rand(())),
            TypeError,
            f"reward draws from a generator of PyTorch{draw}",
        ),
    ]:
        with pytest.raises(error, match=words):
            FunctionalEnv(func_env, 3)
    assert torch.equal(torch.get_rng_state(), generator)
    FunctionalEnv(
        odd(transition=lambda state, action, rng: dict(reversed(state.items()))), 2
    )  # the order is free


def test_invalid_arguments_raise():
    gravity = torch.ones(3)
    cases = {
        "num_envs as an integer of at least 1, but got": [
            {"num_envs": number} for number in (0, -1, True, 2.0)
        ],
        "max_episode_steps as an integer of at least 1": [
            {"max_episode_steps": steps} for steps in (0, -3, 2.5, [1, 2, 3])
        ],
        "first_index as an integer of at least 0, but got": [
            {"first_index": index} for index in (-1, 0.5)
        ],
        "a torch.device or its name, but got 'nope'": [{"device": "nope"}],
        "a FuncEnv with observation_space and action_space": [
            {"func_env": each} for each in (None, Walk, 3, object())
        ],
        r"params\['gravity'\] as a tensor \(3, ...\), but got": [
            {"params": {"gravity": value}} for value in (9.8, gravity[:2])
        ],
    }
    for words, each in cases.items():
        for arguments in each:
            with pytest.raises((ValueError, TypeError), match=f"needs .*{words}"):
                FunctionalEnv(**{"func_env": Walk(), "num_envs": 3, **arguments})


# Calls.


def test_invalid_call_raises_and_changes_nothing():
    env, zeros = FunctionalEnv(Walk(), 2), torch.zeros(2, 1)
    play(env, env.reset(seed=0), some_actions(env, 3))
    before, state = buffers(env), env.state

    def simulate(given=state, action=zeros, offset=0):
        return lambda: env.simulate(given, action, offset=offset)

    for call, error, words in [
        (lambda: env.step(torch.zeros(2)), ValueError, r"an action of shape \(2, 1\)"),
        (lambda: env.step(zeros.double()), TypeError, "an action of dtype torch.float32"),
        (
            lambda: env.reset(seed=1, options={"unknown": 1}),
            ValueError,
            r"among \['state', 'start'\], but got \['unknown'\]",
        ),
        (
            lambda: env.reset(seed=1, options={"state": {"speed": zeros}}),
            ValueError,
            r"fields \['position', 'count'\], but",
        ),
        (
            lambda: env.reset(seed=1, options={"state": {"count": zeros}}),
            ValueError,
            r"reset needs state\['count'\] of",
        ),
        (
            simulate(zeros),
            TypeError,
            "needs a state as a dict of tensors, as `env.state` is, but got Tensor",
        ),
        (
            simulate({"position": zeros}),
            ValueError,
            r"fields \['position', 'count'\], but got \['position'\]",
        ),
        (
            simulate({**state, "position": [0, 0]}),
            TypeError,
            r"state\['position'\] as a torch.Tensor, but got list",
        ),
        (
            simulate({**state, "position": torch.zeros(3, 2)}),
            ValueError,
            r"'position'\] of shape \(2, 2\) .* \(3, 2\)",
        ),
        (
            simulate({**state, "count": torch.zeros(2)}),
            ValueError,
            r"'count'\] of shape \(2,\) torch.int64.*float32",
        ),
        (
            simulate(action=torch.zeros(2)),
            ValueError,
            r"FunctionalEnv.simulate needs an action of shape \(2, 1\)",
        ),
        (
            simulate(action=zeros.double()),
            TypeError,
            "FunctionalEnv.simulate needs an action of dtype torch.float32",
        ),
        (simulate(offset=-1), ValueError, "offset as an integer of at least 0, but got -1"),
        (simulate(offset=0.5), TypeError, "offset as an integer of at least 0, but got 0.5"),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert changed(env, before) == []
