"""A process that can read whatever it could read before, but can change nothing outside itself.

A record's process ends with its memory (`record_processes`). What it writes elsewhere would stay: a
file, memory that it opens by name, a message to a server, the priority of the process that it was
forked from. `seal` installs a filter of system calls (seccomp of Linux, inherited by all children)
that refuses every call that could leave something behind. Calls that the filter does not know,
because they are newer than it, are refused as well.

Clocks, process numbers and the times at which files were read are kept by the system itself, and a
sealed process can see them.
"""

import ctypes
import errno
import platform
import struct
import sys

# Names of system calls with their numbers on x86_64 and aarch64, from Linux's headers.
_FILES = {
    "creat": (85, None), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47),
    "mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "io_setup": (206, 0),
}  # fmt: skip
_CONNECTIONS = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_PROCESSES = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "fanotify_init": (300, 262),
}  # fmt: skip
_SYSTEM = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "unshare": (272, 97),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "acct": (163, 89),
    "syslog": (103, 116), "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip
_OPEN, _OPENAT, _PRLIMIT = (2, None), (257, 56), (302, 261)
_FLOCK, _FCNTL = (73, 32), (72, 25)
_LATEST = 424  # from here on, numbers are the same on all processors
_HARMLESS = {436, 439, 441, 449}  # close_range, faccessat2, epoll_pwait2, futex_waitv
_WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW and those of open files
_NOTICES = (8, 15, 1024, 1026)  # F_SETOWN, F_SETOWN_EX, F_SETLEASE, F_NOTIFY

_PROCESSORS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, number in a filter
_LOAD, _IF_EQUAL, _IF_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _PROCESSOR, _ARGUMENTS = 0, 4, 16  # places in the data that a filter sees
_SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 22, 38  # of prctl


def seal() -> None:
    """Refuse every system call of this process and its children that changes something outside.

    It cannot be undone. Files must have been opened for reading only. Locks of files are taken to
    succeed and have no effect. Raises `OSError` if the system has no such filters.
    """
    if sys.platform != "linux" or platform.machine() not in _PROCESSORS:
        raise OSError(errno.ENOSYS, "processes cannot be sealed on this system")
    code = _filter(*_PROCESSORS[platform.machine()])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _PacketFilter(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or library.prctl(
        _SET_SECCOMP, 2, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "processes cannot be sealed on this system")


class _PacketFilter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def _filter(column: int, processor: int) -> bytes:
    """Return the filter, in the code of Linux's packet filters."""
    refused = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    unknown = (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    allowed, ignored = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR)

    def unless(numbers: tuple[int | None, ...], block: list[tuple[int, int, int, int]]):
        """Return code that runs `block`, which returns, if the call has this number."""
        number = numbers[column]
        return [] if number is None else [(_IF_EQUAL, 0, len(block), number), *block]

    code = [(_LOAD, 0, 0, _PROCESSOR), (_IF_EQUAL, 1, 0, processor), refused]
    code += [(_LOAD, 0, 0, _NUMBER)]
    for numbers in (_FILES | _CONNECTIONS | _PROCESSES | _SYSTEM).values():
        code += unless(numbers, [refused])
    for numbers, argument in ((_OPEN, 1), (_OPENAT, 2)):
        flags = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
        code += unless(numbers, [flags, (_IF_BITS, 0, 1, _WRITING), refused, allowed])
    code += unless(_FLOCK, [ignored])
    commands: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, _ARGUMENTS + 8)]
    for command in _LOCKS:
        commands += [(_IF_EQUAL, 0, 1, command), ignored]
    for command in _NOTICES:
        commands += [(_IF_EQUAL, 0, 1, command), refused]
    code += unless(_FCNTL, [*commands, allowed])
    own_limits = [(_LOAD, 0, 0, _ARGUMENTS), (_IF_EQUAL, 0, 1, 0), allowed, refused]
    code += unless(_PRLIMIT, own_limits)
    for number in sorted(_HARMLESS):
        code += [(_IF_EQUAL, 0, 1, number), allowed]
    code += [(_IF_LEAST, 0, 1, _LATEST), unknown, allowed]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
