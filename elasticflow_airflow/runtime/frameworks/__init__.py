"""Support for Lightning and the Hugging Face Trainer, used by ``runtime.lightning`` and ``runtime.transformers``."""
