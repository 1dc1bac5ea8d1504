"""What each node command starts: one file per role. Every function joins the pool and runs the role's own loop.

`cli` calls them; torch is imported only by the roles that compute.
"""
