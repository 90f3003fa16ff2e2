"""`redfence doctor`: examine the nodes, and report their problems."""
