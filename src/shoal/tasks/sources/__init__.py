"""Sources: rows of files, data sets and generators, read as the fields of tasks."""
