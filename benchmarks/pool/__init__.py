"""Benchmarks of pools of many machines (failures, load, simulation), of the web pages and of `shoal serve`."""
