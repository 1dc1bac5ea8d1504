"""What `churn.py` is made of: a network of one namespace per process, the processes in it, faults, and the verdict."""
