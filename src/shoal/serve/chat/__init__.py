"""The chat page: accounts, conversations, replies as they are written, and the routes of the page."""
