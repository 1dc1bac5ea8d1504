"""Pools of many machines: failures, load, simulation, and the pages and servers of a pool."""
