"""`gradvac`, but the process of rank 1 is killed, once, when the run has a certain checkpoint.

python dying.py CHECKPOINT MARK ARGUMENTS-OF-GRADVAC
"""

import os
import signal
import sys
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
    checkpoint, mark = map(Path, sys.argv[1:3])
    if os.environ["RANK"] == "1" and not mark.exists():
        threading.Thread(target=wait_and_die, args=(checkpoint, mark), daemon=True).start()
    sys.argv[1:] = sys.argv[3:]
    main()
