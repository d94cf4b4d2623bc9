"""Equal values of a graph are stored once, unless both are results or might differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_cpp_code
from torch.fx.experimental.proxy_tensor import make_fx

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile.duplicates import StoreOnce
from torchwrap.testing import ScriptedEnv

X = torch.arange(6.0).view(2, 3)


def realized(tensor: Tensor) -> Tensor:
    return tensor.as_strided(tensor.shape, tensor.stride())


def written_back(x, state):
    state.copy_(realized(torch.where(x > 1, x, 0)).flip(0))
    return [torch.where(x > 1, x, 0)]


def realized_twice(x, state):
    return [realized(x.exp()).sum() + realized(x.exp()).mean(0)]


def the_result_is_last(x, state):
    y = realized(x + 1).flip(0)
    return [y, x + 1]


def two_results(x, state):
    return [x + 1, x + 1]


def two_results_and_one_realized(x, state):
    return [x + 1, x + 1, realized(x + 1).flip(0)]


def one_realized_and_two_results(x, state):
    return [realized(x + 1).flip(0), x + 1, x + 1]


def other_arguments(x, state):
    return [realized(x + 1).flip(0), x + 2]


def other_order(x, state):
    return [realized(x - state).flip(0), state - x]


def other_keyword(x, state):
    return [realized(torch.add(x, state, alpha=2)).flip(0), torch.add(x, state)]


def other_type_of_number(x, state):
    return [realized(x.long() + 1).flip(0), x.long() + 1.0]


def other_dtype(x, state):
    return [realized(x.to(torch.float64)).flip(0), x.to(torch.int32)]


def random_numbers(x, state):
    return [realized(torch.rand_like(x)).flip(0), torch.rand_like(x)]


MORE_RESULTS = [two_results, two_results_and_one_realized, one_realized_and_two_results]
MERGED = [written_back, realized_twice, the_result_is_last, *MORE_RESULTS[1:]]
KEPT = [two_results, other_arguments, other_order, other_keyword, other_type_of_number, other_dtype, random_numbers]


def merge(function):
    """The graph of a function without its duplicates, and how many nodes fewer it has."""
    graph = make_fx(torch.func.functionalize(function))(X, torch.zeros(2, 3))
    before = len(list(graph.graph.nodes))
    StoreOnce()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph, before - len(list(graph.graph.nodes))


@pytest.mark.parametrize("function", [*MERGED, *KEPT], ids=lambda function: function.__name__)
def test_equal_values_are_stored_once(function):
    graph, fewer = merge(function)
    assert (fewer > 0) == (function in MERGED)
    state, expected_state = torch.zeros(2, 3), torch.zeros(2, 3)
    torch.manual_seed(0)
    expected = function(X, expected_state)
    torch.manual_seed(0)
    results = graph(X, state)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.mark.parametrize("function", MORE_RESULTS, ids=lambda function: function.__name__)
def test_two_results_stay_two_tensors(function):
    results = merge(function)[0].graph.output_node().args[0]
    assert len(set(results)) == len(results)


def test_stack_of_frames_is_stored_twice_and_not_three_times(tmp_path):
    """Once as the successor and once as the observation to act on, from which a reset writes the ring."""

    def observations(compiled):
        env = tw.TransformedEnv(ScriptedEnv(64, (5,), episode_lengths=[2, 3] * 32), T.FrameStackObservation(4))
        if compiled:
            tw.compile(env)
        seen, td = [], env.reset(seed=0)
        for _ in range(7):
            transition, td = env.step(td.set("action", torch.zeros(64, 6)))
            seen += [transition["next", "observation"], td["observation"]]
        return torch.stack(seen)

    with fresh_cache(dir=tmp_path):
        found, code = run_and_get_cpp_code(lambda: observations(compiled=True))
    torch.testing.assert_close(found, observations(compiled=False), rtol=0, atol=0)
    assert code.count("aoti_torch_empty_strided(3, ") == 2 and f"_storage[{64 * 4 * 5}]" not in code
