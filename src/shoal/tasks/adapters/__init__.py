"""Other libraries' tasks as sources: `reasoning_gym` and `verifiers`, each an extra, each in processes of its own.

`far/` holds what runs in those processes: files that import nothing of Shoal, so that another interpreter can run them.
"""
