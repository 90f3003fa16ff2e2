"""A whole cluster in one thread on virtual time: the product's servers over simulated nodes, networks, clocks and clients."""
