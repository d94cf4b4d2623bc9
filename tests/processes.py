"""Processes that call collectives, for tests: started once, because each imports torch."""

from __future__ import annotations

import datetime
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
    """`run` calls a function `(rank, group, *args)` on the first `size` of them, and returns what each of them returned."""

    def __init__(self, world_size=4):
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, children = zip(*(context.Pipe() for _ in range(world_size)), strict=True)
        self.processes = [
            context.Process(target=_serve, args=(rank, world_size, self.folder.name, pipe), daemon=True)
            for rank, pipe in enumerate(children)
        ]
        for process in self.processes:
            process.start()

    def run(self, size, function, *args):
        for pipe in self.pipes[:size]:
            pipe.send((size, function, args))
        results = [pipe.recv() if pipe.poll(120) else "no answer after 120 s" for pipe in self.pipes[:size]]
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
