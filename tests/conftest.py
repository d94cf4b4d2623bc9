"""Options and fixtures of all tests. The main process of pytest-xdist does without PyTorch."""

import os
import random
import re
import secrets
import signal
from importlib.metadata import version
from types import SimpleNamespace

import pytest

# Tests named after "gymnasiums" results, and those of differences, need its wrappers since 1.4.
COMPARES = tuple(map(int, version("gymnasium").split(".")[:2])) >= (1, 4)
IS_NEWEST = tuple(map(int, version("torch").split(".")[:2])) >= (2, 11)


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="also run the tests marked `full`, which take most of the time",
    )
    parser.addoption(
        "--fresh-seeds",
        action="store_true",
        help="use seeds that nobody used before; the first one is printed",
    )
    parser.addoption(
        "--first-seed", type=int, default=0, help="use the seeds from this one on, to repeat a run"
    )


def pytest_configure(config):
    # No processes that compile ahead, because pytest-xdist has one a core, and no search with the
    # compiler for instructions that /proc/cpuinfo names. `torch._inductor` reads both.
    if IS_NEWEST:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    config.addinivalue_line("markers", "full: runs only with --full")
    config.addinivalue_line(
        "markers", "long: of `full`, what .ci/run leaves out unless it is told to run all"
    )
    config.addinivalue_line(
        "markers", "cuda: needs a CUDA device, and is skipped where there is none"
    )
    config.addinivalue_line("markers", "compiles: compiles graphs, for -m")
    config.addinivalue_line("markers", "newest: needs PyTorch 2.11")
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as in a job that a script has started in the background
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # because tests interrupt themselves and their workers
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    if worker is not None:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // worker["workercount"]))
    elif config.getoption("--fresh-seeds"):  # workers get the seed of the process that starts them
        config.option.first_seed = secrets.randbelow(10**9)


def pytest_sessionstart(session):
    config = session.config
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--fresh-seeds") and not is_worker:
        first = config.getoption("--first-seed")  # not in the header, because -q leaves it out
        config.get_terminal_writer().line(f"fresh seeds; --first-seed={first} repeats them")


@pytest.hookimpl(trylast=True)  # after the selection by -m and -k
def pytest_collection_modifyitems(config, items):
    import torch

    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    for item in items:
        name = item.nodeid.partition("[")[0]
        if not COMPARES and re.search(r"gymnasiums|test_differences", name):
            item.add_marker(pytest.mark.skip(reason="the comparison needs gymnasium>=1.4"))
        needs_newest = item.get_closest_marker("newest") or name.endswith(
            "::torchwrap._deploy.deploy"
        )
        if needs_newest and not IS_NEWEST:
            item.add_marker(pytest.mark.skip(reason="needs PyTorch 2.11"))
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)  # before fixtures are set up
def pytest_runtest_setup(item):
    """Unseeded envs draw the same seed in every run of a test, which passes each time or never."""
    from torchwrap import random as torchwrap_random

    seed = f"{item.nodeid} {item.config.getoption('--first-seed')}"
    torchwrap_random.secrets = SimpleNamespace(randbits=random.Random(seed).getrandbits)


@pytest.fixture
def first_seed(request):
    """The first of a fuzz test's seeds."""
    return request.config.getoption("--first-seed")


@pytest.fixture
def graphs():
    """The backend "counting", and every graph that it has compiled so far."""
    import torch

    compiled = []

    def counting(graph, example):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.register_backend(counting, name="counting")
    yield compiled
    torch._dynamo.backends.registry._COMPILER_FNS.pop("counting")


@pytest.fixture
def bridge():
    """Makes a torchwrap env from constructors of single Gymnasium envs; closes it at the end."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from helpers import OtherVectorEnv

    import torchwrap as tw

    opened = []

    def build(
        makers,
        kind=None,
        mode=None,
        info_keys=(),
        first_index=0,
        device="cpu",
        **kwargs,
    ):
        mode = mode or AutoresetMode.DISABLED
        kind = kind or (SyncVectorEnv if mode is AutoresetMode.DISABLED else OtherVectorEnv)
        opened.append(kind(makers, autoreset_mode=mode, **kwargs))
        return tw.from_gymnasium(
            opened[-1], info_keys=info_keys, first_index=first_index, device=device
        )

    yield build
    for vector_env in opened:
        if not vector_env.closed:
            vector_env.close()


@pytest.fixture
def registry(monkeypatch):
    """A registry that forgets, after the test, what it registers."""
    import gymnasium

    import torchwrap as tw

    copy = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", copy)
    monkeypatch.setattr(gymnasium, "registry", copy)
    monkeypatch.setattr(tw.registration, "_REGISTERED", dict(tw.registration._REGISTERED))
    return copy


@pytest.fixture
def alone(monkeypatch):
    """No other thread counts as running, such as those of pytest-xdist and of Inductor."""
    monkeypatch.setattr("threading.active_count", lambda: 1)
