"""`shoal run`: a whole run on one machine. It prepares the model, starts every role as a process, and watches them."""
