"""Supervised fine-tuning on conversations, and the training of `bundled:tiny`."""
