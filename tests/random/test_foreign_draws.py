"""Draws from global generators while other threads run, which may draw from them too."""

import contextlib
import threading

import pytest
import torch

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


@contextlib.contextmanager
def running_thread(draw):
    """Another thread that draws until the block ends. Gives the list of its numbers."""
    numbers = []
    has_ended = threading.Event()

    def run():
        while not has_ended.is_set():
            numbers.append(draw())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield numbers
    finally:
        has_ended.set()
        thread.join()


def make_and_step(number):
    for _ in range(number):
        env = tw.TransformedEnv(tw.make("CartPole-v1", 3), T.NormalizeObservation())
        env.reset(seed=0)
        env.step(env.sample_action())


def test_numbers_of_another_thread_are_those_of_its_seed_while_envs_are_made():
    torch.manual_seed(3)
    with running_thread(lambda: torch.rand(()).item()) as numbers:
        make_and_step(10)
    oracle = torch.Generator().manual_seed(3)
    assert numbers == [torch.rand((), generator=oracle).item() for _ in numbers]


HOOKS = {
    "rand_like": lambda value: value + torch.rand_like(value),
    "in place": lambda value: value + torch.empty_like(value).uniform_(),
}


class Drawing(T.ObservationTransform):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def observation(self, observation):
        return self.function(observation)


@pytest.mark.parametrize("function", HOOKS.values(), ids=HOOKS)
def test_draw_of_this_thread_is_refused_before_it_happens_while_another_runs(function):
    env = tw.TransformedEnv(ScriptedEnv(3), Drawing(function))
    before = torch.get_rng_state()
    with (
        running_thread(threading.Event().is_set),
        pytest.raises(TypeError, match=r"Drawing.*PyTorch's global generator"),
    ):
        env.reset(seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_draw_from_a_generator_of_its_own_is_allowed_while_another_thread_runs():
    generator = torch.Generator().manual_seed(0)
    noisy = Drawing(lambda value: value + torch.rand((), generator=generator))
    with running_thread(threading.Event().is_set):
        tw.TransformedEnv(ScriptedEnv(3), noisy).reset(seed=0)
