"""Importing torchwrap, making and compiling an env change no settings, generators or graphs."""

import functools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import torchwrap as tw
from torchwrap.testing import ScriptedEnv

SCRIPT = """
import gc, random, sys, warnings
import numpy as np
import torch
from torch._inductor.utils import run_and_get_code

warnings.simplefilter("ignore")
torch._inductor.config.force_disable_caches = True


def code():
    torch._dynamo.reset()
    function = lambda x, y: (x.sin() * y).sum(0) + (x > 0).float().cumsum(0)[-1]
    _, found = run_and_get_code(torch.compile(function), torch.ones(70, 5), torch.ones(70, 5))
    return [text.partition("\\n")[2] for text in found]  # without the number of the graph


def settings():
    from torch._inductor.codegen.common import device_codegens

    kinds = [(kind.scheduling, kind.wrapper_codegen) for kind in device_codegens.values()]
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    configs = [torch._inductor.config.get_config_copy(), torch._dynamo.config.get_config_copy()]
    defaults = [torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()]
    defaults.append(torch.is_grad_enabled())
    collector = [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()]
    return repr([collector, kinds, states, configs, defaults, torch.Tensor.__add__])


before = code(), settings()
import torchwrap as tw
from torchwrap import transforms as T

env = tw.TransformedEnv(tw.make("CartPole-v1", 4), T.NormalizeObservation())
td = env.reset(seed=0)
tw.compile(env)
env.step(td.set("action", env.sample_action()))
assert code() == before[0], "the user's graph is compiled to other code"
assert settings() == before[1], "settings have changed"
"""


@pytest.mark.full
def test_threads_compile_at_once():
    started = threading.Barrier(3)

    def build(make):
        started.wait()
        for _ in range(3):
            make(ScriptedEnv(2, (1,)))

    compiled = functools.partial(tw.compile, backend="eager")
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(build, [compiled, compiled, tw.pure]))


@pytest.mark.full
@pytest.mark.long
def test_the_users_own_graphs_and_settings_stay_as_they_were():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
