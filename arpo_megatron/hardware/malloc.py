"""What glibc does with memory that a program has freed: a trainer on a CPU wants to keep it, an export to return it."""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep() -> None:
    """Reuse freed blocks instead of giving them back to the kernel, which has to clear every page anew.

    An update of some thousand tokens then took about a tenth less time on two cores. Blocks of 32 MiB and more (the
    largest threshold that glibc takes) do go back: a heap with holes of the size of an embedding would break the
    promise of `arpo bench load`. Another C library is left as it is.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((_M_MMAP_THRESHOLD, 2**25), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28)):
            libc.mallopt(option, value)


def give_back() -> None:
    """Give the kernel what was kept so far."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
