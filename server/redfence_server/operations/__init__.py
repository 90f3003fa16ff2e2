"""Form a cluster, replace a node, recover a cluster: the operations of an operator."""
