"""Where a coordinator keeps what it knows: SQLite files in its folder, or the PostgreSQL that it leads."""
