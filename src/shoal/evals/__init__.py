"""Evaluation: scores a policy on held-out tasks and public benchmarks, and measures a model's pass rates of tasks."""
