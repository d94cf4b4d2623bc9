"""Processes that call collectives, for tests."""

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import EXAMPLES


def init(rank, world_size, folder, seconds=60):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


class Processes:
    """`run` calls a function `(rank, group, *args)` on `size` of them and returns the results."""

    def __init__(self, world_size=4):
        context = mp.get_context("forkserver")  # which imports PyTorch once
        context.set_forkserver_preload(["torchwrap"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, children = zip(*(context.Pipe() for _ in range(world_size)), strict=True)
        self.processes = []
        for rank, pipe in enumerate(children):
            arguments = (rank, world_size, self.folder.name, pipe)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def run(self, size, function, *args):
        for pipe in self.pipes[:size]:
            pipe.send((size, function, args))
        results = []
        for pipe in self.pipes[:size]:
            results.append(pipe.recv() if pipe.poll(120) else "no answer after 120 s")
        failures = [result for result in results if isinstance(result, str)]
        assert not failures, "\n".join(failures)
        return [value for (value,) in results]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)
        self.folder.cleanup()


def _serve(rank, world_size, folder, pipe):
    init(rank, world_size, folder)
    groups = {size: dist.new_group(range(size)) for size in range(1, world_size + 1)}
    while (call := pipe.recv()) is not None:
        size, function, args = call
        try:
            result = (function(rank, groups[size], *args),)
        except Exception:
            result = f"rank {rank}: {traceback.format_exc()}"
        pipe.send(result)
    dist.destroy_process_group()
    os._exit(0)  # without the end of the interpreter, which takes seconds


# examples/ppo_distributed.py in two processes of torchrun.

FLAGS = "--num-envs 16 --num-steps 32 --update-epochs 4 --num-minibatches 2 --save-every 3 --resume"


def start(out, total_timesteps, flags=()):
    command = "-m torch.distributed.run --standalone --nproc-per-node 2"
    command += " --monitor-interval 0.1 --max-restarts 12"
    command += (
        f" {EXAMPLES}/ppo_distributed.py {FLAGS} --total-timesteps {total_timesteps} --out {out}"
    )
    with open(f"{out}.log", "w") as log:
        return subprocess.Popen([sys.executable, *command.split(), *flags], stdout=log, stderr=log)


def finish(process, out):
    try:
        assert process.wait(timeout=300) == 0, Path(f"{out}.log").read_text()[-3000:]
    finally:
        end(process)
    return torch.load(out / "checkpoint.pt", weights_only=True)


def end(process):
    process.terminate()  # upon which torchrun ends the others
    process.wait(60)


def iteration(out):
    path = out / "checkpoint.pt"
    return torch.load(path, weights_only=True)["log"]["iteration"] if path.exists() else 0


def workers(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def kill_and_compare(tmp_path, total_timesteps, kills, seed, flags=()):
    """Kills one process at random moments. The restarted run ends as one without a break.

    Returns its last checkpoint.
    """
    whole = finish(start(tmp_path / "whole", total_timesteps, flags), tmp_path / "whole")
    out = tmp_path / "killed"
    random = Random(seed)
    before = 0
    dead = set()
    process = start(out, total_timesteps, flags)
    try:
        for _ in range(kills):
            while True:
                alive = workers(process)
                if iteration(out) > before and len(alive) == 2 and dead.isdisjoint(alive):
                    break
                assert process.poll() is None, Path(f"{out}.log").read_text()[-3000:]
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.3))  # somewhere in a rollout, an update, or in writing
            dead = set(workers(process))
            os.kill(random.choice(sorted(dead)), signal.SIGKILL)
            before = iteration(out)
        killed = finish(process, out)
    finally:
        end(process)
    for name in ("agent", "optimizer", "env", "processes"):
        torch.testing.assert_close(killed[name], whole[name], rtol=0, atol=0)
    assert killed["log"]["iteration"] == whole["log"]["iteration"] and len(killed["processes"]) == 2
    curves = [[point[:2] for point in run["log"]["curve"]] for run in (killed, whole)]
    assert curves[0] == curves[1]
    assert "exitcode: -9" in Path(f"{out}.log").read_text()
    return killed
