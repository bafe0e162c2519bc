"""A process waits for its threads before Python shuts down, and not for those that wait themselves."""

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

from tests.jobs import BRIEF, TINY, build_trainer
from tests.ranks import RankPool
from torchtitan_mixle.leaving import settle, settle_at_exit


def test_a_busy_thread_is_waited_for() -> None:
    ended: list[float] = []

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"without the interpreter's lock", b"salt", 200_000)
        ended.append(time.monotonic())

    threading.Thread(target=work).start()
    settle()
    assert ended and time.monotonic() - ended[0] < 0.5


def test_a_waiting_thread_is_not() -> None:
    go_on = threading.Event()
    threading.Thread(target=go_on.wait, daemon=True).start()
    began = time.monotonic()
    settle()
    assert time.monotonic() - began < 0.5
    go_on.set()


def waits_at_exit(job: dict[str, Any]) -> int:
    build_trainer(job).close()
    return settle_at_exit.cache_info().currsize


def test_every_run_does(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(waits_at_exit, 1, TINY | BRIEF | {"job.dump_folder": str(tmp_path)}) == [1]
