"""What a member may do now: its state, how long a suspension lasts, what the operator changes."""
