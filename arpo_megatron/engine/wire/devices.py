"""Names of devices and machines that trainer ranks and engine ranks agree on, whatever numbers they give them."""

from pathlib import Path

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_FOLDERS = ("/dev/shm", "/tmp")  # noqa: S108


def host_name() -> str:
    """Return a name of this machine that its containers share; host names may be equal or differ between them."""
    return _BOOT_ID.read_text().strip()


def device_name(device: torch.device) -> str:
    """Return a name that processes have in common if they can share memory of a device.

    That is the UUID of a GPU, which no order of devices changes. For a CPU it is the name of the machine and of the two
    folders in which torch shares memory by name: containers on one machine may each have their own.
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    folders = (Path(folder).stat() for folder in _SHARED_FOLDERS)
    return "/".join([host_name(), *(f"{folder.st_dev}:{folder.st_ino}" for folder in folders)])
