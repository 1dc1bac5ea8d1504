"""Inference engines: the protocol, and the torch engine. Workers, evaluation and calibration use them."""
