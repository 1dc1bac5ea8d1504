"""Sources: rows of files, data sets and generators, read as the fields of tasks.

reading    one source of a config, row by row            schemas     public data sets, one function each
locate     its files: by split, in a folder or the hub   fields      columns by name, for any other file
rows       the rows of one file                          code_tests  unit tests in one JSON format
arithmetic, functions    generators
"""
