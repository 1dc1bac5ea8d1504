"""The trusted trainer: batches of accepted groups in, policy versions out."""
