"""What crosses machines and how it is trusted: messages, identities, signed requests, invites, and a member's own side.

messages         messages between members              identity, signing    keys; signed requests and answers
invite           how a machine joins                   server, pace         middleware of every signed route; rate limits
node, calling    a member; its signed requests         history              what anyone may read of a run; its offer
"""
