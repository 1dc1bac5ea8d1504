"""What every role that touches weights shares. A library: it knows no process, message or network."""
