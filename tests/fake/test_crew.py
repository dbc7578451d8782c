"""The threads that make a file's calls: what they were given is done, whoever closes them."""

from __future__ import annotations

import threading

import pytest

from forebay.tiers.crew import Crew


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-crew")]


def test_calls_are_made_by_so_many_threads_and_their_errors_told() -> None:
    crew = Crew(2, "test-crew")
    assert not threads()
    both = threading.Barrier(2, timeout=10)
    waits = [crew.submit(both.wait) for _ in range(2)]
    assert sorted(wait.result() for wait in waits) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        crew.submit(lambda: 1 // 0).result()
    names = [crew.submit(lambda: threading.current_thread().name).result() for _ in range(4)]
    assert set(names) <= {"test-crew-0", "test-crew-1"}
    assert len(threads()) == 2
    crew.close()
    assert not threads()


def test_a_crew_that_is_closed_has_its_calls_made_by_the_caller() -> None:
    crew = Crew(1, "test-crew")
    gate = threading.Event()
    crew.submit(gate.wait)
    queued = crew.submit(threading.current_thread)
    threading.Timer(0.02, gate.set).start()
    crew.close()
    crew.close()
    assert queued.result() is not threading.current_thread()
    assert crew.submit(threading.current_thread).result() is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        crew.submit(lambda: 1 // 0).result()


def test_a_crew_may_be_closed_by_one_of_its_threads() -> None:
    """The garbage collector runs a finalizer where it likes."""
    crew = Crew(1, "test-crew")
    crew.submit(crew.close).result(10)
    for thread in threads():
        thread.join(10)
    assert not threads()
