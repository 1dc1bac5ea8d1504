"""`shoal serve`: an OpenAI-compatible endpoint with continuous batching, and a page to talk to the model.

service       the server, /health, /metrics       versions     the policy versions in memory
scheduler     decodes all requests in its thread  generation   one completion in progress
prompt        messages to tokens                  detokenizer  tokens to text, stop strings
threads       shares slots and threads fairly     proof        a reply file that anyone can recompute
openai/       the /v1 routes                      chat/        accounts, conversations, the page's own routes
"""
