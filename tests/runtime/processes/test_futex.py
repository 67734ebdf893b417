"""Waiting on a shared word: returns on a difference, a change and a timeout, in the fast form and in its twin."""

from __future__ import annotations

import ctypes
import threading

import pytest

from vnext.runtime.processes import futex

WAIT_METHODS = [futex.choose_wait_method(), futex.SleepPoll()]


@pytest.mark.parametrize("waits", WAIT_METHODS, ids=lambda waits: type(waits).__name__)
def test_wait_returns_when_the_word_differs_changes_or_time_is_over(waits: futex.WaitMethod) -> None:
    word = ctypes.c_uint32(7)
    address = ctypes.addressof(word)
    waits.wait(address, 6, None)
    waits.wait(address, 7, 0.001)
    sleeper = threading.Thread(target=waits.wait, args=(address, 7, None), daemon=True)
    sleeper.start()
    word.value = 8
    waits.wake(address)
    sleeper.join(60)
    assert not sleeper.is_alive()


def test_barrier_for_weakly_ordered_machines_can_be_called() -> None:
    if not futex._has_known_system_calls():
        pytest.skip("membarrier exists on Linux only")
    futex._membarrier_fence()()
