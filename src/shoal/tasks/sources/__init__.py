"""Sources: rows of files, data sets and generators, converted to the fields of tasks."""
