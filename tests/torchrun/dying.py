"""`gradvac`, but the process of rank 1 is killed, once, when a certain checkpoint is there.

The environment names the checkpoint (DIES_AT), and what is left to be seen of it (MARK).
"""

import os
import signal
import threading
import time
from pathlib import Path

from gradvac.cli import main


def wait_and_die(checkpoint: Path, mark: Path) -> None:
    """Wait for the checkpoint, leave a mark, and go."""
    while not checkpoint.exists():
        time.sleep(0.005)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    checkpoint, mark = (Path(os.environ[name]) for name in ("DIES_AT", "MARK"))
    if os.environ["RANK"] == "1" and not mark.exists():
        threading.Thread(target=wait_and_die, args=(checkpoint, mark), daemon=True).start()
    main()
