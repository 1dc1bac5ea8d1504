"""How fast each part is, alone and against other systems."""
