"""Filter the system calls of a policy's programs (seccomp); program_runner.py installs the filter.

Namespaces keep a program in its sandbox. The filter denies what they leave: memory that no
process's size shows, keyrings, sockets to the host of a virtual machine, other processes' memory,
new namespaces, and parts of the kernel that programs need not reach. A call that is newer than this
table is denied, too. This module imports only the standard library, because it runs in the sandbox.
Source of the numbers: asm/unistd_64.h and asm-generic/unistd.h of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""For each machine its column in the tables below, and its AUDIT_ARCH (linux/audit.h)."""
_NEWEST = 462  # mseal, of Linux 6.10, on both
_DENIED = {
    # memory that belongs to no process
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75)},
    **{"inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262)},
    "io_setup": (206, 0),
    # keyrings
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # other processes
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"kcmp": (312, 272), "pidfd_getfd": (438, 438)},
    # namespaces and mounts
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39)},
    **{"pivot_root": (155, 41), "chroot": (161, 51), "open_by_handle_at": (304, 265)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433)},
    "mount_setattr": (442, 442),
    # parts of the kernel
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    "syslog": (103, 116),
    # files of the host, which are read-only and can be locked all the same
    "flock": (73, 32),
}
_WITHOUT_EFFECT = {
    # The device /dev/null is the host's, and belongs to a program that root runs.
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None)},
    **{"utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    "setsockopt": (54, 208),  # a larger buffer is memory of no process
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_NEW_NAMESPACES = 0x7E020000  # linux/sched.h: all CLONE_NEW*
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_AF_UNIX = 1  # others have buffers of a size for the whole machine, and there is no network
_MMAP, _SHARED_ANONYMOUS = (9, 222), 0x21  # linux/mman.h: memory that no process's size shows
_FCNTL, _F_SETLEASE = (72, 25), 1024  # linux/fcntl.h

_LOAD, _AND, _EQUAL, _GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06  # linux/bpf_common.h
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32, 40)  # struct seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # linux/seccomp.h

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38  # linux/prctl.h


def is_filtered(machine: str = os.uname().machine) -> bool:
    """Return whether there is a filter for a kind of machine, such as "x86_64"."""
    return machine in _ARCHITECTURES


def make_filter() -> Callable[[], None]:
    """Return a function that installs the filter in its process, for it and all that it starts.

    The function raises OSError if the kernel has no filters.
    """
    program = _compile(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    packed = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    description = ctypes.create_string_buffer(packed, len(packed))

    def install() -> None:
        _ = code  # kept, since the description has its address alone
        for words in (
            (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(description), 0, 0),
        ):
            if libc.prctl(*map(ctypes.c_ulong, words)):
                raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")

    return install


def _compile(machine: str) -> bytes:
    """Return the filter as instructions of classic BPF."""
    column, architecture = _ARCHITECTURES[machine]
    steps = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)),
        (_LOAD, 0, 0, _NUMBER),
        *((_GREATER, 0, 1, _NEWEST), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)),  # x32's, too
        *((_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)),
    ]
    for table, result in ((_DENIED, _ERROR | errno.EPERM), (_WITHOUT_EFFECT, _ERROR)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, result)]
    every = 0xFFFFFFFF
    for calls, place, mask, value, denies_equal, error in (
        (_CLONE, 0, _NEW_NAMESPACES, 0, False, errno.EPERM),
        (_SOCKET, 0, every, _AF_UNIX, False, errno.EAFNOSUPPORT),
        (_SOCKETPAIR, 0, every, _AF_UNIX, False, errno.EAFNOSUPPORT),
        (_MMAP, 3, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS, True, errno.EPERM),
        (_FCNTL, 1, every, _F_SETLEASE, True, errno.EPERM),
    ):
        steps += [
            *((_EQUAL, 0, 5, calls[column]), (_LOAD, 0, 0, _ARGUMENTS[place]), (_AND, 0, 0, mask)),
            (_EQUAL, int(not denies_equal), int(denies_equal), value),
            *((_RETURN, 0, 0, _ERROR | error), (_RETURN, 0, 0, _ALLOW)),
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
