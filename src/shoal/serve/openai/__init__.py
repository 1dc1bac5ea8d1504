"""The /v1 routes: requests and responses in the shape of OpenAI's API."""
