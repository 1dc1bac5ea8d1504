"""Communication between machines, and why it can be trusted: messages, identities, signed requests, invites, members.

messages         messages between members              identity, signing    keys; signed requests and answers
invite           how a machine joins                   server, pace         middleware of every signed route; rate limits
node, calling    a member; its signed requests         history              the public data of a run; its offer
"""
