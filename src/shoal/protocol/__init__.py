"""What crosses machines and how it is trusted: messages, identities, signed requests, invites, and a member's own side.

messages         what members say to each other        identity, signing    keys; signed requests and answers
invite           how a machine joins                   server, pace         what happens around every route; bounds
node, calling    a member's side; its requests         history              a run as anyone sees it, and what it offers
"""
