"""Every scheduling policy of the literature that is compared here, one file each, all behind :mod:`port`."""
