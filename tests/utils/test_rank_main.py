"""A rank reports its error on a full disk."""

import subprocess
import sys
from pathlib import Path

FAILING = """
from pathlib import Path
from arpo_megatron.errors import UserError
from arpo_megatron.monitor.events import log_user_errors
from arpo_megatron.utils.rank_main import rank_main, log_failure

@rank_main
def main():
    with log_user_errors(Path(sys.argv[1])):
        try:
            raise UserError("no room")
        except UserError as error:
            log_failure(error)
            raise
main()
"""


def test_full_disk_does_not_hide_the_error_of_a_rank(tmp_path):
    events = tmp_path / "events.jsonl"
    with Path("/dev/full").open("wb") as log:
        command = [sys.executable, "-c", "import sys" + FAILING, str(events)]
        done = subprocess.run(command, stdout=log, stderr=log, timeout=250)
    assert done.returncode == 1
    assert '"kind": "user_error", "text": "no room"' in events.read_text()
