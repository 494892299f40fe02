"""One function call inside another process, made by its main thread while only that thread stands still.

gdb could do the same, but not as gently: it stops every thread for as long as it takes to read symbols (0.15 s), and
before version 14 it cannot write back the registers of a processor with AMX (Sapphire Rapids, the host of most H100s):
it fails between two writes and the process aborts. Here the extended registers are saved and restored in the kernel's
own format and size, and only the thread that makes the call is stopped, so that no lock of a stopped thread can be in
the way.

x86-64 only: the registers of a call differ by architecture.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

_SEIZE, _INTERRUPT, _DETACH, _CONT, _SINGLESTEP = 0x4206, 0x4207, 17, 7, 9
_GETREGSET, _SETREGSET, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x420A, 0x420B
_NT_PRSTATUS, _NT_X86_XSTATE = 1, 0x202
_EVENT_STOP = 128
_WALL = 0x40000000  # wait for a thread whoever made it
_MASK_BYTES = 8
_XSTATE_BYTES = 64 * 1024
"""More than any processor has; the kernel says how much of it there is."""

_SYNCHRONOUS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
_HELD_SIGNALS = 2**64 - 1 - sum(1 << (number - 1) for number in _SYNCHRONOUS)
"""Every signal waits until the call is over, except those that the call itself would raise."""

_SYSCALL = b"\x0f\x05"
_MMAP, _READ_WRITE, _PRIVATE_ANONYMOUS = 9, 3, 0x22
_STACK_BYTES = 256 * 1024
_CODE_SEGMENT_64, _DIRECTION_FLAG, _LARGEST_ERROR = 0x33, 0x400, 4095
_RETURN_ADDRESS = 0
"""Nothing is mapped there: the return from the call faults, which stops the thread and tells us."""

_STOP_DEADLINE_S, _CALL_DEADLINE_S = 5.0, 2.0
_POLL_S = 0.0001


class TraceError(Exception):
    """The process could not be stopped, or the call did not end as it should; it runs on as before."""


# fmt: off
_REGISTER_NAMES = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi", "orig_rax",
    "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
)
# fmt: on


class _Registers(ctypes.Structure):
    """`struct user_regs_struct` of x86-64."""

    _fields_ = [(name, ctypes.c_uint64) for name in _REGISTER_NAMES]


class _IoVector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Request(TypedDict):
    """`function(callback, address of argument)` is called in the process `pid`, if `ready()` there is not 0.

    `vdso`: where the kernel's code page lies in it, start and end. `argument`: a C string that stays there for good.
    """

    pid: int
    vdso: list[int]
    ready: int
    function: int
    callback: int
    argument: str


class Answer(TypedDict):
    """What became of it. `pause_s`: how long the thread stood still. `error`: empty, or why there is no result."""

    result: int
    pause_s: float
    error: str
    errno: int


class _Thread:
    """The main thread of a process while it stands still. Made by `_stopped`."""

    def __init__(self, pid: int, memory: int) -> None:
        self._pid = pid
        self._memory = memory
        self._stack = 0
        self.undelivered = 0
        self._saved = _Registers()
        _get_registers(pid, _NT_PRSTATUS, self._saved)
        if self._saved.cs != _CODE_SEGMENT_64:
            raise TraceError("a 32-bit process")
        extended = ctypes.create_string_buffer(_XSTATE_BYTES)
        size_bytes = _get_registers(pid, _NT_X86_XSTATE, extended)
        self._extended = ctypes.create_string_buffer(extended.raw[:size_bytes], size_bytes)
        self._mask = ctypes.c_uint64()
        _ptrace(_GETSIGMASK, pid, _MASK_BYTES, ctypes.addressof(self._mask))
        held = ctypes.c_uint64(_HELD_SIGNALS)
        _ptrace(_SETSIGMASK, pid, _MASK_BYTES, ctypes.addressof(held))

    def restore(self) -> None:
        """Put everything back as it was found; the kernel then restarts a system call that was interrupted."""
        _set_registers(self._pid, _NT_PRSTATUS, self._saved)
        _set_registers(self._pid, _NT_X86_XSTATE, self._extended)
        _ptrace(_SETSIGMASK, self._pid, _MASK_BYTES, ctypes.addressof(self._mask))

    def place(self, vdso: tuple[int, int], content: bytes) -> int:
        """Map new memory for `content` and, above it, a stack for the call; the process's allocator is not asked.

        Args:
            vdso: where the kernel's own code page lies (start, end); it has a system call instruction.

        Returns:
            The address of `content`. It stays mapped: the interpreter reads it after we are gone.

        Raises:
            TraceError: the kernel gave no memory.
        """
        at = os.pread(self._memory, vdso[1] - vdso[0], vdso[0]).find(_SYSCALL)
        if at < 0:
            raise TraceError("no system call instruction in the vdso")
        size_bytes = len(content) + _STACK_BYTES
        registers = self._registers_at(vdso[0] + at)
        registers.rax, registers.rdi, registers.rsi, registers.rdx = _MMAP, 0, size_bytes, _READ_WRITE
        registers.r10, registers.r8, registers.r9 = _PRIVATE_ANONYMOUS, 2**64 - 1, 0
        after = self._run(registers, _SINGLESTEP, signal.SIGTRAP)
        if after.rax >= 2**64 - _LARGEST_ERROR:
            raise TraceError(f"no memory in the process: {os.strerror(2**64 - after.rax)}")
        address = int(after.rax)
        os.pwrite(self._memory, content, address)
        self._stack = (address + size_bytes - 256) // 16 * 16
        return address

    def call(self, function: int, first: int, second: int) -> int:
        """Call a C function of two arguments on the stack that `place` made; returns its result, a C int.

        Raises:
            TraceError: it did not return in time, or not to where it should.
        """
        registers = self._registers_at(function)
        registers.rdi, registers.rsi = first, second
        registers.rsp = self._stack - 8  # as a call instruction leaves it: 8 below a multiple of 16
        os.pwrite(self._memory, _RETURN_ADDRESS.to_bytes(8, "little"), registers.rsp)
        after = self._run(registers, _CONT, signal.SIGSEGV)
        if after.rip != _RETURN_ADDRESS:
            raise TraceError(f"the call went astray at {after.rip:#x}")
        return ctypes.c_int(after.rax & 0xFFFFFFFF).value

    def _registers_at(self, instruction: int) -> _Registers:
        registers = _Registers.from_buffer_copy(self._saved)
        registers.rip = instruction
        registers.rax = 0
        registers.orig_rax = 2**64 - 1  # not in a system call: the kernel must not restart one here
        registers.eflags &= ~_DIRECTION_FLAG
        return registers

    def _run(self, registers: _Registers, how: int, ends_with: signal.Signals) -> _Registers:
        """Let the thread run from `registers` until a signal ends it; the registers then."""
        _set_registers(self._pid, _NT_PRSTATUS, registers)
        _ptrace(how, self._pid)
        try:
            number = os.WSTOPSIG(_next_stop(self._pid, _CALL_DEADLINE_S))
        except TraceError:
            _ptrace(_INTERRUPT, self._pid)
            _next_stop(self._pid, _CALL_DEADLINE_S)
            raise
        if number != ends_with:
            self.undelivered = number if number not in _SYNCHRONOUS else 0
            raise TraceError(f"the call was ended by signal {number}")
        _get_registers(self._pid, _NT_PRSTATUS, registers)
        return registers


@contextmanager
def _stopped(pid: int) -> Iterator[_Thread]:
    """Stop the main thread of a process, and let it go again whatever happens, exactly as it was.

    Where it does not stop in time it sits in the kernel: this program's end then takes the wish to stop it back.
    """
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        _ptrace(_SEIZE, pid)
        _ptrace(_INTERRUPT, pid)
        status = _next_stop(pid, _STOP_DEADLINE_S)
        while status >> 16 != _EVENT_STOP:  # a signal came first: let it through
            _ptrace(_CONT, pid, 0, os.WSTOPSIG(status))
            status = _next_stop(pid, _STOP_DEADLINE_S)
        thread = _Thread(pid, memory)
        try:
            yield thread
        finally:
            thread.restore()
            _ptrace(_DETACH, pid, 0, thread.undelivered)
    finally:
        os.close(memory)


def _next_stop(pid: int, deadline_s: float) -> int:
    """The status with which the thread stops next."""
    deadline = time.monotonic() + deadline_s
    while True:
        waited, status = os.waitpid(pid, os.WNOHANG | _WALL)
        if waited:
            if os.WIFSTOPPED(status):
                return status
            raise ProcessLookupError("the process has ended")
        if time.monotonic() > deadline:
            raise TraceError(f"its main thread did not stop within {deadline_s:.0f} s")
        time.sleep(_POLL_S)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _get_registers(pid: int, kind: int, buffer: ctypes.Array[ctypes.c_char] | _Registers) -> int:
    """Fill the buffer with a set of registers; returns its size in bytes."""
    vector = _IoVector(ctypes.addressof(buffer), ctypes.sizeof(buffer))
    _ptrace(_GETREGSET, pid, kind, ctypes.addressof(vector))
    return int(vector.length)


def _set_registers(pid: int, kind: int, buffer: ctypes.Array[ctypes.c_char] | _Registers) -> None:
    vector = _IoVector(ctypes.addressof(buffer), ctypes.sizeof(buffer))
    _ptrace(_SETREGSET, pid, kind, ctypes.addressof(vector))


def main() -> None:
    """The helper program: one `Request` as JSON on stdin, one `Answer` as JSON on stdout."""
    request: Request = json.load(sys.stdin)
    # Ending before the registers are restored would crash the process: everything that can wait does.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        answer = _inject(request)
    except TraceError as error:
        answer = Answer(result=-1, pause_s=0.0, error=str(error), errno=0)
    except OSError as error:
        answer = Answer(result=-1, pause_s=0.0, error=str(error.strerror or error), errno=error.errno or 0)
    json.dump(answer, sys.stdout)


def _inject(request: Request) -> Answer:
    content = request["argument"].encode() + b"\0"
    begin = time.monotonic()
    with _stopped(request["pid"]) as thread:
        address = thread.place((request["vdso"][0], request["vdso"][1]), content)
        if not thread.call(request["ready"], 0, 0):
            raise TraceError("its interpreter is just starting or ending")
        result = thread.call(request["function"], request["callback"], address)
    return Answer(result=result, pause_s=time.monotonic() - begin, error="", errno=0)


if __name__ == "__main__":
    main()
