"""What crosses machines and how it is trusted: messages, identities, signed requests, invites, and a member's own side."""
