"""What accepted work earns, what is staked, and how both are settled on a chain."""
