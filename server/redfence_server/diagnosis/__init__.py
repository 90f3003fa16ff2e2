"""`redfence doctor`: examine the nodes, and say what is wrong with them."""
