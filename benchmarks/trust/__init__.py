"""Whether lies are caught, honest work passes, and a hostile party is held off."""
