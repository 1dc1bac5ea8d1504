"""What runs in a process with another library. These files import nothing of Shoal; `tasks.adapters.library` starts them."""
