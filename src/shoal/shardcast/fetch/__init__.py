"""Downloads a published version into a folder: servers, shards, the local cache, and updates in place."""
