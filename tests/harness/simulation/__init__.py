"""A cluster on virtual time: the product's servers over simulated nodes, networks, clocks and clients."""
