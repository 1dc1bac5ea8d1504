"""`shoal run` compared with TRL's GRPOTrainer."""
