"""What holds for all tests."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what runs in the background so, and every process below inherits it: none of
    # those that the tests interrupt would notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)
