"""Pure forwards, their configuration, sharding and weights. Knows arrays and collectives, no requests."""
