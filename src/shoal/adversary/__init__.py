"""Workers that lie: the lies of the byzantine configs, and the attack matrix. No honest module imports this."""
