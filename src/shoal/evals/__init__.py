"""Evaluation: score a policy on held-out tasks and public benchmarks; measure tasks' pass rates under a model."""
