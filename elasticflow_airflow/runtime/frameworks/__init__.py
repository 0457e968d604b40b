"""What Lightning and the Hugging Face Trainer need besides ``runtime.lightning`` and ``runtime.transformers``."""
