"""An emulated wide-area network, and a class for each system that sends a file over it."""
