"""What a process gives up for good before it runs a program that nobody trusts.

A filter of the kernel's (seccomp, Linux 3.17) refuses the system calls that open a connection,
change anything on the disk, start or end a process, or look into one. It needs no rights, and holds
in containers too. Limits (setrlimit) bound CPU seconds, memory and output. Imports the standard
library alone, as it runs in a process without this project.

Numbers: linux/seccomp.h, linux/filter.h, linux/audit.h, asm/unistd_64.h, asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_FILTER = 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_X32 = 0x40000000

# System calls by machine: its audit number; those that are refused; those refused by the bits of an
# argument (its place, bits); clone, clone3.
_SHARED_REFUSED = (424, 425, 428, 429, 430, 432, 434, 437, 438, 440, 442, 452)
_X86_64 = (
    0xC000003E,
    (
        *(41, 42, 43, 44, 46, 49, 50, 53, 288, 307),  # sockets
        *(76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133),  # the disk
        *(188, 189, 190, 197, 198, 199, 235, 258, 259, 260, 261, 263, 264, 265, 266, 268, 280),
        *(285, 316),
        *(57, 58, 59, 322),  # processes: fork, vfork, exec
        *(62, 101, 129, 141, 200, 203, 234, 297, 298, 302, 310, 311, 312),  # those of others
        *(29, 30, 64, 68, 240, 220, 251, 142, 144, 160),  # what is shared with them
        *(155, 161, 165, 166, 167, 169, 246, 248, 249, 250, 272, 304, 308, 313, 321, 323),  # more
    ),
    ((2, 1), (257, 2)),  # open, openat: flags
    56,
)
_AARCH64 = (
    0xC00000B7,
    (
        *(198, 199, 200, 201, 202, 203, 206, 211, 242, 269),
        *(33, 34, 35, 36, 37, 38, 45, 46, 47, 52, 53, 54, 55, 5, 6, 7, 14, 15, 16, 88, 276),
        *(221, 281),
        *(117, 118, 119, 122, 129, 130, 131, 138, 140, 240, 241, 261, 270, 271, 272),
        *(180, 186, 190, 194, 196),
        *(39, 40, 41, 51, 97, 142, 104, 217, 218, 219, 264, 265, 268, 273, 280, 282),
    ),
    ((56, 2),),
    220,
)
_MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}
_CLONE3 = 435
_CLONE_THREAD = 0x00010000


def limit(cpu_seconds: int, memory_bytes: int, output_bytes: int) -> None:
    """Bound what this process may use."""
    bounds = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: output_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in bounds.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def confine() -> None:
    """Let the kernel refuse what the module's first lines name, for this process and its threads.

    Raises OSError where it cannot: then nothing that is not trusted may run.
    """
    program = _program(*_MACHINES[platform.machine()])
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
    _prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(header))


def is_known() -> bool:
    """Whether there is a filter for this system and machine."""
    return platform.system() == "Linux" and platform.machine() in _MACHINES


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, 9, 0)


def _prctl(option: int, first: int, second: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(first), second, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _program(
    machine: int, refused: tuple[int, ...], by_bits: tuple[tuple[int, int], ...], clone: int
) -> list[bytes]:
    """The filter: one instruction after another, each with how many to skip if it holds, or not."""
    refuse = _step(_RETURN, _REFUSE | errno.EPERM)
    steps = [
        _step(_LOAD, _MACHINE),
        _step(_EQUAL, machine, yes=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, _X32, no=1),
        _step(_RETURN, _KILL),
        _step(_EQUAL, _CLONE3, no=1),
        _step(_RETURN, _REFUSE | errno.ENOSYS),  # the library then takes clone
    ]
    for number in (*refused, *_SHARED_REFUSED):
        steps += [_step(_EQUAL, number, no=1), refuse]
    for number, argument in by_bits:
        place = _FIRST_ARGUMENT + 8 * argument
        steps += [_step(_EQUAL, number, no=4), _step(_LOAD, place)]
        steps += [_step(_ANY_BIT, _WRITES, no=1), refuse, _step(_RETURN, _ALLOW)]
    steps += [_step(_EQUAL, clone, no=4), _step(_LOAD, _FIRST_ARGUMENT)]
    steps += [_step(_ANY_BIT, _CLONE_THREAD, yes=1), refuse, _step(_RETURN, _ALLOW)]
    return [*steps, _step(_RETURN, _ALLOW)]


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)
