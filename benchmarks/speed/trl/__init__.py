"""`shoal run` against GRPOTrainer of TRL."""
