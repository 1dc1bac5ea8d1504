"""What crosses machines and how it is trusted: messages, identities, signed requests, invites, and a member's own side.

messages             every message                      identity, signing    keys; signed requests and answers
invite, discovery    how a machine finds and joins      server, pace         what happens around every route; bounds
node, calling        a member's side; its requests      transfer             rollout files, to and from
history              a run as anyone sees it
"""
