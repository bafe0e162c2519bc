"""Real ranks for tests: a pool of gloo processes that lives as long as the test session.

Importing torchtitan takes seconds, so the processes are forked from a server that has imported it once, and every case
builds its process group anew among as many of them as it needs.
"""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 240


class RankFailure(AssertionError):
    """A function failed on a rank; the message holds that rank's traceback."""


class RankPool:
    """`run(f, world_size, *args)` calls f(*args) on ranks 0..world_size-1 of a fresh gloo group."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchtitan.train", "torchtitan_mixle.spec"])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Results by rank. RankFailure if any rank raised."""
        with tempfile.TemporaryDirectory() as folder:
            used = self._connections[:world_size]
            for connection in used:
                connection.send((function, args, world_size, str(Path(folder) / "store")))
            replies = []
            for rank, connection in enumerate(used):
                if not connection.poll(TIMEOUT_S):
                    raise RankFailure(f"rank {rank} of {world_size} did not answer within {TIMEOUT_S} s")
                replies.append(connection.recv())
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(replies) if not ok]
        if failures:
            raise RankFailure("\n".join(failures))
        return [value for _, value in replies]

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(10)


def _serve(connection: Connection, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        function, args, world_size, store = job
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            reply = (True, function(*args))
        except BaseException:
            reply = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.enable()  # TorchTitan's trainer switches it off
            gc.collect()
        connection.send(reply)
