"""The links to the nodes: sockets, commands and replies, and replay after a break."""
