"""Every SQL statement of the coordinator, by table. The rest of the room calls the named methods.

`grades` and `credits` are of tables that `groups` and `submissions` make.

Statements use only what both SQLite and PostgreSQL run; `connection` holds what differs between them.
"""
