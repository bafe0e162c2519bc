"""Real ranks for tests: a pool of gloo processes that lives as long as the test session.

Importing torchtitan takes seconds, so the processes are forked from a server that has imported it once, and every case
builds its process group anew among as many of them as it needs.
"""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 240
GRACE_S = 10  # for the other ranks once one has failed
RUNS_A_LIFE = 10  # gloo's threads of earlier groups stay and poll; new processes are cheaper than their company


class RankFailure(AssertionError):
    """A function failed on a rank; the message holds that rank's traceback."""


class RankPool:
    """`run(f, world_size, *args)` calls f(*args) on ranks 0..world_size-1 of a fresh gloo group."""

    def __init__(self, size: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preload"])
        self._size = size
        self._runs = 0
        self._start()

    def _start(self) -> None:
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(self._size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, rank))
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Results by rank. RankFailure if any rank raised, died or did not answer in time."""
        self._runs += 1
        if self._runs % RUNS_A_LIFE == 0:
            self.close()
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for connection in self._connections[:world_size]:
                connection.send((function, args, world_size, str(Path(folder) / "store")))
            replies = self._replies(world_size)
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(replies.items()) if not ok]
        if silent := sorted(set(range(world_size)) - set(replies)):
            # They wait for a rank that failed, or hang.
            failures.append(f"ranks {silent} of {world_size} did not answer")
        if failures:  # what is left of a failed case must not be part of the next one
            self.close(kill=True)
            self._start()
            raise RankFailure("\n".join(failures))
        return [replies[rank][1] for rank in range(world_size)]

    def _replies(self, world_size: int) -> dict[int, tuple[bool, Any]]:
        """(succeeded, result or traceback) by rank; ranks that stay silent are left out."""
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(replies) < world_size:
            waiting = {self._connections[rank]: rank for rank in range(world_size) if rank not in replies}
            ready = wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                try:
                    reply = connection.recv()
                except EOFError:
                    reply = (False, "the process died")
                if not reply[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                replies[waiting[connection]] = reply
        return replies

    def close(self, *, kill: bool = False) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                connection.send(None)
        for process in self._processes:
            process.join(10)


def _serve(connection: Connection, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    last_layout: object = None
    while (job := connection.recv()) is not None:
        function, args, world_size, store = job
        layout = _layout(world_size, args)
        if layout is None or layout != last_layout:
            _forget_groups()
        last_layout = layout
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            dist.barrier()  # a rank that has nothing to say must not leave while another is still connecting to it
            reply = (True, function(*args))
        except BaseException:
            reply = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.enable()  # TorchTitan's trainer switches it off
            gc.collect()
        connection.send(reply)


def _layout(world_size: int, args: tuple[Any, ...]) -> object:
    """What decides which process groups a case makes: equal for two cases if they make the same ones in one order."""
    if not args or not isinstance(args[0], dict):
        return None
    return world_size, sorted((key, value) for key, value in args[0].items() if key.endswith("_degree"))


def _forget_groups() -> None:
    """Empty DTensor's caches, which take seconds to fill: they know groups by names that stand for others now."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for value in vars(_redistribute).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
