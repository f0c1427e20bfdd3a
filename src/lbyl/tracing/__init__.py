"""From one recorded run of a network to its graph."""
