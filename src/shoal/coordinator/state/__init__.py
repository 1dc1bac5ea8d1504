"""What a coordinator keeps and how it is opened, led, sealed and copied."""
