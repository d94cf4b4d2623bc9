"""Two draws from one key are equal words, so they are refused where a function is first called."""

import threading

import pytest
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Walls(FuncEnv):
    """Draws the position and the walls of a row, in every function."""

    observation_space = Box(0, 5, (2,))
    action_space = Box(-1, 1, (1,))

    def __init__(self, draws, name, broadcasts=False):
        super().__init__()
        self.broadcasts = broadcasts
        self.draws = {name: draws}

    def _draw(self, name, rng):
        first, second = self.draws.get(name, folded)(rng)
        return torch.stack([first, second.to(first.dtype)], -1)

    def initial(self, rng):
        return {"x": self._draw("initial", rng)}

    def transition(self, state, action, rng):
        return {"x": self._draw("transition", rng)}

    def observation(self, state, rng):
        return self._draw("observation", rng)

    def reward(self, state, action, next_state, rng):
        return self._draw("reward", rng)[..., 0]

    def terminal(self, state, rng):
        return self._draw("terminal", rng)[..., 0] > 0.9


def folded(rng):
    return random.uniform(rng), random.integers(rng.fold_in(1), 5)


TWICE = {
    "other distributions": lambda rng: (random.uniform(rng), random.integers(rng, 5)),
    "one distribution": lambda rng: (random.normal(rng), random.normal(rng)),
    "a held key": lambda rng: (random.uniform(rng), random.integers(rng.hold(5), 5)),
    "equal folds": lambda rng: (
        random.uniform(rng.fold_in(2)),
        random.uniform(rng.fold_in(1).fold_in(1)),
    ),
}


@pytest.mark.parametrize("broadcasts", [False, True], ids=["vmap", "broadcasts"])
@pytest.mark.parametrize("name", ["initial", "transition", "observation", "reward", "terminal"])
@pytest.mark.parametrize("draws", TWICE.values(), ids=TWICE)
def test_function_that_draws_twice_from_a_key_is_refused_at_construction(draws, name, broadcasts):
    with pytest.raises(TypeError, match=rf"^Walls\.{name}: .*key.*fold_in"):
        tw.FunctionalEnv(Walls(draws, name, broadcasts), 3)


def test_draws_from_folded_keys_are_independent_and_allowed():
    env = tw.FunctionalEnv(Walls(folded, "initial"), 4000)
    first, second = env.reset(seed=0)["observation"].double().T
    corrcoef = torch.corrcoef(torch.stack([first, second]))
    assert corrcoef[0, 1].abs() < 0.1


class Drawing(T.ObservationTransform):
    def __init__(self, draws):
        super().__init__()
        self.draws = draws

    def setup(self, signature):
        self.stream, signature = signature.stream()
        return signature

    def observation(self, observation):
        first, second = self.draws(self.stream.key())
        return observation + first.unsqueeze(-1) + second.unsqueeze(-1)


class DrawsInTwoHooks(Drawing):
    def action(self, action):
        first, _ = self.draws(self.stream.key())
        return action * first.unsqueeze(-1)


@pytest.mark.parametrize("draws", TWICE.values(), ids=TWICE)
def test_hook_that_draws_twice_from_a_key_is_refused(draws):
    env = tw.TransformedEnv(ScriptedEnv(3), Drawing(draws))
    with pytest.raises(TypeError, match=r"Drawing.*\.reset: .*key.*fold_in"):
        env.reset(seed=0)


def test_hook_that_draws_twice_from_a_key_is_refused_by_compile():
    class LaterTwice(Drawing):
        def step(self, td):
            TWICE["one distribution"](self.stream.key())
            return td

    env = tw.TransformedEnv(ScriptedEnv(3), LaterTwice(folded))
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"LaterTwice.*\.step: .*key.*fold_in"):
        tw.compile(env, backend="eager")


def test_two_hooks_of_a_step_that_draw_from_one_key_are_refused():
    env = tw.TransformedEnv(ScriptedEnv(3), DrawsInTwoHooks(folded))
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"key.*fold_in"):
        env.step(env.sample_action())


def test_draws_of_another_thread_are_not_counted():
    def draws(rng):
        thread = threading.Thread(target=random.uniform, args=[rng])
        thread.start()
        thread.join()
        return folded(rng)

    tw.TransformedEnv(ScriptedEnv(3), Drawing(draws)).reset(seed=0)
