"""Device operations: references, contracts and the selection table. A leaf: imports nothing else of vnext."""
