"""What `scale.py` is made of: prepared requests and their sender, and the coordinator's process."""
