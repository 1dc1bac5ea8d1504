"""Inference engines: the protocol, the torch engine with its scheduler, vLLM, and the self-test of exactness.

Used by workers, validators, evaluation, calibration and `serve`.
"""
