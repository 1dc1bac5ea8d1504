"""`shoal serve`: an OpenAI-compatible endpoint with continuous batching, and a page to talk to the model.

service      the server                          versions    the policy versions in memory
scheduler    decodes all rows in its own thread; generation and text: one row and its text
prompt       messages to tokens                  proof       a reply file that anyone can recompute
openai/      the /v1 routes                      chat/       accounts, conversations, the page's own routes
"""
