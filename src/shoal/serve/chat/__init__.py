"""The chat page: accounts, conversations, replies in progress, and the page's routes."""
