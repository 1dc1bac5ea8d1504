"""Inference engines: the protocol and the torch engine. Used by workers, evaluation and calibration."""
