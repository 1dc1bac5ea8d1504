"""Pools of many machines: failures, load and simulation. Also the web pages and `shoal serve`."""
