"""One function call inside another process, made by its main thread while only that thread is stopped.

gdb could do this too, but not as gently: it stops every thread for as long as it takes to read symbols (0.15 s), and
before version 14 it cannot write back the registers of a processor with AMX (Sapphire Rapids, the host of most H100s):
it fails between two writes and the process aborts. Here the extended registers are saved and restored in the kernel's
own format and size, and only the thread that makes the call is stopped, so that no lock of a stopped thread can be in
the way.

This program may be killed at any moment, and the process must live on. So the call is made as the kernel calls a signal
handler: a frame on the stack holds all that the thread was, and where the function returns to, `rt_sigreturn` puts it
back, whether this program is still there or not. While it is, it stops the thread there and puts everything back
itself, which is more exact: a system call that was interrupted then continues as if it never had been.

x86-64 only: the registers of a call differ by architecture.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

_SEIZE, _INTERRUPT, _DETACH, _CONT, _SYSCALL, _POKEDATA = 0x4206, 0x4207, 17, 7, 24, 5
_GETREGSET, _SETREGSET, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x420A, 0x420B
_NT_PRSTATUS, _NT_X86_XSTATE = 1, 0x202
_MARK_SYSCALLS = 1
"""PTRACE_O_TRACESYSGOOD. Without it, a thread that stops at a system call dies of SIGTRAP when its tracer is killed."""
_AT_SYSCALL = signal.SIGTRAP | 0x80
_EVENT_STOP = 128
_WALL = 0x40000000  # wait for a thread whoever made it
_MASK_BYTES = 8
_XSTATE_BYTES = 64 * 1024
"""More than any processor has; the kernel shows how much of it there is."""

_SYNCHRONOUS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
_HELD_SIGNALS = 2**64 - 1 - sum(1 << (number - 1) for number in _SYNCHRONOUS)
"""Every signal waits until the call is over, except those that the call itself would raise."""

_READ_WRITE, _READ_EXECUTE, _PRIVATE_ANONYMOUS = 3, 5, 0x22
_STACK_BYTES, _PAGE_BYTES, _RED_ZONE_BYTES = 256 * 1024, 4096, 128
_CODE_SEGMENT_64, _DIRECTION_FLAG, _LARGEST_ERROR = 0x33, 0x400, 4095
_NO_SYSCALL = 2**64 - 1
_FUTEX, _RT_SIGRETURN = 202, 15
_RESTARTED, _RESTARTED_BY_BLOCK = (512, 513, 514), 516
"""ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND; ERESTART_RESTARTBLOCK (include/linux/errno.h)."""

_CALLER = bytes.fromhex("ffd0 488903 b80f000000 0f05")
"""call *%rax; mov %rax,(%rbx); mov $15,%eax; syscall (rt_sigreturn)."""
_CALLER_RETURNS_AT = 5
SIGNAL_RETURN = bytes.fromhex("48c7c00f000000 0f05")
"""mov $15,%rax; syscall: what a C library's signal handlers return to (``__restore_rt``)."""

# The frame that the kernel leaves for a signal handler: arch/x86/include/uapi/asm/sigcontext.h and ucontext.h.
_USER_CONTEXT_FLAGS = 1 | 2 | 4  # extended registers, stack segment, stack segment restored as it is
_NO_SUCH_STACK = 4  # not a mode of sigaltstack: the kernel leaves the thread's own as it is
_FRAME_BYTES = 8 + 40 + 256 + 8
_MAGIC_1, _MAGIC_2 = 0x46505853, 0x46505845
_LEGACY_BYTES, _SOFTWARE_AT, _TILE_DATA, _TILE_DATA_AT = 512, 464, 1 << 18, 2816

_STOP_DEADLINE_S, _CALL_DEADLINE_S = 5.0, 2.0
_POLL_S = 0.0001


class TraceError(Exception):
    """The process could not be stopped, or the call did not end as it should; it runs on as before."""


# fmt: off
_REGISTER_NAMES = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi", "orig_rax",
    "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
)
_FRAME_REGISTERS = (
    "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax", "rcx", "rsp",
    "rip", "eflags",
)
# fmt: on


class _Registers(ctypes.Structure):
    """`struct user_regs_struct` of x86-64."""

    _fields_ = [(name, ctypes.c_uint64) for name in _REGISTER_NAMES]


class _IoVector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class PtraceRequest(TypedDict):
    """`function(callback, address of argument)` is called in the process `pid`, if `ready()` there is not 0.

    `map_memory`, `signal_return`: where its C library has `mmap` and `SIGNAL_RETURN`. `argument`: a C string that stays
    there for good.
    """

    pid: int
    map_memory: int
    signal_return: int
    ready: int
    function: int
    callback: int
    argument: str


class CallAnswer(TypedDict):
    """How a call that was made in the stopped process came out.

    `result`: the function's, a C int. `pause_s`: how long the thread stood still. `waits_in`: the number of the system
    call that it waited in, or -1. `error`: empty, or why there is no result.
    """

    result: int
    pause_s: float
    waits_in: int
    error: str
    errno: int


class _Thread:
    """The main thread of a process while it is stopped. Made by `_stopped`."""

    def __init__(self, pid: int, memory: int) -> None:
        self._pid = pid
        self._memory = memory
        self._saved = _Registers()
        _get_registers(pid, _NT_PRSTATUS, self._saved)
        if self._saved.cs != _CODE_SEGMENT_64:
            raise TraceError("a 32-bit process")
        extended = ctypes.create_string_buffer(_XSTATE_BYTES)
        size_bytes = _get_registers(pid, _NT_X86_XSTATE, extended)
        self._extended = ctypes.create_string_buffer(extended.raw[:size_bytes], size_bytes)
        self._mask = ctypes.c_uint64()
        _ptrace(_GETSIGMASK, pid, _MASK_BYTES, ctypes.addressof(self._mask))
        self._argument = self._caller = self._stack_end = 0

    @property
    def waits_in(self) -> int:
        """The number of the system call that it was stopped in; -1 for none."""
        interrupted = 2**64 - self._saved.rax in (*_RESTARTED, _RESTARTED_BY_BLOCK, errno.EINTR)
        return int(self._saved.orig_rax) if interrupted and self._saved.orig_rax < _NO_SYSCALL // 2 else -1

    def restore(self) -> None:
        """Put everything back as it was found; the kernel then restarts a system call that was interrupted.

        The registers come last: until then the thread is where `rt_sigreturn` would do this too.
        """
        _set_registers(self._pid, _NT_X86_XSTATE, self._extended)
        _ptrace(_SETSIGMASK, self._pid, _MASK_BYTES, ctypes.addressof(self._mask))
        _set_registers(self._pid, _NT_PRSTATUS, self._saved)

    def interrupt_wait(self) -> None:
        """End its wait for a lock, if it is in one, as a signal would: Python then sees what there is to do."""
        if self.waits_in == _FUTEX:
            self._saved.rax = 2**64 - errno.EINTR

    def place(self, map_memory: int, signal_return: int, content: bytes) -> int:
        """Map new memory for `content`, for a stack and for the code of the call; the process's allocator is not asked.

        Returns:
            The address of `content`. It stays mapped: the interpreter reads it after we are gone.

        Raises:
            TraceError: the kernel gave no memory.
        """
        frame = self._write_frame(int(self._saved.rsp) - _RED_ZONE_BYTES, signal_return)
        size_bytes = len(content) + _STACK_BYTES
        argument, caller = (
            self._map(map_memory, signal_return, frame, *wanted)
            for wanted in ((size_bytes, _READ_WRITE), (_PAGE_BYTES, _READ_EXECUTE))
        )
        os.pwrite(self._memory, content, argument)
        code = _CALLER.ljust(-len(_CALLER) % 8 + len(_CALLER), b"\0")
        for offset in range(0, len(code), 8):
            _ptrace(_POKEDATA, self._pid, caller + offset, int.from_bytes(code[offset : offset + 8], "little"))
        self._caller, self._stack_end = caller, (argument + size_bytes) // 16 * 16
        return argument

    def call(self, function: int, first: int, second: int) -> int:
        """Call a C function of two arguments on the stack that `place` made; returns its result, a C int.

        Raises:
            TraceError: it did not return in time, or a signal ended it.
        """
        slot = self._stack_end - 8
        frame = self._write_frame(slot, 0)
        registers = self._registers_at(self._caller, frame + 8)
        registers.rax, registers.rbx, registers.rdi, registers.rsi = function, slot, first, second
        self._run(registers, self._caller + _CALLER_RETURNS_AT, self._caller + len(_CALLER))
        return int.from_bytes(os.pread(self._memory, 4, slot), "little", signed=True)

    def _map(self, map_memory: int, signal_return: int, frame: int, size_bytes: int, access: int) -> int:
        """Have the thread call `mmap` of its C library, on its own stack."""
        registers = self._registers_at(map_memory, frame)
        registers.rdi, registers.rsi, registers.rdx, registers.rcx = 0, size_bytes, access, _PRIVATE_ANONYMOUS
        registers.r8, registers.r9 = 2**64 - 1, 0
        address = self._run(registers, signal_return, signal_return + len(SIGNAL_RETURN))
        if address >= 2**64 - _LARGEST_ERROR:
            raise TraceError(f"no memory in the process: {os.strerror(2**64 - address)}")
        return address

    def _registers_at(self, instruction: int, stack: int) -> _Registers:
        registers = _Registers.from_buffer_copy(self._saved)
        registers.rip, registers.rsp, registers.rax = instruction, stack, 0
        registers.orig_rax = _NO_SYSCALL  # the kernel must not restart one here
        registers.eflags &= ~_DIRECTION_FLAG
        return registers

    def _run(self, registers: _Registers, returns_at: int, after_return: int) -> int:
        """Let the thread run from `registers` until it is about to execute `rt_sigreturn`, and keep it from that.

        Args:
            returns_at: the instructions that make that system call. after_return: the one behind them.

        Returns:
            The result of the last system call before.
        """
        _set_registers(self._pid, _NT_PRSTATUS, registers)  # from here on the thread finds its way back alone
        held = ctypes.c_uint64(_HELD_SIGNALS)
        _ptrace(_SETSIGMASK, self._pid, _MASK_BYTES, ctypes.addressof(held))
        result, enters = 0, True
        deadline = time.monotonic() + _CALL_DEADLINE_S
        passed_on = 0
        while True:
            _ptrace(_SYSCALL, self._pid, 0, passed_on)
            try:
                status = _next_stop(self._pid, deadline)
            except TraceError:
                self._interrupt(runs=True)
                raise
            passed_on = 0
            if os.WSTOPSIG(status) == _AT_SYSCALL:
                _get_registers(self._pid, _NT_PRSTATUS, registers)
                if enters and (registers.orig_rax, registers.rip) == (_RT_SIGRETURN, after_return):
                    break
                enters, result = not enters, int(registers.rax)
            elif status >> 16 != _EVENT_STOP:
                passed_on = os.WSTOPSIG(status)
                if passed_on in _SYNCHRONOUS:
                    self._interrupt(runs=False)
                    raise TraceError(f"the call was ended by signal {passed_on}")
        registers.orig_rax, registers.rip = _NO_SYSCALL, returns_at
        _set_registers(self._pid, _NT_PRSTATUS, registers)
        self._interrupt(runs=False)
        return result

    def _interrupt(self, *, runs: bool) -> None:
        """Stop it where a system call can be restarted, whether it `runs` now or is stopped somewhere else."""
        deadline = time.monotonic() + _CALL_DEADLINE_S
        while True:
            _ptrace(_INTERRUPT, self._pid)  # every other stop takes it back (ptrace_stop in kernel/signal.c)
            if not runs:
                _ptrace(_CONT, self._pid)
            if _next_stop(self._pid, deadline) >> 16 == _EVENT_STOP:
                return
            runs = False

    def _write_frame(self, end: int, returns_to: int) -> int:
        """Write what the kernel leaves for a signal handler below `end`; returns where it begins.

        Args:
            returns_to: where the function that is called with this address as its stack returns to.
        """
        extended = self._extended_as_in_a_frame()
        at = (end - len(extended)) // 64 * 64
        begin = (at - _FRAME_BYTES) // 16 * 16 - 8
        after = self._after_a_signal()
        frame = struct.pack("<QQQQiIQ", returns_to, _USER_CONTEXT_FLAGS, 0, 0, _NO_SUCH_STACK, 0, 0)
        frame += struct.pack(f"<{len(_FRAME_REGISTERS)}Q", *(getattr(after, name) for name in _FRAME_REGISTERS))
        frame += struct.pack("<4H4QQ64xQ", after.cs, after.gs, after.fs, after.ss, 0, 0, 0, 0, at, self._mask.value)
        os.pwrite(self._memory, frame.ljust(at - begin, b"\0") + extended, begin)
        return begin

    def _after_a_signal(self) -> _Registers:
        """Return the registers with which the thread continues after a signal handler.

        An interrupted system call is begun again, or reports that it was interrupted (arch_do_signal_or_restart in
        arch/x86/kernel/signal.c).
        """
        after = _Registers.from_buffer_copy(self._saved)
        if self.waits_in >= 0:
            if 2**64 - after.rax in _RESTARTED:
                after.rax = after.orig_rax
                after.rip -= 2
            else:
                after.rax = 2**64 - errno.EINTR
        return after

    def _extended_as_in_a_frame(self) -> bytes:
        """Return the extended registers as a signal frame has them, their size written into a gap and at the end.

        The tiles of AMX are not in it while the thread has none (fpu/signal.c: check_xstate_in_sigframe).
        """
        found = self._extended.raw
        (features,) = struct.unpack_from("<Q", found, _SOFTWARE_AT)
        (in_use,) = struct.unpack_from("<Q", found, _LEGACY_BYTES)
        if features & _TILE_DATA and not in_use & _TILE_DATA:
            features &= ~_TILE_DATA
            found = found[:_TILE_DATA_AT]
        software = struct.pack("<IIQI", _MAGIC_1, len(found) + 4, features, len(found)).ljust(48, b"\0")
        return found[:_SOFTWARE_AT] + software + found[_LEGACY_BYTES:] + struct.pack("<I", _MAGIC_2)


@contextmanager
def _stopped(pid: int) -> Iterator[_Thread]:
    """Stop the main thread of a process, and let it go again in every case, exactly as it was.

    Where it does not stop in time it sits in the kernel: this program's end then takes the wish to stop it back.
    """
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        _ptrace(_SEIZE, pid, 0, _MARK_SYSCALLS)
        _ptrace(_INTERRUPT, pid)
        deadline = time.monotonic() + _STOP_DEADLINE_S
        status = _next_stop(pid, deadline)
        while status >> 16 != _EVENT_STOP:  # a signal came first: let it through
            _ptrace(_INTERRUPT, pid)
            _ptrace(_CONT, pid, 0, os.WSTOPSIG(status))
            status = _next_stop(pid, deadline)
        thread = _Thread(pid, memory)
        try:
            yield thread
        finally:
            thread.restore()
            _ptrace(_DETACH, pid)
    finally:
        os.close(memory)


def _next_stop(pid: int, deadline: float) -> int:
    """Wait for the next stop of the thread, until that time on the monotonic clock; return the status of the stop."""
    while True:
        waited, status = os.waitpid(pid, os.WNOHANG | _WALL)
        if waited:
            if os.WIFSTOPPED(status):
                return status
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        if time.monotonic() > deadline:
            raise TraceError("its main thread did not stop in time")
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
    """Run the helper program: one `PtraceRequest` as JSON on stdin, one `CallAnswer` as JSON on stdout."""
    request: PtraceRequest = json.load(sys.stdin)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # it takes milliseconds: what can wait does
    try:
        answer = _inject(request)
    except TraceError as error:
        answer = CallAnswer(result=-1, pause_s=0.0, waits_in=-1, error=str(error), errno=0)
    except OSError as error:
        reason, number = str(error.strerror or error), error.errno or 0
        answer = CallAnswer(result=-1, pause_s=0.0, waits_in=-1, error=reason, errno=number)
    json.dump(answer, sys.stdout)


def _inject(request: PtraceRequest) -> CallAnswer:
    content = request["argument"].encode() + b"\0"
    begin = time.monotonic()
    with _stopped(request["pid"]) as thread:
        address = thread.place(request["map_memory"], request["signal_return"], content)
        if not thread.call(request["ready"], 0, 0):
            raise TraceError("its interpreter is just starting or ending")
        result = thread.call(request["function"], request["callback"], address)
        waits_in = thread.waits_in
        if result == 0:
            thread.interrupt_wait()
    return CallAnswer(result=result, pause_s=time.monotonic() - begin, waits_in=waits_in, error="", errno=0)


if __name__ == "__main__":
    main()
