"""Every SQL statement of the coordinator, one file per table. The rest of the room calls the named methods.

Statements use only what both SQLite and PostgreSQL run; `connection` holds what differs between them.
"""
