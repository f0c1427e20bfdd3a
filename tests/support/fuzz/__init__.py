"""Random architectures by seed, and the promises that the library must keep on each of them."""
