"""What holds for all tests."""

import signal

# What runs in the background, or under nohup, starts with Ctrl-C or hang-ups ignored, and its child
# processes inherit that: tests that send these signals would wait for ever.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
