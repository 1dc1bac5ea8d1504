"""Whether lies are caught, honest work passes, and abuse of servers stays harmless."""
