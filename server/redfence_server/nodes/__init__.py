"""The links to the nodes: sockets, commands and their replies, replay after a break."""
