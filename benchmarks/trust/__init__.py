"""Benchmarks that check that lies are caught, that honest work passes, and that abuse of servers stays harmless."""
