"""Sleeping in the kernel until a shared 32-bit word changes, and the memory fence that goes with it.

Owns the system calls; knows nothing of rings or messages. Words are given by address, 4-byte aligned, and may lie in memory
shared between processes. `Futex` is the fast implementation (Linux on x86_64 and aarch64). `SleepPoll` is the plain one for
every other system: it looks again after naps that grow to 5 ms, so an idle reader there costs about 1 % of a core.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Protocol

_SYSTEM_CALL_NUMBERS = {"x86_64": (202, 324), "aarch64": (98, 283)}  # futex, membarrier
_FUTEX_WAIT = 0  # without the private flag: waiter and waker are different processes
_FUTEX_WAKE = 1
_WAKE_ALL = 2**31 - 1
_MEMBARRIER_GLOBAL_EXPEDITED = 2
_STRONGLY_ORDERED_MACHINES = frozenset({"x86_64", "AMD64", "i386", "i686"})
_NAP_FIRST_S = 50e-6
_NAP_MAX_S = 5e-3


class WaitMethod(Protocol):
    """How a process sleeps on a shared word and wakes the others that do."""

    def wait(self, address: int, expected: int, timeout_s: float | None) -> None:
        """Sleep while the word holds `expected`, at most `timeout_s` (None: no limit). May return early: look again."""

    def wake(self, address: int) -> None:
        """Wake every process that sleeps on the word. The word must have been changed before."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _timespec(timeout_s: float) -> _Timespec:
    fraction, whole = math.modf(max(timeout_s, 0.0))
    return _Timespec(int(whole), int(fraction * 1e9))


def _kernel_call() -> ctypes._NamedFuncPointer:
    """The C library's `syscall`; a failure returns -1 and leaves the reason in ctypes.get_errno()."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


class Futex:
    """A WaitMethod: the futex system call, which uses no processor time while asleep. A signal handler runs between two waits.

    Raises OSError when this machine or sandbox has no futex.
    """

    def __init__(self) -> None:
        if not _has_known_system_calls():
            raise OSError(errno.ENOSYS, f"no futex number known for {sys.platform} on {platform.machine()}")
        self._number = _SYSTEM_CALL_NUMBERS[platform.machine()][0]
        self._call = _kernel_call()
        long, address = ctypes.c_long, ctypes.c_void_p
        self._call.argtypes = [long, address, long, long, address, address, long]
        probe = ctypes.c_uint32(0)
        self.wake(ctypes.addressof(probe))

    def wait(self, address: int, expected: int, timeout_s: float | None) -> None:
        """Raises OSError for an address that cannot be waited on."""
        limit = None if timeout_s is None else ctypes.byref(_timespec(timeout_s))
        if self._call(self._number, address, _FUTEX_WAIT, expected, limit, None, 0) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):  # changed already, a signal, or time over: look again
            raise OSError(code, f"futex wait failed: {os.strerror(code)}")

    def wake(self, address: int) -> None:
        if self._call(self._number, address, _FUTEX_WAKE, _WAKE_ALL, None, None, 0) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"futex wake failed: {os.strerror(code)}")


class SleepPoll:
    """A WaitMethod: waits by looking at the word between naps that double from 50 us to 5 ms. Works everywhere."""

    def wait(self, address: int, expected: int, timeout_s: float | None) -> None:
        word = ctypes.c_uint32.from_address(address)
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        nap_s = _NAP_FIRST_S
        while word.value == expected and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(nap_s, left_s))
            nap_s = min(2 * nap_s, _NAP_MAX_S)

    def wake(self, address: int) -> None:
        """Does nothing: sleepers look by themselves."""


def _has_known_system_calls() -> bool:
    is_64_bit = ctypes.sizeof(ctypes.c_void_p) == 8  # a 32-bit Python on a 64-bit kernel has other numbers
    return sys.platform == "linux" and is_64_bit and platform.machine() in _SYSTEM_CALL_NUMBERS


def choose_wait_method() -> WaitMethod:
    """The best implementation on this machine."""
    try:
        return Futex()
    except OSError:
        return SleepPoll()


def _no_fence() -> None:
    """Nothing to do: x86 keeps stores in order among stores, and loads in order among loads."""


def _membarrier_fence() -> Callable[[], None]:
    """A full barrier through the membarrier system call. No process registers for it, so it interrupts no other core."""
    call = _kernel_call()
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long]
    number = _SYSTEM_CALL_NUMBERS[platform.machine()][1]

    def fence() -> None:
        if call(number, _MEMBARRIER_GLOBAL_EXPEDITED, 0, 0) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"membarrier failed: {os.strerror(code)}; allow it in the container's filter")

    fence()
    return fence


def choose_fence() -> Callable[[], None]:
    """A function after which all earlier loads and stores of this thread are done before any later one.

    Raises OSError on a weakly ordered machine without a barrier that Python can reach, rather than risk silent corruption.
    """
    if platform.machine() in _STRONGLY_ORDERED_MACHINES:
        return _no_fence
    if sys.platform == "darwin":
        return ctypes.CDLL(None).OSMemoryBarrier
    if _has_known_system_calls():
        return _membarrier_fence()
    machine = f"{sys.platform} on {platform.machine()}"
    raise OSError(errno.ENOSYS, f"no memory barrier known for {machine}; use x86_64 or aarch64")
