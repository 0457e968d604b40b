"""What holds for all tests."""

import signal

from hypothesis import settings

# The same examples for the same code: a new one is found by `make soak`, not by whoever changes something else.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what runs in the background so, and every process below inherits it: none of
    # those that the tests interrupt would notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)
