"""`shoal serve`: an OpenAI-compatible endpoint with continuous batching, and a page to talk to the model.

decoding/   rows that join and leave, one step at a time (a thread of its own)
openai/     the /v1 routes                       chat/   accounts, conversations, the page's own routes
"""
