"""Names of devices and machines that trainer ranks and engine ranks agree on, whatever numbers they give them."""

from pathlib import Path

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return a name of this machine that its containers share; host names may be equal or differ between them."""
    return _BOOT_ID.read_text().strip()


def device_name(device: torch.device) -> str:
    """Return the UUID of a GPU, which no order of devices changes, or the name of the machine for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else host_name()
