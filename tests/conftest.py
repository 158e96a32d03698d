"""What holds for all tests."""

import signal

# A shell starts what runs in the background with Ctrl-C ignored, and child processes inherit that:
# tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
