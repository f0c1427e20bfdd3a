"""What the tests share: small networks, published ones, references to compare with."""
