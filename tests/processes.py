"""Processes that call collectives, for tests."""

import datetime
import os
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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
