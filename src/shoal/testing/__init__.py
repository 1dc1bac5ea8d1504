"""Lies, apart from the honest code: for tests and for the byzantine configs."""
