"""Form a cluster, replace a node, recover or resize a cluster: the operations of an operator."""
