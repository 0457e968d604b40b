"""The commands ``simulate``, ``compare`` and ``synthesize``."""
