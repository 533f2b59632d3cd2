"""Faults that a node's GPUs have reported: uncorrectable memory errors (ECC), failed row remaps, and Xid messages."""

import re
import subprocess
from collections.abc import Sequence

from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, warning

_FIELDS = "index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([\w:.]+)\): (\d+)")
_HARDWARE_XIDS = {
    "48": "double-bit ECC error",
    "64": "row remap failed",
    "74": "NVLink error",
    "79": "fell off the bus",
    "92": "many single-bit ECC errors",
    "94": "contained ECC error",
    "95": "uncontained ECC error",
    "119": "GSP timeout",
    "120": "GSP error",
}
"""Xids of the hardware. Others (13, 31, 43, 45) are those of programs."""
_FIX = "reset the GPU or drain the node (nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg)"


def check_gpu_health() -> CheckResult:
    """Check what nvidia-smi counts, and the kernel's log if this user may read it."""
    query = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    counted = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    try:
        logged = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        log = None
    else:
        log = logged.stdout.splitlines() if logged.returncode == 0 else None
    return judge_gpus(counted.stdout.splitlines() if counted.returncode == 0 else [], log)


def judge_gpus(rows: Sequence[str], log: Sequence[str] | None) -> CheckResult:
    """Return the result for rows of nvidia-smi and lines of the kernel's log (None: not readable)."""
    broken, suspect = [], []
    for row in rows:
        index, errors, pending, failed = (field.strip() for field in row.split(","))
        if failed.lower() in ("yes", "1"):
            broken.append(f"GPU {index}: a row remap failed")
        elif errors.isdecimal() and int(errors):
            suspect.append(f"GPU {index}: {errors} uncorrectable ECC errors")
        elif pending.lower() in ("yes", "1"):
            suspect.append(f"GPU {index}: a row remap is pending")
    xids = {match.groups() for line in log or () if (match := _XID.search(line)) and match[2] in _HARDWARE_XIDS}
    suspect += [f"GPU {bus}: Xid {number} ({_HARDWARE_XIDS[number]})" for bus, number in sorted(xids)]
    read = "" if log is not None else "; the kernel's log (Xid) is not readable"
    if broken:
        return failure("gpu health", "; ".join([*broken, *suspect]), _FIX)
    if suspect:
        return warning("gpu health", "; ".join(suspect) + read, _FIX)
    if not rows:
        return warning("gpu health", f"nvidia-smi does not count errors{read}", "nothing, if this GPU has no ECC")
    return ok("gpu health", f"no uncorrectable errors of {len(rows)} GPUs{read}")
