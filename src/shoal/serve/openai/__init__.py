"""The /v1 routes: requests and answers in the shape of OpenAI's API."""
