"""The node commands, one file per role. Each function joins the pool and runs the role's loop.

`cli` calls them; torch is imported only by the roles that compute.
"""
