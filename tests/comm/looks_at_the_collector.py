"""Prints whether the garbage collector is on, as one thread sees it while another reads its frames many times."""

import gc
import sys
import threading

from shardwise.comm.thread_frames import frames_of_threads, local_of, stack_of


def seen_by_another_thread() -> set[bool]:
    """What the other thread has seen."""
    seen: set[bool] = set()
    look, stop = threading.Event(), threading.Event()

    def run() -> None:
        look.wait()
        while not stop.is_set():
            seen.add(gc.isenabled())

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    frame = frames_of_threads()[thread.ident or 0]  # an audit hook lets others run with the collector off
    sys.setswitchinterval(1e-6)
    try:
        look.set()
        for _ in range(10000):
            stack_of(frame)
            local_of(frame, "seen")
    finally:
        stop.set()
        look.set()
        thread.join()
        sys.setswitchinterval(interval)
    return seen


if __name__ == "__main__":
    print(*seen_by_another_thread())
