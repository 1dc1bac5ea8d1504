"""What runs learn, and how the age of rollouts, length limits and precision change it."""
