"""`shoal serve`: an OpenAI-compatible endpoint with continuous batching, and a page to talk to the model.

service      the server                          versions    which weights are in memory
scheduler    steps all rows, in a thread of its own; generation and text: one row, and its text
prompt       messages to tokens                  proof       a reply as a file that anyone can recompute
openai/      the /v1 routes                      chat/       accounts, conversations, the page's own routes
"""
