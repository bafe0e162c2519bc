"""A process waits for its threads before Python shuts down, and not for those that wait themselves."""

import hashlib
import threading
import time

from torchtitan_mixle.leaving import settle


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
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    began = time.monotonic()
    settle()
    assert time.monotonic() - began < 0.5
    go_on.set()
    thread.join()
