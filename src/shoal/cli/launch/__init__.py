"""`shoal run` and `shoal pool up`: prepare a run, start its roles as processes of this machine, and watch them."""
