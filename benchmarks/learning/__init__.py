"""What is learned: whole runs, and how age, limits and precision change learning."""
