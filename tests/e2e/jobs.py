"""How the end-to-end tests call the command line."""

import sys

ARPO = [sys.executable, "-m", "arpo_megatron.cli"]
SEED = 7
